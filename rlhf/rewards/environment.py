"""The rewards of an environment as scores: their sum over the turns of an episode."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from rlhf.rewards.source import RewardSource, Source, SourceContext

if TYPE_CHECKING:
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
    """Sum the turn rewards of each row; NaN if its environment failed, and the row does not count."""
    import torch

    from rlhf.types import Scores

    returns = torch.where(completions.action_mask, completions.turn_rewards, 0.0).sum(dim=1).float()
    return Scores(values=returns.where(completions.counted, torch.nan), parts={})
