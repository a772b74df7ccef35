"""DAPO (Yu et al. 2025): GRPO with a higher clip above, a mean over tokens, and without groups of equal scores.

    -min(ratio * A, clip(ratio, 1 - 0.2, 1 + 0.28) * A),  the mean over all tokens of the step;  no KL penalty

Groups whose scores are all equal are dropped; refill_rounds samples other prompts in their place.
"""

from __future__ import annotations

from rlhf.algorithms.grpo import GROUP_OF_8
from rlhf.algorithms.presets import preset

preset(
    "dapo",
    {
        "algorithm": {
            "advantage": {"type": "group"},
            "policy_loss": {"clip_eps_high": 0.28},
            "drop_uniform_groups": True,
        },
        **GROUP_OF_8,
    },
)
