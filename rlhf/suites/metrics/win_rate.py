"""How often A scores higher than B on the same prompt."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import datasets
import evaluate
import torch

from rlhf.evaluation.win_rate import bootstrap

DESCRIPTION = """The share of prompts on which A is scored above B, a tie counting half, with its 95 % interval by
bootstrap over the prompts (2,000 resamples); of wins or losses alone, the interval of Wilson (1927)."""


class WinRate(evaluate.Metric):  # type: ignore[misc]  # evaluate has no types
    """Win rate as a metric of the `evaluate` library; defined in DESCRIPTION."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="Efron (1979), Bootstrap methods: another look at the jackknife.",
            inputs_description="predictions: A's scores. references: B's, prompt by prompt. bootstrap_seed: a number.",
            features=datasets.Features({name: datasets.Value("float64") for name in ("predictions", "references")}),
        )

    def _compute(
        self, predictions: list[float], references: list[float], bootstrap_seed: int = 0
    ) -> dict[str, float | list[float]]:
        outcomes = wins(predictions, references)
        interval = bootstrap(torch.tensor(outcomes, dtype=torch.float64), seed=bootstrap_seed, shares=True)
        return {
            "win_rate": fmean(outcomes),
            "low": interval.low,
            "high": interval.high,
            "ties": outcomes.count(0.5) / len(outcomes),
            "outcomes": outcomes,
        }


def wins(a: Sequence[float], b: Sequence[float]) -> list[float]:
    """Return 1 if A is above B, 1/2 if they are equal, else 0."""
    if len(a) != len(b):
        raise ValueError(f"{len(a)} scores on one side and {len(b)} on the other")
    return [1.0 if x > y else 0.5 if x == y else 0.0 for x, y in zip(a, b, strict=True)]
