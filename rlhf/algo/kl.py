"""KL divergence to the reference policy: estimators, and the coefficients of the penalties. All in nats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True, kw_only=True)
class Coefs:
    """The coefficients that controllers adjust between steps."""

    kl: float  # units of score per nat of KL to the reference
    penalty: float  # weight of KL(old || new) in the penalized surrogate


def kl_estimate(
    logprobs: Float[Tensor, "B T"], ref_logprobs: Float[Tensor, "B T"], estimator: Estimator
) -> Float[Tensor, "B T"]:
    """Estimate KL(pi || pi_ref) per token from tokens drawn from pi (Schulman 2020, "Approximating KL divergence").

        k1 = d,   k2 = d^2 / 2,   k3 = exp(-d) - 1 + d,      d = log pi - log pi_ref

    E[k1] = E[k3] = KL. k2 is biased, but as a loss it has exactly the KL's expected gradient (k1's is zero; k3's is
    the gradient of the reverse KL(pi_ref || pi)). k2 and k3 are never negative.

    "KL" here is the KL of the next token in a given state. Summed over tokens, k1 in the *reward* gives the
    gradient of the sequence-level KL. Any of the three in the *loss* ignores how a token affects the KL of later ones,
    and so leads (k2) to pi(a | s) = pi_ref * exp(Q(s, a) / beta), with a Q of the score alone, and not to the optimum
    of the objective.
    """
    difference = logprobs - ref_logprobs
    match estimator:
        case "k1":
            return difference
        case "k2":
            return 0.5 * difference**2
        case "k3":
            return torch.expm1(-difference) + difference


def kl_of_distributions(
    log_pi: Float[Tensor, "*shape V"], log_ref: Float[Tensor, "*shape V"]
) -> Float[Tensor, "*shape"]:
    """Compute KL(pi || pi_ref) of the next token exactly, by summing over the vocabulary.

        KL_t = sum_v pi(v | s_t) (log pi(v | s_t) - log pi_ref(v | s_t)),     0 log 0 = 0 whatever pi_ref is

    With completions drawn from pi, E[sum_t KL_t] is the sequence-level KL, as E[sum_t k1_t] is: in each state the
    sampled token's log-ratio is replaced by its mean over tokens (Rao-Blackwell; Amini et al. 2025). This removes the
    variance of the token itself, and no sum is negative. The variance of the *sum* is nearly always far below k1's;
    it need not be, for a token's log-ratio and the KL of later tokens may cancel (tests/exact/test_exact_kl.py).
    """
    pi = log_pi.exp()
    return torch.where(pi > 0, pi * (log_pi - log_ref), 0.0).sum(dim=-1)
