"""Masked statistics. A mean is kept as two sums, so that micro-batches and ranks can be added up before dividing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor


@dataclass(frozen=True)
class Mean:
    """A weighted mean, kept as two sums so that means add exactly and are divided once."""

    total: float
    weight: float

    def __add__(self, other: Mean) -> Mean:
        """Combine two means into the mean over both."""
        return Mean(self.total + other.total, self.weight + other.weight)

    @property
    def value(self) -> float:
        """Return total / weight; NaN when nothing was counted."""
        return self.total / self.weight if self.weight else float("nan")

    @classmethod
    def of(cls, values: Tensor, mask: Bool[Tensor, "*shape"] | None = None) -> Mean:
        """Compute the mean of `values` where `mask` is True (of all values without a mask)."""
        values = values.detach().double()
        if mask is None:
            return cls(values.sum().item(), float(values.numel()))
        return cls(masked_sum(values, mask).item(), float(mask.sum().item()))


def masked_sum(values: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> Float[Tensor, ""]:
    """Sum the live entries; entries outside the mask have no effect, even if NaN."""
    return torch.where(mask, values, 0.0).sum()


def masked_mean(values: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> Float[Tensor, ""]:
    """Average the live entries; 0 when there are none."""
    return masked_sum(values, mask) / mask.sum().clamp(min=1)


def whiten(
    values: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    shift_mean: bool = True,
    eps: float = 1e-8,
) -> Float[Tensor, "*shape"]:
    """Normalize the live entries to zero mean and unit variance; the others become zero.

    (x - mean) / sqrt(var + eps); `shift_mean=False` adds the mean back. The variance is the population's (divided by
    n), as in lm-human-preferences.
    """
    mean = masked_mean(values, mask)
    variance = masked_mean((values - mean) ** 2, mask)
    scaled = (values - mean) * torch.rsqrt(variance + eps)
    return torch.where(mask, scaled if shift_mean else scaled + mean, 0.0)
