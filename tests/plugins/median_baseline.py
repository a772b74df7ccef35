"""A user's advantage in a file of its own: the score less the median of its group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from jaxtyping import Float
from torch import Tensor

from rlhf.algo.advantages import per_row
from rlhf.algo.masked import Mean
from rlhf.algorithms.advantage import Advantage
from rlhf.types import Experience, Rollout


class MedianBaseline(Advantage):
    """The score less the median of its group."""

    is_group: ClassVar[bool] = True
    metrics: ClassVar[str] = "group/median | score | mean over prompts of the median score"

    type: Literal["median"] = "median"
    scale: float = 1.0
    """Multiplies the advantages."""

    def compute(
        self, rollout: Rollout, rewards: Float[Tensor, "B T"]
    ) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
        """Compare the sum of each row's rewards with the median of its group."""
        totals = rewards.sum(dim=1).view(-1, rollout.group_size)
        advantages = self.scale * (totals - totals.median(dim=1, keepdim=True).values).flatten()
        return per_row(advantages, rewards, rollout.completion_mask)

    def measure(self, experience: Experience) -> Mapping[str, Mean]:
        """Average the medians."""
        return {"group/median": Mean.of(experience.scores.view(-1, experience.group_size).median(dim=1).values)}
