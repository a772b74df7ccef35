"""Reward sources over several processes: the same scores as in one, known to all."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf.rewards.source import RewardSource
from rlhf.runtime.ranks import Ranks
from rlhf.types import Completions, Scores


class DealtReward:
    """A source that judges each completion by itself: every process scores its share of them."""

    def __init__(self, source: RewardSource, ranks: Ranks) -> None:
        self.source = source
        self.ranks = ranks

    def __call__(self, completions: Completions) -> Scores:
        """See RewardSource."""
        names: list[str] = []

        def work(part: Completions) -> tuple[Tensor, ...]:
            found = self.ranks.agreed(lambda: self.source(part))
            names[:] = sorted(found.parts)
            return (found.values, *(found.parts[name] for name in names))

        values, *parts = self.ranks.spread_tensors(completions, work)
        return Scores(values=values, parts=dict(zip(names, parts, strict=True)))


class MainReward:
    """A source that may look at the whole batch, or must be asked once: the main process asks it and tells the others.

    A Python function or a server sees the batch that it would see of one process, so its scores cannot depend on how
    many there are.
    """

    def __init__(self, source: RewardSource, ranks: Ranks) -> None:
        self.source = source
        self.ranks = ranks

    def __call__(self, completions: Completions) -> Scores:
        """See RewardSource."""

        def ask() -> tuple[Tensor, dict[str, Tensor]]:
            found = self.source(completions)
            return found.values, dict(found.parts)

        values, parts = self.ranks.on_main(ask)
        assert isinstance(values, torch.Tensor)
        return Scores(values=values, parts=parts)
