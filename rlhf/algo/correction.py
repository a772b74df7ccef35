"""Importance weights for completions from another distribution than the policy's: of a server, or of an older policy.

With r_t = pi_old(y_t | x, y_<t) / mu(y_t | x, y_<t), mu the sampler, and the cap c:

    token_truncate      w_t = min(r_t, c)
    token_mask          w_t = r_t if r_t <= c else 0
    sequence_truncate   w_t = min(prod_s r_s, c)                 the same at every token of the completion
    sequence_mask       w_t = prod_s r_s if that is <= c else 0

E_mu[w(y) f(y)] = E_pi_old[f(y)] for every f holds for prod_s r_s alone. The token weights leave the tokens before t as
mu draws them; a cap leaves out the part above it. tests/algo/test_correction.py computes each bias by enumeration.

Truncation is Ionides 2008 (per token: Espeholt et al. 2018, eq. 1), apart from the clipped ratio to pi_old (Hilton et
al. 2022, sec. 2); masking ratios above the cap is in use against mismatches between samplers and trainers (TRL's GRPO
has all four). Completions sampled with a hint have truncated weights too (rlhf.algorithms.rescue). The weight of a
whole sequence is about as small as a success without the hint is rare.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf.algo.policy_loss import LARGEST_LOG_RATIO
from rlhf.batching import widen


def token_ratios(
    logprobs: Float[Tensor, "B T"], sampler_logprobs: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """Compute r_t = pi_old / mu of every token; 1 outside the mask."""
    difference = torch.where(mask, logprobs - sampler_logprobs, 0.0)
    return difference.clamp(max=LARGEST_LOG_RATIO).exp()


def sequence_ratios(
    logprobs: Float[Tensor, "B T"], sampler_logprobs: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """Compute prod_s r_s at every token of a completion, from a sum in the widest type; 1 outside the mask."""
    total = widen(torch.where(mask, logprobs - sampler_logprobs, 0.0)).sum(dim=1, keepdim=True)
    ratios = total.clamp(max=LARGEST_LOG_RATIO).exp().to(logprobs.dtype)
    return torch.where(mask, ratios, 1.0)


def truncated(ratios: Float[Tensor, "B T"], cap: float) -> Float[Tensor, "B T"]:
    """Compute min(ratio, cap)."""
    return ratios.clamp(max=cap)


def masked_above(ratios: Float[Tensor, "B T"], cap: float) -> Float[Tensor, "B T"]:
    """Return the ratios, 0 where they exceed the cap."""
    return torch.where(ratios <= cap, ratios, 0.0)
