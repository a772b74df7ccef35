"""How often A scores higher than B on the same prompt."""

from __future__ import annotations

import datasets
import evaluate
import torch

from rlhf.evaluation.win_rate import bootstrap
from rlhf.suites.questions import wins

DESCRIPTION = """The share of prompts on which A is scored above B, a tie counting half, with its 95 % interval by
bootstrap over the prompts (2,000 resamples)."""


class WinRate(evaluate.Metric):  # type: ignore[misc]  # evaluate has no types
    """Win rate as a metric of the `evaluate` library; defined in DESCRIPTION."""

    def _info(self) -> evaluate.MetricInfo:
        """Return the description, citation and input features of the metric."""
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="Efron (1979), Bootstrap methods: another look at the jackknife.",
            inputs_description="predictions: A's scores. references: B's, prompt by prompt. bootstrap_seed: a number.",
            features=datasets.Features({name: datasets.Value("float64") for name in ("predictions", "references")}),
        )

    def _compute(self, predictions: list[float], references: list[float], bootstrap_seed: int = 0) -> dict[str, float]:
        """Compute the win rate, its 95 % interval and the share of ties."""
        verdicts = wins(list(predictions), list(references))
        interval = bootstrap(torch.tensor(verdicts, dtype=torch.float64), seed=bootstrap_seed)
        ties = sum(verdict == 0.5 for verdict in verdicts) / len(verdicts)
        return {"win_rate": interval.value, "low": interval.low, "high": interval.high, "ties": ties}
