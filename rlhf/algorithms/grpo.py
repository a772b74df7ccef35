"""Group relative policy optimization (GRPO, Shao et al. 2024) and Dr. GRPO (Liu et al. 2025).

The baseline of a completion is made of the other completions of its prompt, so no critic is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rlhf.algorithms.advantage import Advantage, StepSizes
from rlhf.algorithms.presets import preset

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from rlhf.types import Rollout

GROUP_OF_8: dict[str, Any] = {"sampling": {"completions_per_prompt": 8}}

preset(
    "grpo",
    {
        "algorithm": {
            "advantage": {"type": "group"},
            "policy_loss": {"aggregate": "sequence_mean"},
            "kl": {"placement": "loss", "estimator": "k3", "coef": 0.04},
        },
        **GROUP_OF_8,
    },
)
preset(
    "dr_grpo",
    {
        "algorithm": {
            "advantage": {"type": "group", "baseline": "centered"},
            "policy_loss": {"aggregate": "constant"},
        },
        **GROUP_OF_8,
    },
)


class Group(Advantage):
    """A baseline from the other completions of the same prompt; no critic."""

    is_group: ClassVar[bool] = True
    reads_old_logprobs: ClassVar[bool] = False

    type: Literal["group"] = "group"
    baseline: Literal["normalized", "centered", "leave_one_out"] = "normalized"
    """normalized: (score - mean) / std (GRPO); centered: score - mean (Dr. GRPO); leave_one_out: RLOO."""

    @property
    def divides_by_spread(self) -> bool:
        """Return whether scores are divided by the standard deviation of their group."""
        return self.baseline == "normalized"

    @property
    def only_centers(self) -> bool:
        """Return whether scores lose the mean of their group and nothing else is done to them."""
        return self.baseline == "centered"

    def check_sizes(self, sizes: StepSizes) -> None:
        """Check that a prompt has other completions to compare with."""
        if sizes.group_size < 2:
            raise ValueError("a group baseline needs sampling.completions_per_prompt >= 2")

    def compute(
        self, rollout: Rollout, rewards: Float[Tensor, "B T"]
    ) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
        """Compare the sum of each row's rewards with its group, by a function of rlhf.algo.advantages."""
        from rlhf.algo.advantages import group_centered, group_normalized, leave_one_out, per_row

        baselines = {
            "normalized": group_normalized,
            "centered": group_centered,
            "leave_one_out": leave_one_out,
        }
        kept = rollout.action_mask.any(dim=1)  # an episode whose environment failed has no action to learn from
        advantages = baselines[self.baseline](
            rewards.sum(dim=1), rollout.group_size, kept=None if bool(kept.all()) else kept
        )
        return per_row(advantages, rewards, rollout.action_mask)
