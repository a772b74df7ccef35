"""How often scores rank the chosen side of a preference pair above the rejected side."""

from __future__ import annotations

from statistics import fmean

import datasets
import evaluate

from rlhf.evaluation.win_rate import wilson
from rlhf.suites.metrics.win_rate import wins

DESCRIPTION = """The share of preference pairs whose chosen side is scored higher; a tie counts half. With the 95 %
interval of Wilson (1927). For rewards it is the accuracy of a reward model, for beta (log pi - log pi_ref) of
DPO's implicit reward (Rafailov et al. 2023)."""


class PairwiseAccuracy(evaluate.Metric):  # type: ignore[misc]  # evaluate has no types
    """Pairwise accuracy as a metric of the `evaluate` library; defined in DESCRIPTION."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="Rafailov et al. (2023), Direct preference optimization.",
            inputs_description="predictions: scores of the chosen sides. references: scores of the rejected sides.",
            features=datasets.Features({name: datasets.Value("float64") for name in ("predictions", "references")}),
        )

    def _compute(self, predictions: list[float], references: list[float]) -> dict[str, float | list[float]]:
        outcomes = wins(predictions, references)
        low, high = wilson(sum(outcomes), len(outcomes))
        return {"accuracy": fmean(outcomes), "low": low, "high": high, "outcomes": outcomes}
