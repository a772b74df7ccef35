"""Reward against KL: the score of a run at a given KL, where it over-optimized its reward, and the exact optimum."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from jaxtyping import Float
from torch import Tensor

STEPS_PER_OCTAVE, OCTAVES = 4, (7, -7)  # of beta around the spread of the scores


def at_kl(points: Sequence[tuple[float, float]], kl: float) -> float | None:
    """Interpolate the score at which a run first reached `kl` nats; None if it never did.

    The interpolation is linear between the two evaluations around it.

    Args:
        points: (KL, score) of the evaluations, in the order of training.
        kl: the KL to the reference, in nats.
    """
    if points and points[0][0] >= kl:
        return points[0][1]
    for (left, before), (right, after) in pairwise(points):
        if left < kl <= right:
            share = (kl - left) / (right - left)
            return before + share * (after - before)
    return None


def overoptimized(proxy: Sequence[float], gold: Sequence[float], margin: Sequence[float]) -> list[bool]:
    """Flag the evaluations at which the proxy still rises while the gold score falls (Gao et al. 2023).

    An evaluation is flagged where, compared with the evaluation of the best gold score so far, the proxy is higher and
    the gold is lower by more than `margin`. The margin, in units of gold, keeps noise from being flagged.
    """
    flags, best = [], 0
    for i in range(len(gold)):
        if gold[i] > gold[best]:
            best = i
        flags.append(proxy[i] > proxy[best] and gold[i] < gold[best] - margin[i])
    return flags


def optimum(reference: Float[Tensor, "C N"], scores: Float[Tensor, "C N"], *, beta: float) -> Float[Tensor, "C N"]:
    """Compute the log-probabilities of the policy that maximizes E[score] - beta KL.

        log pi = log reference + score / beta - log Z

    Args:
        reference: log-probabilities of all N completions of each of C prompts; each row sums to one.
        scores: the score of each completion.
        beta: units of score per nat, above 0 (Rafailov et al. 2023, eq. 4).
    """
    return (reference + scores / beta).log_softmax(dim=1)


def exact_frontier(reference: Float[Tensor, "C N"], scores: Float[Tensor, "C N"]) -> list[tuple[float, float]]:
    """Compute the highest attainable E[score] at each KL, as points (KL in nats, E[score]) over a range of beta.

    The points start at the reference. Both coordinates are means over prompts, which share one beta; no policy has a
    higher mean score at the same mean KL. The curve rises and is concave; at its last point nearly all probability is
    on the best completions.

    Args:
        reference: log-probabilities of all N completions of each of C prompts; each row sums to one.
        scores: the score of each completion; not all equal.
    """
    spread = float(scores.std(correction=0))
    first, last = OCTAVES
    points = [(0.0, _mean(reference, scores))]
    for step in range(STEPS_PER_OCTAVE * (first - last) + 1):
        best = optimum(reference, scores, beta=spread * 2.0 ** (first - step / STEPS_PER_OCTAVE))
        points.append((_mean(best, best - reference), _mean(best, scores)))
    return points


def _mean(logprobs: Float[Tensor, "C N"], values: Float[Tensor, "C N"]) -> float:
    """Compute the expectation of `values`, averaged over prompts; completions of probability 0 contribute 0."""
    return float((logprobs.exp() * values.where(logprobs.isfinite(), 0.0)).sum(dim=1).mean())
