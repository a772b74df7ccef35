"""The rewards of an environment as scores: their sum over the turns of an episode."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from rlhf.rewards.source import RewardSource, Source, SourceContext

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from rlhf.types import Completions, Scores


class EnvironmentSource(Source):
    """The return of an episode: the sum of the rewards that the section `environment` gave (undiscounted)."""

    asks_on_main_rank: ClassVar[bool] = False
    reads_episodes: ClassVar[bool] = True
    is_learned: ClassVar[bool] = False

    type: Literal["environment"] = "environment"

    def build(self, context: SourceContext) -> RewardSource:
        """Return the source that sums the rewards of each episode."""
        return episode_returns


def episode_returns(completions: Completions) -> Scores:
    """Sum the turn rewards of each row; one whose environment failed gets the mean of its group, and no loss.

    So the failure of an environment moves no mean, and the row is neither the best nor the worst of its group.
    """
    import torch

    from rlhf.types import Scores

    returns = torch.where(completions.action_mask, completions.turn_rewards, 0.0).sum(dim=1).float()
    kept = completions.action_mask.any(dim=1)
    if bool(kept.all()):
        return Scores(values=returns, parts={})
    groups, live = returns.view(-1, completions.group_size), kept.view(-1, completions.group_size)
    overall = _mean(returns[None], kept[None])
    filled = torch.where(live.any(dim=1, keepdim=True), _mean(groups, live), overall)
    return Scores(values=torch.where(live, groups, filled).flatten(), parts={})


def _mean(values: Float[Tensor, "N G"], live: Bool[Tensor, "N G"]) -> Float[Tensor, "N 1"]:
    """Average the live entries of each row, exactly their value if all of them are equal; 0 without any."""
    import torch

    mean = torch.where(live, values, 0.0).sum(dim=1, keepdim=True) / live.sum(dim=1, keepdim=True).clamp(min=1)
    first = values.gather(1, live.int().argmax(dim=1, keepdim=True))
    same = (torch.where(live, values, first) == first).all(dim=1, keepdim=True) & live.any(dim=1, keepdim=True)
    return torch.where(same, first, mean)
