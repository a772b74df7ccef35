"""Reward sources in distributed runs: every rank gets the same scores as a single process would."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf.rewards.source import RewardSource
from rlhf.runtime.ranks import Ranks
from rlhf.types import Completions, Scores


class DealtReward:
    """Wraps a source that scores each completion independently: every rank scores its share of the batch."""

    def __init__(self, source: RewardSource, ranks: Ranks) -> None:
        self.source = source
        self.ranks = ranks

    def __call__(self, completions: Completions) -> Scores:
        """Score this rank's share of the completions and gather the scores of all ranks."""
        names: list[str] = []

        def score(share: Completions) -> tuple[Tensor, ...]:
            scores = self.ranks.agreed(lambda: self.source(share))
            names[:] = sorted(scores.parts)
            return (scores.values, *(scores.parts[name] for name in names))

        values, *parts = self.ranks.spread_tensors(completions, score)
        return Scores(values=values, parts=dict(zip(names, parts, strict=True)))


class MainReward:
    """Wraps a source that may look at the whole batch or must be asked once: rank 0 asks it and broadcasts the scores.

    A Python function or a server sees the same batch as in a single-process run, so its scores cannot depend on the
    number of ranks.
    """

    def __init__(self, source: RewardSource, ranks: Ranks) -> None:
        self.source = source
        self.ranks = ranks

    def __call__(self, completions: Completions) -> Scores:
        """Score the completions on rank 0 and broadcast the scores to all ranks."""

        def ask() -> tuple[Tensor, dict[str, Tensor]]:
            scores = self.source(completions)
            return scores.values, dict(scores.parts)

        values, parts = self.ranks.on_main(ask)
        assert isinstance(values, torch.Tensor)
        return Scores(values=values, parts=parts)
