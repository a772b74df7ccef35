"""The unbiased estimator of pass@k."""

from __future__ import annotations

import math
from statistics import fmean

import datasets
import evaluate

DESCRIPTION = """The probability that at least one of k samples of a problem is right, averaged over problems:
1 - C(n - c, k) / C(n, k) for c right of n samples, which is unbiased (Chen et al. 2021, eq. 1)."""


class PassAtK(evaluate.Metric):  # type: ignore[misc]  # evaluate has no types
    """pass@k as a metric of the `evaluate` library; defined in DESCRIPTION."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="Chen et al. (2021), Evaluating large language models trained on code.",
            inputs_description="predictions: for each problem, whether each of its samples is right. k: a list of k.",
            features=datasets.Features({"predictions": datasets.Sequence(datasets.Value("bool"))}),
        )

    def _compute(self, predictions: list[list[bool]], k: tuple[int, ...] = (1,)) -> dict[str, float | list[float]]:
        problems = {size: [pass_at_k(len(row), sum(row), size) for row in predictions] for size in k}
        means = {f"pass@{size}": fmean(values) for size, values in problems.items()}
        return {**means, **{f"problems@{size}": values for size, values in problems.items()}}


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
