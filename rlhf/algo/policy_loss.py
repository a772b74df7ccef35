"""The common parts of policy losses: importance ratios, KL(old || new), and the weights of the tokens in a loss.

The losses themselves are in rlhf/algorithms.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf.batching import widen

RatioLevel = Literal["token", "sequence", "sequence_mean"]
LARGEST_LOG_RATIO = 20.0  # nats: e^20 times an advantage, squared and summed for a norm, still fits float32
Aggregate = Literal["token_mean", "sequence_mean", "sequence_sum", "constant"]


def importance_ratio(
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    level: RatioLevel,
) -> Float[Tensor, "B T"]:
    """Compute the importance ratio pi / pi_old at the given level; 1 outside the mask.

        token:          exp(log pi_t - log pi_old_t)                            (Schulman et al. 2017)
        sequence:       exp(sum_t (log pi_t - log pi_old_t))                    (RLOO)
        sequence_mean:  exp(sum_t (log pi_t - log pi_old_t) / length), carried  (GSPO, Zheng et al. 2025, eq. 7)

    The ratio of a sequence is repeated at each of its live tokens. Ratios are capped at e^20, with no gradient beyond:
    a sum over hundreds of tokens soon has an exponential that overflows float32, and infinity times 0 is NaN.
    """
    difference = torch.where(mask, logprobs - old_logprobs, 0.0)
    match level:
        case "token":
            total = difference
        case "sequence":
            total = difference.sum(dim=1, keepdim=True)
        case "sequence_mean":
            total = difference.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)
    return torch.where(mask, total, 0.0).clamp(max=LARGEST_LOG_RATIO).exp()


def kl_old_new(
    logprobs: Float[Tensor, "B T"], old_logprobs: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """Estimate KL(pi_old || pi) per token from tokens drawn from pi_old; never negative, zero outside the mask.

        ratio - 1 - log ratio,     ratio = pi / pi_old

    The samples do not depend on pi, so the expected gradient is exactly the gradient of KL(pi_old || pi).
    """
    difference = torch.where(mask, logprobs - old_logprobs, 0.0)
    return torch.expm1(difference) - difference


def token_weights(
    mask: Bool[Tensor, "B T"], aggregate: Aggregate, *, max_tokens: int
) -> tuple[Float[Tensor, "B T"], float]:
    """Return each token's weight in the loss and the denominator of the weighted sum; both depend on the mask alone.

        loss = sum(weights * per_token) / denominator

        how             weight        denominator      used by
        token_mean      1             tokens           PPO, DAPO
        sequence_mean   1 / length    completions      GRPO, GSPO, RLOO
        sequence_sum    1             completions      REINFORCE, ReMax
        constant        1 / T_max     completions      Dr. GRPO

    Rows without a live token do not count. Denominators add up over micro-batches and ranks; without tokens it is 0.
    """
    counted = mask if aggregate == "token_mean" else mask.any(dim=1)
    return loss_weights(mask, aggregate, max_tokens=max_tokens), float(counted.sum().item())


def loss_weights(mask: Bool[Tensor, "B T"], aggregate: Aggregate, *, max_tokens: int) -> Float[Tensor, "B T"]:
    """Return each token's weight in the loss, like `token_weights`, without counting the denominator."""
    live = widen(mask)  # [B, T]: small, and 1 / length stays exact enough for float64 tests
    match aggregate:
        case "sequence_mean":
            return live / live.sum(dim=1, keepdim=True).clamp(min=1)
        case "constant":
            return live / max_tokens
        case _:
            return live
