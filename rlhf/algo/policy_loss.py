"""The surrogates: importance ratio x advantage, held near the old policy. No reduction here: see token_weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

RatioLevel = Literal["token", "sequence", "sequence_mean"]
LARGEST_LOG_RATIO = 20.0  # nats: e^20 times an advantage, squared and summed for a norm, still fits float32
Aggregate = Literal["token_mean", "sequence_mean", "sequence_sum", "constant"]


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """A loss per token and what was observed on the way, per token too."""

    per_token: Float[Tensor, "B T"]
    clipped: Bool[Tensor, "B T"]  # where the clip stops the gradient; of CISPO, where it bounds the weight


def importance_ratio(
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    level: RatioLevel,
) -> Float[Tensor, "B T"]:
    """pi / pi_old, per token, per sequence, or per sequence with its length-th root; 1 outside the mask.

        token:          exp(log pi_t - log pi_old_t)                            (Schulman et al. 2017)
        sequence:       exp(sum_t (log pi_t - log pi_old_t))                    (RLOO)
        sequence_mean:  exp(sum_t (log pi_t - log pi_old_t) / length), carried  (GSPO, Zheng et al. 2025, eq. 7)

    A sequence's ratio stands at every one of its live tokens. Ratios end at e^20, without a gradient from there on: a
    sum over hundreds of tokens soon has an exponential that no float32 holds, and infinity times 0 is NaN.
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


def clipped_surrogate(
    ratio: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    *,
    clip_eps_low: float,
    clip_eps_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """-min(ratio * A, clip(ratio, 1 - low, 1 + high) * A)   (Schulman et al. 2017, eq. 7; DAPO for low != high).

    With `dual_clip` c > 1 and A < 0 the objective is max(that, c * A) (Ye et al. 2020, eq. 5), so that a token
    that became much more likely cannot dominate. The gradient stops in exactly these cases:
    A > 0 and ratio > 1 + high; A < 0 and ratio < 1 - low; and, with dual clip, A < 0 and ratio > c.
    """
    clipped_ratio = ratio.clamp(1.0 - clip_eps_low, 1.0 + clip_eps_high)
    objective = torch.minimum(ratio * advantages, clipped_ratio * advantages)
    clipped = ((advantages > 0) & (ratio > 1.0 + clip_eps_high)) | ((advantages < 0) & (ratio < 1.0 - clip_eps_low))
    if dual_clip is not None:
        floor = dual_clip * advantages
        objective = torch.where(advantages < 0, torch.maximum(objective, floor), objective)
        clipped = clipped | ((advantages < 0) & (ratio > dual_clip))
    return PolicyLoss(per_token=-objective, clipped=clipped)


def penalized_surrogate(
    ratio: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    old_kl: Float[Tensor, "B T"],
    *,
    coef: float,
) -> PolicyLoss:
    """-(ratio * A - coef * KL(old || new))   (Schulman et al. 2017, eq. 8); `old_kl` is `kl_old_new`'s estimate."""
    return PolicyLoss(
        per_token=-(ratio * advantages - coef * old_kl), clipped=torch.zeros_like(ratio, dtype=torch.bool)
    )


def weighted_log_likelihood(
    ratio: Float[Tensor, "B T"],
    logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    *,
    clip_eps_low: float,
    clip_eps_high: float,
) -> PolicyLoss:
    """-sg(clip(ratio, 1 - low, 1 + high)) * A * log pi   (CISPO: MiniMax 2025, MiniMax-M1, eq. 4 and 5).

    sg stops the gradient, so every token keeps its own, -weight * A * grad log pi, also where the clip binds: the
    clip bounds a token's weight and never silences it. Where it does not bind, the gradient is that of ratio * A.
    """
    weight = ratio.detach().clamp(1.0 - clip_eps_low, 1.0 + clip_eps_high)
    return PolicyLoss(per_token=-weight * advantages * logprobs, clipped=weight != ratio.detach())


def log_likelihood(logprobs: Float[Tensor, "B T"], advantages: Float[Tensor, "B T"]) -> PolicyLoss:
    """-A * log pi: the policy gradient itself (Williams 1992, REINFORCE), right for tokens that pi drew.

    Its gradient is that of every ratio-based surrogate at ratio 1; there is no ratio here that could leave 1.
    """
    return PolicyLoss(per_token=-advantages * logprobs, clipped=torch.zeros_like(logprobs, dtype=torch.bool))


def truncated_importance(
    logprobs: Float[Tensor, "B T"],
    sampler_logprobs: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    cap: float,
) -> Float[Tensor, "B T"]:
    """min(pi_old / pi_sampler, cap) of each token; 1 outside the mask.

    The weight of a token that an older policy drew (IMPALA, Espeholt et al. 2018, eq. 1; decoupled from the clipped
    ratio to pi_old as in Hilton et al. 2022, sec. 2). Every surrogate here is linear in a positive factor of the
    advantage, so weighting advantages weights its gradient.
    """
    return (torch.where(mask, logprobs - sampler_logprobs, 0.0)).exp().clamp(max=cap)


def kl_old_new(
    logprobs: Float[Tensor, "B T"], old_logprobs: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """Per-token estimate of KL(pi_old || pi) from tokens drawn from pi_old, never negative; zero outside the mask.

        ratio - 1 - log ratio,     ratio = pi / pi_old

    The samples do not depend on pi, so its expected gradient is that of KL(pi_old || pi) exactly.
    """
    difference = torch.where(mask, logprobs - old_logprobs, 0.0)
    return torch.expm1(difference) - difference


def token_weights(mask: Bool[Tensor, "B T"], how: Aggregate, *, max_tokens: int) -> tuple[Float[Tensor, "B T"], float]:
    """Weight of every token and the norm to divide the weighted sum by; both depend on the mask alone.

        loss = sum(weights * per_token) / norm

        token_mean      1             tokens           PPO, DAPO
        sequence_mean   1 / length    completions      GRPO, GSPO
        sequence_sum    1             completions      REINFORCE, RLOO
        constant        1 / T_max     completions      Dr. GRPO

    Rows without a live token count nowhere. Norms add over micro-batches and processes; a norm of nothing is 0.
    """
    live = mask.double()  # [B, T]: small, and 1 / length stays exact enough for float64 tests
    lengths = live.sum(dim=1, keepdim=True)
    completions = float((lengths > 0).sum().item())
    match how:
        case "token_mean":
            return live, float(lengths.sum().item())
        case "sequence_mean":
            return live / lengths.clamp(min=1), completions
        case "sequence_sum":
            return live, completions
        case "constant":
            return live / max_tokens, completions
