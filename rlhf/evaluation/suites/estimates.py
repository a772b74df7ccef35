"""Estimators for the suites: Wilson intervals of shares, pass@k, wins of pairs, and means."""

from __future__ import annotations

import math
from collections.abc import Sequence

Z95 = 1.959963984540054  # the 97.5 % quantile of the standard normal


def wilson(successes: int | float, total: int) -> tuple[float, float]:
    """Compute the 95 % score interval of a share (Wilson 1927); `successes` may count a tie half.

    (p + z²/2n ± z sqrt(p (1 - p) / n + z²/4n²)) / (1 + z²/n),   p = successes / n
    """
    assert 0 <= successes <= total, (successes, total)
    assert total, "a share of nothing"
    share, z2 = successes / total, Z95**2
    center = share + z2 / (2 * total)
    half = Z95 * math.sqrt(share * (1 - share) / total + z2 / (4 * total**2))
    scale = 1 + z2 / total
    low, high = (center - half) / scale, (center + half) / scale
    return max(0.0, min(low, share)), min(1.0, max(high, share))  # rounding may put 1 of 1 above its interval


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Estimate without bias the probability that at least one of k samples is right (Chen et al. 2021, eq. 1).

        1 - C(n - c, k) / C(n, k)   for c = `correct` of n = `samples`

    Raises:
        ValueError: k is not from 1 to n, or c is not from 0 to n.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs at least {k} samples a problem, and there are {samples}")
    if not 0 <= correct <= samples:
        raise ValueError(f"{correct} right of {samples} samples")
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


def mean_pass_at_k(verdicts: Sequence[Sequence[bool]], k: int) -> float:
    """Average `pass_at_k` over problems, given which samples of each problem are right."""
    if not verdicts:
        raise ValueError("pass@k of no problems")
    return math.fsum(pass_at_k(len(row), sum(map(bool, row)), k) for row in verdicts) / len(verdicts)


def wins(a: Sequence[float], b: Sequence[float]) -> list[float]:
    """Return 1 where A is above B, 1/2 where they are equal, else 0."""
    if len(a) != len(b):
        raise ValueError(f"{len(a)} scores on one side and {len(b)} on the other")
    return [1.0 if x > y else 0.5 if x == y else 0.0 for x, y in zip(a, b, strict=True)]


def mean(values: Sequence[float]) -> float:
    """Compute the mean, with an exact sum."""
    if not values:
        raise ValueError("the mean of nothing")
    return math.fsum(values) / len(values)
