"""Divergences of the next-token distributions of a policy and a teacher: over a vocabulary, or its likeliest tokens.

    reverse   KL(π ‖ π_T) = Σ π (log π − log π_T)
    forward   KL(π_T ‖ π) = Σ π_T (log π_T − log π)
    jsd       β KL(π_T ‖ m) + (1 − β) KL(π ‖ m),   m = β π_T + (1 − β) π        (Agarwal et al. 2024, GKD, eq. 1)

With the teacher's K likeliest tokens alone, all others are one more outcome, the tail. Merging outcomes makes a
divergence smaller, never negative, and 0 only if the K probabilities agree. A sum over K tokens without the tail is
no divergence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

Divergence = Literal["reverse", "forward", "jsd"]
LOWEST = -1e4  # nats: stands in for minus infinity, since 0 * -inf would be NaN


@dataclass(frozen=True, kw_only=True)
class TeacherTokens:
    """A teacher's log-probabilities of N next tokens: of the vocabulary, or of its K likeliest and of the rest."""

    logprobs: Float[Tensor, "N K"]
    ids: Int[Tensor, "N K"] | None = None  # the tokens, likeliest first; None: the whole vocabulary in its order
    rest: Float[Tensor, " N"] | None = None  # log of the probability of all other tokens; None with the vocabulary

    def first_choice(self) -> Int[Tensor, " N"]:
        """Return the id of the teacher's likeliest token."""
        best = self.logprobs.argmax(dim=-1)
        return best if self.ids is None else self.ids.gather(1, best[:, None]).squeeze(1)

    def within(self, width: int) -> TeacherTokens:
        """Return the distribution over the first `width` ids, if the whole vocabulary is given."""
        if self.ids is not None or self.logprobs.shape[1] <= width:
            return self
        return TeacherTokens(logprobs=self.logprobs[:, :width].log_softmax(dim=-1))

    def top(self, k: int) -> TeacherTokens:
        """Return the k likeliest tokens, with the probability of all others added up."""
        if self.logprobs.shape[1] <= k:
            return self
        values, chosen = self.logprobs.topk(k, dim=-1)
        others = self.logprobs.scatter(1, chosen, -math.inf).logsumexp(dim=-1)
        rest = others if self.rest is None else torch.logaddexp(others, self.rest)
        return TeacherTokens(
            logprobs=values, ids=chosen if self.ids is None else self.ids.gather(1, chosen), rest=_floored(rest)
        )


def rest_of(logprobs: Float[Tensor, "N K"]) -> Float[Tensor, " N"]:
    """Compute log(1 − Σ p), the log-probability of all tokens not listed; at least the log of a rounding error."""
    return _floored((1.0 - logprobs.exp().sum(dim=-1)).clamp(min=0.0).log())


def _floored(rest: Tensor) -> Tensor:
    return rest.clamp(min=math.log(torch.finfo(rest.dtype).eps))


def divergence(
    log_pi: Float[Tensor, "*shape V"], log_teacher: Float[Tensor, "*shape V"], kind: Divergence, *, beta: float = 0.5
) -> Float[Tensor, "*shape"]:
    """Compute a divergence of the teacher and the policy in nats, over outcomes whose log-probabilities are given.

    0 log 0 is 0. `beta` is the weight of the teacher in the mixture m of jsd.
    """
    log_pi, log_teacher = log_pi.clamp(min=LOWEST), log_teacher.clamp(min=LOWEST)
    match kind:
        case "reverse":
            return (log_pi.exp() * (log_pi - log_teacher)).sum(dim=-1)
        case "forward":
            return (log_teacher.exp() * (log_teacher - log_pi)).sum(dim=-1)
        case "jsd":
            log_m = torch.logaddexp(log_teacher + math.log(beta), log_pi + math.log1p(-beta))
            to_teacher = (log_teacher.exp() * (log_teacher - log_m)).sum(dim=-1)
            return beta * to_teacher + (1.0 - beta) * (log_pi.exp() * (log_pi - log_m)).sum(dim=-1)


def shared_outcomes(
    log_pi: Float[Tensor, "N V"], teacher: TeacherTokens, *, tail: bool = True
) -> tuple[Float[Tensor, "N J"], Float[Tensor, "N J"]]:
    """Return the log-probabilities of the same outcomes under the policy and the teacher.

    They are the vocabulary; or the teacher's K tokens and the tail, J = K + 1; or, without the `tail`, the K tokens,
    their probabilities divided by their sum.
    """
    if teacher.ids is None:
        return log_pi, teacher.logprobs
    chosen = log_pi.gather(1, teacher.ids)
    if not tail:
        return chosen.log_softmax(dim=-1), teacher.logprobs.log_softmax(dim=-1)
    if teacher.ids.shape[1] == log_pi.shape[1]:
        return chosen, teacher.logprobs
    assert teacher.rest is not None
    rest = log_pi.scatter(1, teacher.ids, -math.inf).logsumexp(dim=-1)
    return torch.cat([chosen, rest[:, None]], dim=1), torch.cat([teacher.logprobs, teacher.rest[:, None]], dim=1)


def same_width(log_pi: Float[Tensor, "N V"], teacher: TeacherTokens) -> tuple[Tensor, TeacherTokens]:
    """Cut both to the ids that both have, if a model has more embeddings than its tokenizer has tokens."""
    if teacher.ids is not None or teacher.logprobs.shape[1] == log_pi.shape[1]:
        return log_pi, teacher
    width = min(log_pi.shape[1], teacher.logprobs.shape[1])
    return log_pi[:, :width].log_softmax(dim=-1), teacher.within(width)


def tail_error_bound(
    log_pi: Float[Tensor, "N V"], teacher: TeacherTokens, kind: Divergence, *, beta: float = 0.5
) -> Float[Tensor, " N"]:
    """Compute how much larger at most the divergence over the vocabulary is than over K tokens and the tail, in nats.

    With q, p the tail's probabilities under teacher and policy, q_K the teacher's least listed probability and m the
    mixture, by the chain rule

        forward   q KL(teacher's tail ‖ policy's tail)  ≤  q (log min(1, q_K / q) + log p − min over the tail of log π)
        jsd       β q log(1 / β) + (1 − β) p log(1 / (1 − β))  −  the tail's own term
        reverse   none: the teacher may give a token of the tail any probability, however small. NaN.

    The teacher's whole distribution gives the error itself: `divergence` of both kinds of outcomes.
    """
    assert teacher.ids is not None
    if teacher.ids.shape[1] == log_pi.shape[1]:
        return torch.zeros_like(log_pi[:, 0])
    assert teacher.rest is not None
    if kind == "reverse":
        return torch.full_like(log_pi[:, 0], math.nan)
    inside = torch.zeros_like(log_pi, dtype=torch.bool).scatter(1, teacher.ids, True)
    log_p = log_pi.masked_fill(inside, -math.inf).logsumexp(dim=-1)
    log_q, p, q = teacher.rest, log_p.exp(), teacher.rest.exp()
    if kind == "forward":
        least = log_pi.masked_fill(inside, math.inf).amin(dim=-1)
        spread = (teacher.logprobs.amin(dim=-1) - log_q).clamp(max=0.0)
        return (q * (spread + log_p - least)).clamp(min=0.0)
    log_m = torch.logaddexp(log_q + math.log(beta), log_p + math.log1p(-beta))
    own = beta * q * (log_q - log_m) + (1.0 - beta) * p * (log_p - log_m).clamp(min=LOWEST)
    return -beta * q * math.log(beta) - (1.0 - beta) * p * math.log1p(-beta) - own
