"""The unbiased estimator of pass@k."""

from __future__ import annotations

import datasets
import evaluate

from rlhf.suites.questions import mean_pass_at_k

DESCRIPTION = """The probability that at least one of k samples of a problem is right, averaged over problems:
1 - C(n - c, k) / C(n, k) for c right of n samples, which is unbiased (Chen et al. 2021, eq. 1)."""


class PassAtK(evaluate.Metric):  # type: ignore[misc]  # evaluate has no types
    """pass@k as a metric of the `evaluate` library; defined in DESCRIPTION."""

    def _info(self) -> evaluate.MetricInfo:
        """Return the description, citation and input features of the metric."""
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="Chen et al. (2021), Evaluating large language models trained on code.",
            inputs_description="predictions: for each problem, whether each of its samples is right. k: a list of k.",
            features=datasets.Features({"predictions": datasets.Sequence(datasets.Value("bool"))}),
        )

    def _compute(self, predictions: list[list[bool]], k: tuple[int, ...] = (1,)) -> dict[str, float]:
        """Compute pass@k for each k."""
        return {f"pass@{size}": mean_pass_at_k(predictions, size) for size in k}
