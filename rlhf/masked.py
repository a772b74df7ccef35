"""Statistics that add: a mean is two sums until all micro-batches and processes have added theirs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor


@dataclass(frozen=True)
class Mean:
    """A weighted mean, kept as its two sums so that it can be added up exactly and divided once."""

    total: float
    weight: float

    def __add__(self, other: Mean) -> Mean:
        """The mean over both."""
        return Mean(self.total + other.total, self.weight + other.weight)

    @property
    def value(self) -> float:
        """total / weight; NaN when nothing was counted."""
        return self.total / self.weight if self.weight else float("nan")

    @classmethod
    def of(cls, values: Tensor, mask: Bool[Tensor, "*shape"] | None = None) -> Mean:
        """The mean of `values` where `mask` is True (everywhere without one)."""
        values = values.detach().double()
        if mask is None:
            return cls(values.sum().item(), float(values.numel()))
        return cls(masked_sum(values, mask).item(), float(mask.sum().item()))


def masked_sum(values: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> Float[Tensor, ""]:
    """Sum over the live entries; what the mask hides is never read, NaN included."""
    return torch.where(mask, values, 0.0).sum()


def masked_mean(values: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> Float[Tensor, ""]:
    """Mean over the live entries; 0 when there are none."""
    return masked_sum(values, mask) / mask.sum().clamp(min=1)


def whiten(
    values: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    shift_mean: bool = True,
    eps: float = 1e-8,
) -> Float[Tensor, "*shape"]:
    """(x - mean) / sqrt(var + eps) over the live entries, zero elsewhere; `shift_mean=False` puts the mean back.

    The variance is the population's (divided by n), as in lm-human-preferences.
    """
    mean = masked_mean(values, mask)
    variance = masked_mean((values - mean) ** 2, mask)
    scaled = (values - mean) * torch.rsqrt(variance + eps)
    return torch.where(mask, scaled if shift_mean else scaled + mean, 0.0)
