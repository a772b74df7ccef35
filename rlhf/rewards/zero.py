"""A reward source that scores every completion 0, for a run that learns from something else, such as a teacher."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from rlhf.rewards.source import RewardSource, Source, SourceContext

if TYPE_CHECKING:
    from rlhf.types import Completions, Scores


class ZeroSource(Source):
    """A score of 0 for every completion."""

    is_learned: ClassVar[bool] = False
    is_constant: ClassVar[bool] = True
    asks_on_main_rank: ClassVar[bool] = False

    type: Literal["zero"] = "zero"

    def build(self, context: SourceContext) -> RewardSource:
        """Return a function that scores nothing."""

        def score(completions: Completions) -> Scores:
            import torch

            from rlhf.types import Scores

            return Scores(values=torch.zeros(len(completions)), parts={})

        return score
