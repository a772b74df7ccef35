"""A against B on the same prompts: win rate with ties, differences, and intervals by bootstrap over prompts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf.runtime.seeding import generator

RESAMPLES = 2000


@dataclass(frozen=True)
class Interval:
    """An estimate and its 95 % percentile-bootstrap interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"


def win_rate(a: Float[Tensor, " N"], b: Float[Tensor, " N"], *, seed: int = 0) -> Interval:
    """Share of prompts on which A scores higher than B; a tie counts half."""
    return bootstrap((a > b).double() + 0.5 * (a == b).double(), seed=seed)


def mean_difference(a: Float[Tensor, " N"], b: Float[Tensor, " N"], *, seed: int = 0) -> Interval:
    """Mean of A - B, paired by prompt."""
    return bootstrap(a.double() - b.double(), seed=seed)


def bootstrap(values: Float[Tensor, " N"], *, seed: int = 0) -> Interval:
    """The mean of `values` and the percentiles 2.5 and 97.5 of its means over 2,000 resamples with replacement."""
    index = torch.randint(len(values), (RESAMPLES, len(values)), generator=generator(seed, "bootstrap"))
    means = values.double()[index].mean(dim=1)
    low, high = torch.quantile(means, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Interval(float(values.double().mean()), low, high)
