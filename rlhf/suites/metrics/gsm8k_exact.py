"""Exact match between the final numbers of worked solutions and their references."""

from __future__ import annotations

import datasets
import evaluate

from rlhf.suites.gsm8k import expected_answer, final_answer

DESCRIPTION = "The share of solutions whose final answer is exactly the number of the reference (Cobbe et al. 2021)."
INPUTS = """
predictions: solutions, as text; the answer is found after ####, in a box, after "the answer is", or is the last number.
references: GSM8K's solutions, which end in `#### number`, or texts that are or end in the number.
announced_only: count an answer only where it is announced, not where it is just the last number.
"""


class Gsm8kExact(evaluate.Metric):  # type: ignore[misc]  # evaluate has no types
    """Exact match of final answers as a metric of the `evaluate` library; defined in DESCRIPTION."""

    def _info(self) -> evaluate.MetricInfo:
        """Return the description, citation and input features of the metric."""
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="Cobbe et al. (2021), Training verifiers to solve math word problems.",
            inputs_description=INPUTS,
            features=datasets.Features(
                {"predictions": datasets.Value("string"), "references": datasets.Value("string")}
            ),
        )

    def _compute(
        self, predictions: list[str], references: list[str], announced_only: bool = False
    ) -> dict[str, float | int]:
        """Compute the shares of exact matches and of texts without a number, and the number of texts.

        Raises:
            ValueError: a reference has no number.
        """
        correct = no_answer = 0
        for text, reference in zip(predictions, references, strict=True):
            expected = expected_answer(reference)
            if expected is None:
                stated = final_answer(reference)
                if stated is None:
                    raise ValueError(f"this reference has no number: {reference[:100]!r}")
                expected = stated.value
            answer = final_answer(text)
            no_answer += answer is None
            correct += answer is not None and answer.value == expected and (answer.announced or not announced_only)
        return {
            "exact_match": correct / len(predictions),
            "no_answer": no_answer / len(predictions),
            "n": len(predictions),
        }
