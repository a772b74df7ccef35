"""The KL that a score costs: frontiers, bounds of best-of-n, and signs of over-optimization."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor


def kl_bound(n: int) -> float:
    """Compute the upper bound on KL(best of n || start), in nats per completion.

        log n - (n - 1) / n

    It is the KL itself if no two completions tie and each is unlikely (Stiennon et al. 2020, appendix G.3), and an
    upper bound in general (Beirami et al. 2024, theorem 1).
    """
    return math.log(n) - (n - 1) / n


def expected_best(gold: Float[Tensor, "P N"], proxy: Float[Tensor, "P N"], n: int) -> Float[Tensor, " P"]:
    """Estimate the expected gold score of the best of n by the proxy, without bias, from N >= n samples of each prompt.

    This is the mean over all subsets of n of the N samples (Nakano et al. 2021, appendix I): with the samples in
    ascending order of the proxy,

        sum_{i=n}^{N}  C(i - 1, n - 1) / C(N, n) * gold_(i)

    Samples with equal proxy scores share their weights equally, as if ties were broken at random. A sample without a
    proxy score (NaN) is below all others, and one without a gold score is left out: the weights of the others then sum
    to one, and a prompt none of whose weighted samples has a gold score has the estimate NaN.

    Args:
        gold: the score to estimate.
        proxy: the score by which the best is chosen.
        n: from 1 to N.

    Returns:
        One expectation for each prompt, float64.
    """
    total = gold.shape[1]
    assert 1 <= n <= total, f"the best of {n} cannot be estimated from {total} samples"
    weights = torch.tensor(
        [math.comb(i - 1, n - 1) / math.comb(total, n) for i in range(1, total + 1)], dtype=torch.float64
    )
    ordered, order = _lowest_if_missing(proxy).double().sort(dim=1)
    golds = gold.double().gather(1, order)
    shared = _average_ties(weights.expand_as(ordered), ordered)
    known = ~golds.isnan()
    best: Tensor = (golds.where(known, 0.0) * shared).sum(dim=1)
    return best if known.all() else best / shared.where(known, 0.0).sum(dim=1)


def _lowest_if_missing(proxy: Float[Tensor, "P N"]) -> Float[Tensor, "P N"]:
    """Replace NaN by minus infinity."""
    return proxy.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)


def _average_ties(weights: Float[Tensor, "P N"], ordered: Float[Tensor, "P N"]) -> Float[Tensor, "P N"]:
    """Replace each weight by the mean weight over its run of equal values; `ordered` is sorted along dim 1."""
    starts = torch.ones_like(ordered, dtype=torch.long)
    starts[:, 1:] = (ordered[:, 1:] != ordered[:, :-1]).long()
    group = starts.cumsum(dim=1) - 1
    zeros = torch.zeros_like(weights)
    sums = zeros.scatter_add(1, group, weights)
    sizes = zeros.scatter_add(1, group, torch.ones_like(weights))
    return sums.gather(1, group) / sizes.gather(1, group)


def picks(proxy: Float[Tensor, "P N"], n: int) -> Int[Tensor, " P"]:
    """Return the index of the best of the first n samples of each prompt by the proxy; ties go to the first.

    A sample without a proxy score (NaN) is below all others.
    """
    return _lowest_if_missing(proxy[:, :n]).argmax(dim=1)


def curve_sizes(total: int) -> list[int]:
    """Return the values of n for a curve up to `total`: 1, 2, 3, 4, 6, 8, 12, … and `total` itself."""
    sizes = {size for k in range(total.bit_length()) for size in (2**k, 3 * 2**k // 2) if 1 <= size <= total}
    return sorted(sizes | {total})


STEPS_PER_OCTAVE, OCTAVES = 4, (7, -7)  # of beta around the spread of the scores


def score_at_kl(points: Sequence[tuple[float, float]], kl: float) -> float | None:
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

    An evaluation is flagged if, compared with the evaluation of the best gold score so far, the proxy is higher and
    the gold is lower by more than `margin`. The margin, in units of gold, keeps noise from being flagged.
    """
    flags, best = [], 0
    for i in range(len(gold)):
        if gold[i] > gold[best]:
            best = i
        flags.append(proxy[i] > proxy[best] and gold[i] < gold[best] - margin[i])
    return flags


def optimal_logprobs(
    reference: Float[Tensor, "C N"], scores: Float[Tensor, "C N"], *, beta: float
) -> Float[Tensor, "C N"]:
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
        best = optimal_logprobs(reference, scores, beta=spread * 2.0 ** (first - step / STEPS_PER_OCTAVE))
        points.append((_mean(best, best - reference), _mean(best, scores)))
    return points


def _mean(logprobs: Float[Tensor, "C N"], values: Float[Tensor, "C N"]) -> float:
    """Compute the expectation of `values`, averaged over prompts; completions of probability 0 contribute 0."""
    return float((logprobs.exp() * values.where(logprobs.isfinite(), 0.0)).sum(dim=1).mean())
