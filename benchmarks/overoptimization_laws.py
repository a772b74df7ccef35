"""The laws of reward-model over-optimization (Gao, Schulman & Hilton 2023), fitted with bootstrap intervals."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.stats import bootstrap

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
    """A fitted law: its coefficients, the place and height of its peak, and the root mean square of its residuals.

    `peak_kl` is None if the law has no peak: β is not above 0, or the score only falls.
    """

    law: Law
    alpha: Coefficient
    beta: Coefficient
    peak_kl: float | None
    peak_gain: float | None
    residual: float
    points: int


def features(distance: Floats, law: Law) -> Floats:
    """Compute the factors of α and β: d and -d², or d and -d log d (0 at d = 0)."""
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
        gain: the gold score less the start's, of the same shape.
        law: best_of_n or rl.

    Raises:
        ValueError: fewer than two different distances above 0 do not determine the two coefficients.
    """
    if len(np.unique(distance[distance > 0])) < 2:
        raise ValueError("a law has two coefficients: give the gain at two distances above 0, or more")
    matrix = features(distance.ravel(), law)
    (alpha, beta), *_ = np.linalg.lstsq(matrix, gain.ravel(), rcond=None)
    return float(alpha), float(beta)


def peak(alpha: float, beta: float, law: Law) -> tuple[float, float] | None:
    """Compute the KL, in nats, at which a law peaks, and the gain there; None if it has no peak above 0.

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

    A curve is independent of the others: of best-of-n it is a prompt (or all of the prompts of one reward model), of
    training a run. A single curve cannot be resampled: its points are, which ignores that they depend on each other.

    Args:
        distances: sqrt(KL) of each point of each curve, [C, M].
        gains: the gold score less the start's, [C, M].
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
