"""Masked statistics. A mean is kept as two sums, so that micro-batches and ranks can be added up before dividing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf.batching import Number, read_numbers, widen


@dataclass(frozen=True)
class Mean:
    """A weighted mean, kept as two sums so that means add exactly and are divided once.

    Sums of tensors on a GPU stay there until they are read: `read_means` reads many at once.
    """

    total: Number
    weight: Number

    def __add__(self, other: Mean) -> Mean:
        """Combine two means into the mean over both."""
        return Mean(self.total + other.total, self.weight + other.weight)

    @property
    def value(self) -> float:
        """Return total / weight; NaN when nothing was counted."""
        total, weight = read_numbers([self.total, self.weight])
        return total / weight if weight else float("nan")

    @classmethod
    def of(cls, values: Tensor, mask: Bool[Tensor, "*shape"] | None = None) -> Mean:
        """Compute the mean of `values` where `mask` is True (of all values without a mask)."""
        values = widen(values.detach())
        if mask is None:
            return cls(_number(values.sum()), float(values.numel()))
        return cls(_number(masked_sum(values, mask)), _number(mask.sum()))


def _number(total: Tensor) -> Number:
    """Return a sum as a Python number; one on a GPU as it is, since reading it would wait."""
    return total if total.is_cuda else float(total.item())


def read_means(means: Sequence[Mapping[str, Mean]]) -> list[dict[str, Mean]]:
    """Return the means with their sums as Python numbers; all that are on a device are read in one go."""
    sums = [number for named in means for mean in named.values() for number in (mean.total, mean.weight)]
    numbers = iter(read_numbers(sums))
    return [{name: Mean(next(numbers), next(numbers)) for name in named} for named in means]


def masked_sum(values: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> Float[Tensor, ""]:
    """Sum the live entries; entries outside the mask have no effect, even if NaN."""
    return torch.where(mask, values, 0.0).sum()


def masked_mean(values: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> Float[Tensor, ""]:
    """Average the live entries; 0 when there are none."""
    return masked_sum(values, mask) / mask.sum().clamp(min=1)


def quantiles(values: Float[Tensor, " N"], shares: Sequence[float]) -> list[float]:
    """Compute quantiles of at least one value, linear between two of them, like torch.quantile.

    torch.quantile takes at most 2^24 values, and a step may have more tokens.
    """
    places = [share * (len(values) - 1) for share in shares]
    return [
        float(torch.lerp(_smallest(values, int(place)), _smallest(values, math.ceil(place)), place - int(place)))
        for place in places
    ]


def _smallest(values: Float[Tensor, " N"], number: int) -> Float[Tensor, ""]:
    """Return the value that has so many others before it in ascending order."""
    return values.kthvalue(number + 1).values


def whiten(
    values: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    shift_mean: bool = True,
    weights: Float[Tensor, "*shape"] | None = None,
    eps: float = 1e-8,
) -> Float[Tensor, "*shape"]:
    """Normalize the live entries to zero mean and unit variance; the others become zero.

    (x - mean) / sqrt(var + eps); `shift_mean=False` adds the mean back. The variance is the population's (divided by
    n), as in lm-human-preferences. Importance `weights` w replace both moments by weighted ones:
    mean = sum w x / sum w, var = sum w (x - mean)^2 / sum w.
    """
    if weights is None:
        mean = masked_mean(values, mask)
        variance = masked_mean((values - mean) ** 2, mask)
    else:
        total = masked_sum(weights, mask).clamp(min=eps)
        mean = masked_sum(weights * values, mask) / total
        variance = masked_sum(weights * (values - mean) ** 2, mask) / total
    scaled = (values - mean) * torch.rsqrt(variance + eps)
    return torch.where(mask, scaled if shift_mean else scaled + mean, 0.0)


def explained_beyond_position(
    values: Float[Tensor, "B T"],
    returns: Float[Tensor, "B T"],
    positions: Int[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
) -> float:
    """Compute the share of the returns' variance among tokens at the same position that the critic explains.

        1 - sum (e - mean_p e)^2 / sum (R - mean_p R)^2   with e = R - V and mean_p over the tokens at position p

    A KL penalty in the reward lowers the return of every token still to come, so that a critic which only counts
    tokens has an explained variance above 0. Here it has 0. NaN if the variance is 0, or lost in the error's rounding.
    """
    live = positions[mask]  # below T
    counts = torch.zeros(mask.shape[1], dtype=returns.dtype, device=returns.device)
    counts.index_add_(0, live, torch.ones_like(returns[mask]))

    def spread(numbers: Float[Tensor, " N"]) -> Tensor:
        sums = torch.zeros_like(counts).index_add_(0, live, numbers)
        return ((numbers - (sums / counts.clamp(min=1.0))[live]) ** 2).sum()

    error, variance = spread((returns - values)[mask]), spread(returns[mask])
    return float(1.0 - error / variance) if variance > torch.finfo(returns.dtype).eps * error else float("nan")


def explained_variance(values: Float[Tensor, "B T"], returns: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> float:
    """Compute the share of the returns' variance that the critic explains, over live tokens.

        1 - Var(R - V) / Var(R)

    1 is perfect, 0 is as good as a constant, below 0 is worse than a constant; NaN if Var(R) is 0, or is lost in the
    rounding of Var(R - V).
    """
    error = returns - values
    error_variance = masked_mean((error - masked_mean(error, mask)) ** 2, mask)
    variance = masked_mean((returns - masked_mean(returns, mask)) ** 2, mask)
    smallest = torch.finfo(returns.dtype).eps * error_variance
    return float(1.0 - error_variance / variance) if variance > smallest else float("nan")
