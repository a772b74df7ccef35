"""A cost beside the reward: both are asked for the same completions, and combined by the multiplier of the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rlhf.errors import RewardError
from rlhf.rewards.source import RewardSource

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from rlhf.types import Completions, Scores

COST, REWARD = "constraint/cost", "constraint/reward"
"""The parts with the cost of each completion, and with its score before the two were combined."""

Combine = Callable[["Float[Tensor, ' B']", "Float[Tensor, ' B']"], "Float[Tensor, ' B']"]
"""Combines scores and costs of the completions into the reward to train on."""


class CostedReward:
    """Wraps a reward and a cost: a run trains on their combination, or without one on the reward alone.

    The parts are the reward's, the cost's as cost.NAME, and COST and REWARD.
    """

    def __init__(self, reward: RewardSource, cost: RewardSource, combine: Combine | None) -> None:
        """Set reward, cost and their combination; None measures the cost and trains on the reward."""
        self.reward, self.cost, self.combine = reward, cost, combine

    def __call__(self, completions: Completions) -> Scores:
        """Score the completions with both and combine the scores.

        Raises:
            RewardError: reward or cost fails, or the reward has a part of a name that is kept for the cost.
        """
        from rlhf.types import Scores

        scores, costs = self.reward(completions), self.cost(completions)
        own = {COST: costs.values.to(scores.values), REWARD: scores.values}
        own |= {f"cost.{name}": values for name, values in costs.parts.items()}
        clash = sorted(own.keys() & scores.parts.keys())
        if clash:
            raise RewardError(f"the reward names a part {clash[0]!r}, which reward.cost keeps for itself; rename it")
        values = scores.values if self.combine is None else self.combine(own[REWARD], own[COST])
        return Scores(values=values, parts={**scores.parts, **own})
