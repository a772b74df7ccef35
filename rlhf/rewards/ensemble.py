"""Several reward sources as one: mean, minimum, or mean less its uncertainty."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf.errors import ConfigError
from rlhf.rewards.source import RewardSource
from rlhf.types import Completions, Scores

How = Literal["mean", "minimum", "mean_minus_std"]


class EnsembleReward:
    """Scores every completion by every member and combines them; members' scores and disagreement are parts.

        mean: mean_k r_k    minimum: min_k r_k    mean_minus_std: mean_k r_k - c * std_k r_k

    Coste et al. (2024): minimum is worst-case optimization. Their uncertainty-weighted form subtracts the variance;
    here it is the standard deviation (the population's, so that one member has none), in the unit of the scores.
    """

    def __init__(
        self, members: Sequence[RewardSource], *, how: How, std_coef: float = 1.0, names: Sequence[str] | None = None
    ) -> None:
        """`names` are what the members' parts are called; without them sources.0, sources.1, ... as in the config.

        Raises:
            ConfigError: there is no member.
        """
        if not members:
            raise ConfigError("reward.source.sources is empty: an ensemble needs at least one source")
        names = names or [f"sources.{i}" for i in range(len(members))]
        assert len(set(names) - {"disagreement"}) == len(members)
        self.members = dict(zip(names, members, strict=True))
        self.how = how
        self.std_coef = std_coef

    def __call__(self, completions: Completions) -> Scores:
        """See RewardSource."""
        scores = {name: member(completions) for name, member in self.members.items()}
        parts: dict[str, Float[Tensor, " B"]] = {}
        for name, one in scores.items():
            parts[name] = one.values
            parts |= {f"{name}/{part}": values for part, values in one.parts.items()}
        stacked = torch.stack([one.values for one in scores.values()])
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
