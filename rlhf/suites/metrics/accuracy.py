"""The share of rows that are right, with its interval."""

from __future__ import annotations

import math
from statistics import fmean

import datasets
import evaluate

DESCRIPTION = """The mean of one verdict per independent row: 1 for right, 1/2 for a tie, 0 for wrong. With the 95 %
interval of Wilson (1927)."""
Z95 = 1.959963984540054  # the 97.5 % quantile of the standard normal


class Accuracy(evaluate.Metric):  # type: ignore[misc]  # evaluate has no types
    """Accuracy as a metric of the `evaluate` library; defined in DESCRIPTION."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="Wilson (1927), Probable inference, the law of succession, and statistical inference.",
            inputs_description="predictions: verdicts, each from 0 to 1.",
            features=datasets.Features({"predictions": datasets.Value("float64")}),
        )

    def _compute(self, predictions: list[float]) -> dict[str, float]:
        low, high = wilson(sum(predictions), len(predictions))
        return {"accuracy": fmean(predictions), "low": low, "high": high}


def wilson(successes: int | float, total: int) -> tuple[float, float]:
    """Compute the 95 % score interval of a share (Wilson 1927); `successes` may count a tie half.

    (p + z²/2n ± z sqrt(p (1 - p) / n + z²/4n²)) / (1 + z²/n),   p = successes / n
    """
    assert 0 <= successes <= total, (successes, total)
    assert total, "no rows"
    share, z2 = successes / total, Z95**2
    center = share + z2 / (2 * total)
    half = Z95 * math.sqrt(share * (1 - share) / total + z2 / (4 * total**2))
    scale = 1 + z2 / total
    low, high = (center - half) / scale, (center + half) / scale
    return max(0.0, min(low, share)), min(1.0, max(high, share))  # rounding may put 1 of 1 above its interval
