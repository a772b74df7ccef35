"""What a score costs in KL: frontiers, bounds of best-of-n, and the laws of reward-model over-optimization."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from scipy.stats import bootstrap
from torch import Tensor


def kl_bound(n: int) -> float:
    """Compute the upper bound on KL(best of n || start), in nats per completion.

        log n - (n - 1) / n

    It is the KL itself where no two completions tie and each is unlikely (Stiennon et al. 2020, appendix G.3), and an
    upper bound in general (Beirami et al. 2024, theorem 1).
    """
    return math.log(n) - (n - 1) / n


def expected_best(gold: Float[Tensor, "P N"], proxy: Float[Tensor, "P N"], n: int) -> Float[Tensor, " P"]:
    """Estimate the expected gold score of the best of n by the proxy, without bias, from N >= n samples of each prompt.

    This is the mean over all subsets of n of the N samples (Nakano et al. 2021, appendix I): with the samples in
    ascending order of the proxy,

        sum_{i=n}^{N}  C(i - 1, n - 1) / C(N, n) * gold_(i)

    Samples with equal proxy scores share their weights equally, as if ties were broken at random.

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
    ordered, order = proxy.double().sort(dim=1)
    golds = gold.double().gather(1, order)
    return (golds * _average_ties(weights.expand_as(ordered), ordered)).sum(dim=1)


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
    """Return the index of the best of the first n samples of each prompt by the proxy; ties go to the first."""
    return proxy[:, :n].argmax(dim=1)


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

    An evaluation is flagged where, compared with the evaluation of the best gold score so far, the proxy is higher and
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


Law = Literal["best_of_n", "rl"]
Floats = NDArray[np.float64]
RESAMPLES = 2000
LARGEST_EXPONENT = 4.0  # a peak at more than e^8, 3,000 nats, is beyond any policy: the data show none


@dataclass(frozen=True)
class Coefficient:
    """A coefficient of a law with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class LawFit:
    """A fitted law: its coefficients, where it peaks and how high, and the root mean square of its residuals.

    `peak_kl` is None where the law has no peak: β is not above 0, or the score only falls.
    """

    law: Law
    alpha: Coefficient
    beta: Coefficient
    peak_kl: float | None
    peak_gain: float | None
    residual: float
    points: int


def features(distance: Floats, law: Law) -> Floats:
    """Compute what α and β multiply: d and -d², or d and -d log d (0 at d = 0)."""
    if law == "best_of_n":
        return np.stack([distance, -(distance**2)], axis=-1)
    logs = np.log(np.where(distance > 0, distance, 1.0))
    return np.stack([distance, -distance * logs], axis=-1)


def predicted_gain(distance: Floats, alpha: float, beta: float, law: Law) -> Floats:
    """Compute the gain in gold score over the start at a distance d = sqrt(KL(policy || start)), KL in nats.

        best of n:  R(d) = d (α - β d)          reinforcement learning:  R(d) = d (α - β log d)

    Gao, Schulman & Hilton (2023), section 3.
    """
    gain: Floats = features(distance, law) @ np.array([alpha, beta])
    return gain


def fit_law(distance: Floats, gain: Floats, law: Law) -> tuple[float, float]:
    """Fit α and β by least squares: both laws are linear in them.

    Args:
        distance: sqrt(KL), of any shape.
        gain: the gold score less that of the start, of the same shape.
        law: best_of_n or rl.

    Raises:
        ValueError: fewer than two different distances above 0 determine nothing.
    """
    if len(np.unique(distance[distance > 0])) < 2:
        raise ValueError("a law has two coefficients: give the gain at two distances above 0, or more")
    matrix = features(distance.ravel(), law)
    (alpha, beta), *_ = np.linalg.lstsq(matrix, gain.ravel(), rcond=None)
    return float(alpha), float(beta)


def peak(alpha: float, beta: float, law: Law) -> tuple[float, float] | None:
    """Compute the KL, in nats, at which a law peaks, and the gain there; None where it has no peak above 0.

    best of n: d = α / 2β          reinforcement learning: d = exp(α/β - 1)
    """
    if beta <= 0 or (law == "best_of_n" and alpha <= 0):
        return None
    exponent = alpha / beta - 1
    if law == "rl" and exponent > LARGEST_EXPONENT:
        return None
    distance = alpha / (2 * beta) if law == "best_of_n" else math.exp(exponent)
    return distance**2, float(predicted_gain(np.array([distance]), alpha, beta, law)[0])


def fit_with_intervals(distances: Floats, gains: Floats, law: Law, *, seed: int) -> LawFit:
    """Fit a law to independent curves, and bootstrap the curves for its intervals.

    A curve is what is independent of the others: of best-of-n a prompt (or all of the prompts of one reward model), of
    training a run. With a single curve there is nothing to resample: its points are, which ignores that they depend on
    each other.

    Args:
        distances: sqrt(KL) of each point of each curve, [C, M].
        gains: the gold score less that of the start, [C, M].
        law: best_of_n or rl.
        seed: the seed of the bootstrap.
    """
    alpha, beta = fit_law(distances, gains, law)
    if len(distances) == 1:
        low, high = _interval(distances[0][:, None], gains[0][:, None], law, seed)
    else:
        low, high = _interval(distances, gains, law, seed)
    top = peak(alpha, beta, law)
    residuals = gains - predicted_gain(distances, alpha, beta, law)
    return LawFit(
        law=law,
        alpha=Coefficient(alpha, low[0], high[0]),
        beta=Coefficient(beta, low[1], high[1]),
        peak_kl=None if top is None else top[0],
        peak_gain=None if top is None else top[1],
        residual=float(np.sqrt((residuals.mean(axis=0) ** 2).mean())),
        points=gains.size,
    )


def _interval(distances: Floats, gains: Floats, law: Law, seed: int) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the lower and the upper ends of the percentile intervals of α and β over resampled rows."""
    moments = _moments(distances, gains, law)

    def coefficients(rows: NDArray[np.int64]) -> Floats:
        return moments(rows)

    result = bootstrap(
        (np.arange(len(distances)),),
        coefficients,
        n_resamples=RESAMPLES,
        vectorized=False,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return (float(result.low[0]), float(result.low[1])), (float(result.high[0]), float(result.high[1]))


def _moments(distances: Floats, gains: Floats, law: Law) -> Callable[[NDArray[np.int64]], Floats]:
    """Return a function that fits some of the rows by the normal equations, whose sums over rows add up."""
    matrix = features(distances, law)
    squares = np.einsum("cmi,cmj->cij", matrix, matrix)
    products = np.einsum("cmi,cm->ci", matrix, gains)

    def fit(rows: NDArray[np.int64]) -> Floats:
        solution: Floats = np.linalg.lstsq(squares[rows].sum(axis=0), products[rows].sum(axis=0), rcond=None)[0]
        return solution

    return fit
