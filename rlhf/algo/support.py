"""Truncated sampling: which tokens may be drawn, and log-probabilities among them.

With the policy pi and the set S_t of tokens that top-k, top-p and min-p leave at token t, the sampler draws from

    pi_S(y_t) = pi(y_t) / Σ_{j in S_t} pi(j),   y_t in S_t.

A trainer that uses log pi instead has ratios of pi / pi_S = Σ_{S_t} pi at the first update, not 1, and follows the
gradient of another objective. So each completion is stored with its sets, and the trainer computes

    log pi_S(y_t) = log pi(y_t) - log Σ_{j in S_t} exp log pi(j),

whose gradient is the gradient of E_{pi_S}[score], since a set changes with the weights at single points only.
tests/algo/test_support.py computes both by enumeration.

Top-k: Fan et al. 2018; top-p: Holtzman et al. 2020; min-p: Nguyen et al. 2024. transformers has the same order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from rlhf.algo.divergence import LOWEST

BITS = 8


@dataclass(frozen=True)
class SamplingLimits:
    """The limits that leave tokens out; the defaults leave out none."""

    top_k: int = 0  # the likeliest so many; 0: all
    top_p: float = 1.0  # the likeliest that together have this probability
    min_p: float = 0.0  # those with at least this share of the largest probability

    @property
    def are_on(self) -> bool:
        """Return whether any token may be left out."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    def support(self, probabilities: Float[Tensor, "N V"]) -> Bool[Tensor, "N V"]:
        """Flag the tokens that may be drawn: top-k, then top-p among these, then min-p; the likeliest always may."""
        kept = torch.ones_like(probabilities, dtype=torch.bool)
        if 0 < self.top_k < probabilities.shape[1]:
            kept = probabilities >= probabilities.topk(self.top_k, dim=-1).values[:, -1:]
        if self.top_p < 1:
            kept = kept & self._nucleus(torch.where(kept, probabilities, 0.0))
        if self.min_p > 0:
            kept = kept & (probabilities >= self.min_p * probabilities.amax(dim=-1, keepdim=True))
        return kept

    def _nucleus(self, probabilities: Float[Tensor, "N V"]) -> Bool[Tensor, "N V"]:
        """Flag the fewest likeliest tokens that have at least top_p of the probability; all may sum to less than 1."""
        values, order = probabilities.sort(dim=-1, descending=True, stable=True)
        before = values.cumsum(dim=-1) - values
        in_order = before < self.top_p * values.sum(dim=-1, keepdim=True)
        in_order[:, 0] = True
        return torch.zeros_like(in_order).scatter(1, order, in_order)


def renormalized(probabilities: Float[Tensor, "N V"], support: Bool[Tensor, "N V"]) -> Float[Tensor, "N V"]:
    """Compute pi_S: 0 outside the support."""
    kept = torch.where(support, probabilities, 0.0)
    return kept / kept.sum(dim=-1, keepdim=True)


def pack(support: Bool[Tensor, "N V"]) -> UInt8[Tensor, "N W"]:
    """Pack 8 flags into a byte, the first in its lowest bit; W = V / 8, rounded up."""
    missing = -support.shape[1] % BITS
    flags = torch.nn.functional.pad(support, (0, missing)).view(len(support), -1, BITS)
    return (flags.to(torch.uint8) << _places(support.device)).sum(dim=-1, dtype=torch.uint8)


def unpack(packed: UInt8[Tensor, "N W"], vocabulary: int) -> Bool[Tensor, "N V"]:
    """Undo `pack`."""
    flags = (packed[..., None] >> _places(packed.device)) & 1
    return flags.flatten(1).bool()[:, :vocabulary]


def _places(device: torch.device) -> UInt8[Tensor, " 8"]:
    return torch.arange(BITS, dtype=torch.uint8, device=device)


def restricted(log_pi: Float[Tensor, "N V"], packed: UInt8[Tensor, "N W"]) -> Float[Tensor, "N V"]:
    """Compute log pi_S of all tokens; about LOWEST outside of S, so that 0 log 0 is 0."""
    return log_pi.masked_fill(~unpack(packed, log_pi.shape[1]), LOWEST).log_softmax(dim=-1)


def log_mass(log_pi: Float[Tensor, "N V"], packed: UInt8[Tensor, "N W"]) -> Float[Tensor, " N"]:
    """Compute log Σ_{j in S} pi(j) of each token, which is log pi(y) - log pi_S(y)."""
    return log_pi.masked_fill(~unpack(packed, log_pi.shape[1]), -torch.inf).logsumexp(dim=-1)
