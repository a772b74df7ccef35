"""How often scores rank the chosen side of a preference pair above the rejected side."""

from __future__ import annotations

import datasets
import evaluate

from rlhf.suites.questions import mean, wilson, wins

DESCRIPTION = """The share of preference pairs whose chosen side is scored higher; a tie counts half. With the 95 %
interval of Wilson (1927). For rewards it is the accuracy of a reward model, for beta (log pi - log pi_ref) that of
DPO's implicit reward (Rafailov et al. 2023)."""


class PairwiseAccuracy(evaluate.Metric):  # type: ignore[misc]  # evaluate has no types
    """Pairwise accuracy as a metric of the `evaluate` library; defined in DESCRIPTION."""

    def _info(self) -> evaluate.MetricInfo:
        """Return the description, citation and input features of the metric."""
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="Rafailov et al. (2023), Direct preference optimization.",
            inputs_description="predictions: scores of the chosen sides. references: scores of the rejected sides.",
            features=datasets.Features({name: datasets.Value("float64") for name in ("predictions", "references")}),
        )

    def _compute(self, predictions: list[float], references: list[float]) -> dict[str, float]:
        """Compute the accuracy and its 95 % interval."""
        verdicts = wins(list(predictions), list(references))
        low, high = wilson(sum(verdicts), len(verdicts))
        return {"accuracy": mean(verdicts), "low": low, "high": high}
