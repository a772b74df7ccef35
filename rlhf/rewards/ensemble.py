"""Several reward sources as one: mean, minimum, or mean less its uncertainty."""

from __future__ import annotations

from collections.abc import Mapping
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

    def __init__(self, members: Mapping[str, RewardSource], *, how: How, std_coef: float = 1.0) -> None:
        """`members` by the names that their parts carry.

        Raises:
            ConfigError: there is no member.
        """
        if not members:
            raise ConfigError("reward.source.sources is empty: an ensemble needs at least one source")
        self.members = dict(members)
        self.how = how
        self.std_coef = std_coef

    def __call__(self, completions: Completions) -> Scores:
        """See RewardSource."""
        parts: dict[str, Float[Tensor, " B"]] = {}
        for name, member in self.members.items():
            scores = member(completions)
            parts[name] = scores.values
            parts |= {f"{name}/{part}": values for part, values in scores.parts.items()}
        scores_of_members = torch.stack([parts[name] for name in self.members])
        parts["disagreement"] = scores_of_members.std(dim=0, correction=0)
        return Scores(values=self._combine(scores_of_members, parts["disagreement"]), parts=parts)

    def _combine(self, scores: Float[Tensor, "K B"], std: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
        match self.how:
            case "mean":
                return scores.mean(dim=0)
            case "minimum":
                return scores.amin(dim=0)
            case "mean_minus_std":
                return scores.mean(dim=0) - self.std_coef * std
