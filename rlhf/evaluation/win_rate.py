"""A against B on the same prompts: win rate with ties, differences, and intervals by bootstrap over prompts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
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


def bootstrap_crossed(values: Float[Tensor, "S P"], *, seed: int = 0) -> Interval:
    """The mean of `values` [seeds, prompts] and its interval, seeds and prompts resampled each on their own.

    All seeds share the prompts, so the two are crossed: each of the 2,000 resamples draws S seeds and P prompts with
    replacement and takes the mean over all their pairs (Owen 2007). With one seed it is the interval over prompts;
    with two or three, what the seeds contribute is only roughly known.
    """
    draw = generator(seed, "bootstrap")
    seeds, prompts = values.shape
    rows = torch.randint(seeds, (RESAMPLES, seeds), generator=draw)
    columns = torch.randint(prompts, (RESAMPLES, prompts), generator=draw)
    wide = values.double()
    # The mean over the drawn cells, from counts: counts_s^T V counts_p / (S P).
    by_seed = _counts(rows, seeds) @ wide / seeds
    means = (by_seed * _counts(columns, prompts)).sum(dim=1) / prompts
    low, high = torch.quantile(means, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Interval(float(wide.mean()), low, high)


def _counts(drawn: Int[Tensor, "R K"], size: int) -> Float[Tensor, "R K"]:
    """How often each of `size` numbers was drawn in each row."""
    return torch.zeros(len(drawn), size, dtype=torch.float64).scatter_add(
        1, drawn, torch.ones(drawn.shape, dtype=torch.float64)
    )
