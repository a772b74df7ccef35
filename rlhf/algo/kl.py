"""KL to the reference: estimates from samples, and what sets the penalty's coefficient. All in nats."""

from __future__ import annotations

import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]


def kl_estimate(
    logprobs: Float[Tensor, "B T"], ref_logprobs: Float[Tensor, "B T"], estimator: Estimator
) -> Float[Tensor, "B T"]:
    """Per-token estimates of KL(pi || pi_ref) from tokens drawn from pi (Schulman 2020, "Approximating KL divergence").

        k1 = d,   k2 = d^2 / 2,   k3 = exp(-d) - 1 + d,      d = log pi - log pi_ref

    E[k1] = E[k3] = KL; k2 is biased, but its expected gradient, as a loss, is that of KL exactly
    (k1's is zero; k3's is the gradient of the reverse KL(pi_ref || pi)). k2 and k3 are never negative.

    "KL" is that of the next token in a state taken as given. Summed over tokens, k1 in the *reward* gives the gradient
    of the sequences' KL; any of them in the *loss* misses what a token does to the KL of later ones, and so leads to
    pi(a | s) = pi_ref * exp(Q(s, a) / beta) with a Q that knows the score alone (k2), not to the objective's optimum.
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
    """Sum pi (log pi - log pi_ref) over the vocabulary; 0 log 0 is 0, whatever the reference says of such a token.

        KL_t = sum_v pi(v | s_t) (log pi(v | s_t) - log pi_ref(v | s_t))

    With completions drawn from pi, E[sum_t KL_t] is the KL of the sequences, as E[sum_t k1_t] is: in each state the
    sampled token's log-ratio is replaced by its mean over tokens (Rao-Blackwell; Amini et al. 2025). A token's
    own variance is gone, and no sum is negative. The variance of the *sum* is nearly always far below that of k1; it
    need not be, for a token's log-ratio and the KL of what follows may cancel (tests/exact/test_exact_kl.py).
    """
    pi = log_pi.exp()
    return torch.where(pi > 0, pi * (log_pi - log_ref), 0.0).sum(dim=-1)


def next_kl_coef(coef: float, *, kl: float, target: float, horizon: float, completions: int) -> float:
    """The coefficient after a step of the proportional controller (Ziegler et al. 2019, sec. 2.2).

        e = clip(KL / target - 1, -0.2, 0.2),   coef <- coef * (1 + e * completions / horizon)

    Args:
        coef: the coefficient of the step that measured `kl`.
        kl: mean KL to the reference of the step's completions, in nats per *sequence*.
        target: the wanted value, in the same unit.
        horizon: in completions.
        completions: how many the step sampled, over all processes.

    A KL that is NaN says nothing: the coefficient stays.
    """
    if math.isnan(kl):
        return coef
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return coef * max(1.0 + error * completions / horizon, 0.0)


def next_penalty_coef(coef: float, *, kl: float, target: float) -> float:
    """The coefficient of the KL(old || new) penalty after a step (Schulman et al. 2017, sec. 4).

    KL < target / 1.5 halves it, KL > target * 1.5 doubles it; both KLs in nats per token.
    """
    if kl < target / 1.5:
        return coef / 2.0
    if kl > target * 1.5:
        return coef * 2.0
    return coef
