"""Reward against KL: what a run had reached at a given KL, and where it was gaming the reward it is trained on."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from jaxtyping import Float
from torch import Tensor

STEPS_PER_OCTAVE, OCTAVES = 4, (7, -7)  # of beta around the spread of the scores


def at_kl(points: Sequence[tuple[float, float]], kl: float) -> float | None:
    """The score where a run first reached `kl` nats: linear between the two evaluations around it; None: it never did.

    Args:
        points: (KL, score) of the evaluations, in the order of training.
        kl: nats.
    """
    if points and points[0][0] >= kl:
        return points[0][1]
    for (left, before), (right, after) in pairwise(points):
        if left < kl <= right:
            share = (kl - left) / (right - left)
            return before + share * (after - before)
    return None


def overoptimized(proxy: Sequence[float], gold: Sequence[float], margin: Sequence[float]) -> list[bool]:
    """At which evaluations the proxy is above, and the gold clearly below, what it was when the gold was best so far.

    That is the sign of over-optimization (Gao et al. 2023): the proxy still rises and the gold falls. `margin` is how
    far below counts as clear, in units of gold: noise should not.
    """
    found, best = [], 0
    for i in range(len(gold)):
        if gold[i] > gold[best]:
            best = i
        found.append(proxy[i] > proxy[best] and gold[i] < gold[best] - margin[i])
    return found


def optimum(reference: Float[Tensor, "C N"], scores: Float[Tensor, "C N"], *, beta: float) -> Float[Tensor, "C N"]:
    """Log-probabilities of the policy that maximizes E[score] - beta KL: reference * exp(score / beta) / Z.

    Args:
        reference: log-probabilities of all N completions of each of C prompts; each row sums to one.
        scores: what each is worth.
        beta: units of score per nat, above 0 (Rafailov et al. 2023, eq. 4).
    """
    return (reference + scores / beta).log_softmax(dim=1)


def exact_frontier(reference: Float[Tensor, "C N"], scores: Float[Tensor, "C N"]) -> list[tuple[float, float]]:
    """(KL in nats, E[score]) of the optimum over a range of beta, from the reference outwards: nothing is above it.

    Both are means over prompts, which share one beta: that is the highest mean score at that mean KL. The curve rises
    and is concave; its last point has all but the whole of the best completions' probability.

    Args:
        reference: log-probabilities of all N completions of each of C prompts; each row sums to one.
        scores: what each is worth; not all alike.
    """
    spread = float(scores.std(correction=0))
    first, last = OCTAVES
    points = [(0.0, _mean(reference, scores))]
    for step in range(STEPS_PER_OCTAVE * (first - last) + 1):
        best = optimum(reference, scores, beta=spread * 2.0 ** (first - step / STEPS_PER_OCTAVE))
        points.append((_mean(best, best - reference), _mean(best, scores)))
    return points


def _mean(logprobs: Float[Tensor, "C N"], values: Float[Tensor, "C N"]) -> float:
    """The expectation, over prompts too; what has no probability counts nothing."""
    return float((logprobs.exp() * values.where(logprobs.isfinite(), 0.0)).sum(dim=1).mean())
