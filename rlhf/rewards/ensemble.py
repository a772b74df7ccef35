"""Reward sources in distributed runs: every rank gets the same scores as a single process would."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf.errors import ConfigError, NonFiniteScores
from rlhf.rewards.combine import EnsembleMode, combine, disagreement, normalize_then_sum
from rlhf.rewards.source import RewardSource
from rlhf.runtime.distributed import Distributed
from rlhf.types import Completions, Scores


class EnsembleReward:
    """Scores every completion with every member and combines the scores; see rlhf.rewards.combine.

    A member's score is NaN where it does not apply. The parts are each member's scores and parts, and the standard
    deviation of the weighted scores over members as "disagreement"; of gdpo, also their "weighted_sum".
    """

    def __init__(
        self,
        members: Sequence[RewardSource],
        *,
        how: EnsembleMode,
        std_coef: float = 1.0,
        weights: Sequence[float] | None = None,
        names: Sequence[str] | None = None,
        may_abstain: bool = False,
    ) -> None:
        """Combine `members`, whose parts are called `names`: by default sources.0, sources.1, ... as in the config.

        Without `weights` every member has weight 1. With `may_abstain` a completion to which no member applies has the
        score NaN, which otherwise is an error.

        Raises:
            ConfigError: there are no members.
        """
        if not members:
            raise ConfigError("reward.source.sources is empty: an ensemble needs at least one source")
        names = names or [f"sources.{i}" for i in range(len(members))]
        assert len(set(names) - {"disagreement", "weighted_sum"}) == len(members)
        self.members = dict(zip(names, members, strict=True))
        self.how = how
        self.std_coef = std_coef
        self.weights = torch.tensor([1.0] * len(members) if weights is None else list(weights), dtype=torch.float64)
        self.may_abstain = may_abstain

    def __call__(self, completions: Completions) -> Scores:
        """Score the completions with every member and combine the scores.

        gdpo compares the completions of a prompt. Where there is one of each, as in evaluation, the score is the
        weighted sum.

        Raises:
            NonFiniteScores: no member applies to a completion.
        """
        scores = {name: member(completions) for name, member in self.members.items()}
        parts: dict[str, Float[Tensor, " B"]] = {}
        for name, member_scores in scores.items():
            parts[name] = member_scores.values
            parts |= {f"{name}/{part}": values for part, values in member_scores.parts.items()}
        stacked = torch.stack([member_scores.values for member_scores in scores.values()])
        weights = self.weights.to(stacked)
        parts["disagreement"] = disagreement(stacked, weights)
        values = combine(stacked, weights, how=self.how, std_coef=self.std_coef)
        if self.how == "gdpo":
            parts["weighted_sum"] = values
            if completions.group_size > 1:
                values = normalize_then_sum(stacked, weights, completions.group_size)
        self._check(values)
        return Scores(values=values, parts=parts)

    def _check(self, values: Float[Tensor, " B"]) -> None:
        missing = values.isnan().nonzero().flatten().tolist()
        if missing and not self.may_abstain:
            raise NonFiniteScores(
                f"none of the ensemble's {len(self.members)} sources ({', '.join(self.members)}) applies to "
                f"{len(missing)} of {len(values)} completions (the first: row {missing[0]}): add one that always does"
            )


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
