"""How often A's score is above B's on the same prompt."""

from __future__ import annotations

import datasets
import evaluate
import torch

from rlhf.evaluation.suites.estimates import wins
from rlhf.evaluation.win_rate import bootstrap

DESCRIPTION = """The share of prompts on which A is scored above B, a tie counting half, with its 95 % interval by
bootstrap over the prompts (2,000 resamples)."""


class WinRate(evaluate.Metric):  # type: ignore[misc]  # evaluate has no types
    """See DESCRIPTION."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="Efron (1979), Bootstrap methods: another look at the jackknife.",
            inputs_description="predictions: A's scores. references: B's, prompt by prompt. bootstrap_seed: a number.",
            features=datasets.Features({name: datasets.Value("float64") for name in ("predictions", "references")}),
        )

    def _compute(self, predictions: list[float], references: list[float], bootstrap_seed: int = 0) -> dict[str, float]:
        verdicts = wins(list(predictions), list(references))
        found = bootstrap(torch.tensor(verdicts, dtype=torch.float64), seed=bootstrap_seed)
        ties = sum(verdict == 0.5 for verdict in verdicts) / len(verdicts)
        return {"win_rate": found.value, "low": found.low, "high": found.high, "ties": ties}
