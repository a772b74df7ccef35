"""Group sequence policy optimization (GSPO, Zheng et al. 2025): one importance ratio per sequence, of its mean token.

ratio = (pi(y) / pi_old(y))^(1 / |y|) (eq. 7),     -min(ratio * A, clip(ratio, 1 - 3e-4, 1 + 4e-4) * A)
"""

from __future__ import annotations

from rlhf.algorithms.grpo import GROUP_OF_8
from rlhf.algorithms.presets import preset

preset(
    "gspo",
    {
        "algorithm": {
            "advantage": {"type": "group"},
            "policy_loss": {
                "ratio": "sequence_mean",
                "clip_eps_low": 3e-4,
                "clip_eps_high": 4e-4,
                "aggregate": "sequence_mean",
            },
        },
        **GROUP_OF_8,
    },
)
