"""REINFORCE leave-one-out (RLOO, Ahmadian et al. 2024): the mean of the group's other scores as the baseline.

    A_i = score_i - mean of the scores j != i,     -min(ratio * A, clip(ratio) * A) with the ratio of the sequence

A completion is one action. The clip is PPO's, for more than one update on the same completions.
"""

from __future__ import annotations

from rlhf.algorithms.grpo import GROUP_OF_8
from rlhf.algorithms.presets import preset

preset(
    "rloo",
    {
        "algorithm": {
            "advantage": {"type": "group", "baseline": "leave_one_out"},
            "policy_loss": {"ratio": "sequence", "aggregate": "sequence_mean"},
            "kl": {"placement": "reward"},
        },
        **GROUP_OF_8,
    },
)
