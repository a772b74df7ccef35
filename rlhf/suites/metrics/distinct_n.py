"""The share of distinct n-grams in a set of texts."""

from __future__ import annotations

import datasets
import evaluate

from rlhf.evaluation.evaluate import distinct_n

DESCRIPTION = """Distinct n-grams over all n-grams of all texts, with words separated by whitespace
(Li et al. 2016): near 0 if texts repeat themselves or each other; NaN if there is no n-gram."""


class DistinctN(evaluate.Metric):  # type: ignore[misc]  # evaluate has no types
    """Distinct n-grams as a metric of the `evaluate` library; defined in DESCRIPTION."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="Li et al. (2016), A diversity-promoting objective function for neural conversation models.",
            inputs_description="predictions: texts. n: a list of n.",
            features=datasets.Features({"predictions": datasets.Value("string")}),
        )

    def _compute(self, predictions: list[str], n: tuple[int, ...] = (1, 2)) -> dict[str, float]:
        vocabulary: dict[str, int] = {}
        texts = [[vocabulary.setdefault(word, len(vocabulary)) for word in text.split()] for text in predictions]
        return {f"distinct_{size}": distinct_n(texts, size) for size in n}
