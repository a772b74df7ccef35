"""The share of rows that are right, with its interval."""

from __future__ import annotations

from statistics import fmean

import datasets
import evaluate

from rlhf.evaluation.win_rate import wilson

DESCRIPTION = """The mean of one verdict per independent row: 1 for right, 1/2 for a tie, 0 for wrong. With the 95 %
interval of Wilson (1927)."""


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
