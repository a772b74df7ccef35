"""The critic's loss, and how well the critic explains the returns."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf.algo.masked import masked_mean


def clipped_value_loss(
    values: Float[Tensor, "B T"],
    old_values: Float[Tensor, "B T"],
    returns: Float[Tensor, "B T"],
    *,
    clip_eps: float | None,
) -> Float[Tensor, "B T"]:
    """Compute the clipped value loss per token (baselines' PPO2; Schulman et al. 2016, app.).

        0.5 * max((V - R)^2, (V_old + clip(V - V_old, -eps, eps) - R)^2)

    The larger of the two errors is taken, so the clip only ever stops a gradient; `clip_eps=None` is plain regression.
    """
    error = (values - returns) ** 2
    if clip_eps is None:
        return 0.5 * error
    near_old = old_values + (values - old_values).clamp(-clip_eps, clip_eps)
    return 0.5 * torch.maximum(error, (near_old - returns) ** 2)


def value_clip_mask(
    values: Float[Tensor, "B T"],
    old_values: Float[Tensor, "B T"],
    returns: Float[Tensor, "B T"],
    *,
    clip_eps: float | None,
) -> Bool[Tensor, "B T"]:
    """Flag the tokens at which clipped_value_loss takes the clipped branch and has no gradient."""
    if clip_eps is None:
        return torch.zeros_like(values, dtype=torch.bool)
    near_old = old_values + (values - old_values).clamp(-clip_eps, clip_eps)
    return ((near_old - returns) ** 2 > (values - returns) ** 2) & (near_old != values)


def explained_variance(values: Float[Tensor, "B T"], returns: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> float:
    """Compute the share of the returns' variance that the critic explains, over live tokens.

        1 - Var(R - V) / Var(R)

    1 is perfect, 0 is as good as a constant, below 0 is worse than that; NaN where Var(R) is 0.
    """
    error = returns - values
    error_variance = masked_mean((error - masked_mean(error, mask)) ** 2, mask)
    variance = masked_mean((returns - masked_mean(returns, mask)) ** 2, mask)
    return float(1.0 - error_variance / variance) if variance > 0 else float("nan")
