"""Reward sources in distributed runs: every rank gets the same scores as a single process would."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf.errors import ConfigError
from rlhf.rewards.source import RewardSource
from rlhf.runtime.distributed import Distributed
from rlhf.types import Completions, Scores

EnsembleMode = Literal["mean", "minimum", "mean_minus_std"]


class EnsembleReward:
    """Scores every completion with every member and combines the scores.

        mean: mean_k r_k    minimum: min_k r_k    mean_minus_std: mean_k r_k - c * std_k r_k

    Coste et al. (2024): minimum is worst-case optimization. Their uncertainty-weighted form subtracts the variance;
    here it is the standard deviation (of the population, so that it is 0 for one member), in the unit of the scores.

    The parts are each member's scores and parts, and the standard deviation over members as "disagreement".
    """

    def __init__(
        self,
        members: Sequence[RewardSource],
        *,
        how: EnsembleMode,
        std_coef: float = 1.0,
        names: Sequence[str] | None = None,
    ) -> None:
        """Combine `members`, whose parts are called `names`: by default sources.0, sources.1, ... as in the config.

        Raises:
            ConfigError: there are no members.
        """
        if not members:
            raise ConfigError("reward.source.sources is empty: an ensemble needs at least one source")
        names = names or [f"sources.{i}" for i in range(len(members))]
        assert len(set(names) - {"disagreement"}) == len(members)
        self.members = dict(zip(names, members, strict=True))
        self.how = how
        self.std_coef = std_coef

    def __call__(self, completions: Completions) -> Scores:
        """Score the completions with every member and combine the scores."""
        scores = {name: member(completions) for name, member in self.members.items()}
        parts: dict[str, Float[Tensor, " B"]] = {}
        for name, member_scores in scores.items():
            parts[name] = member_scores.values
            parts |= {f"{name}/{part}": values for part, values in member_scores.parts.items()}
        stacked = torch.stack([member_scores.values for member_scores in scores.values()])
        parts["disagreement"] = stacked.std(dim=0, correction=0)
        return Scores(values=self._combine(stacked, parts["disagreement"]), parts=parts)

    def _combine(self, scores: Float[Tensor, "K B"], std: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
        match self.how:
            case "mean":
                return scores.mean(dim=0)
            case "minimum":
                return scores.amin(dim=0)
            case "mean_minus_std":
                return scores.mean(dim=0) - self.std_coef * std


class ShardedReward:
    """Wraps a source that scores each completion independently: every rank scores its share of the batch."""

    def __init__(self, source: RewardSource, ranks: Distributed) -> None:
        self.source = source
        self.ranks = ranks

    def __call__(self, completions: Completions) -> Scores:
        """Score this rank's share of the completions and gather the scores of all ranks."""
        names: list[str] = []

        def score(share: Completions) -> tuple[Tensor, ...]:
            scores = self.ranks.all_succeed(lambda: self.source(share))
            names[:] = sorted(scores.parts)
            return (scores.values, *(scores.parts[name] for name in names))

        values, *parts = self.ranks.map_rows_to_tensors(completions, score)
        return Scores(values=values, parts=dict(zip(names, parts, strict=True)))


class MainRankReward:
    """Wraps a source that may look at the whole batch or must be asked once: rank 0 asks it and broadcasts the scores.

    A Python function or a server sees the same batch as in a single-process run, so its scores cannot depend on the
    number of ranks.
    """

    def __init__(self, source: RewardSource, ranks: Distributed) -> None:
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
