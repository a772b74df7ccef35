"""Exact match between the final numbers of worked solutions and their references."""

from __future__ import annotations

from fractions import Fraction

import datasets
import evaluate

from rlhf.verifiers.numeric_answers import expected_answer, final_answer

DESCRIPTION = "The share of solutions whose final answer is exactly the number of the reference (Cobbe et al. 2021)."
INPUTS = """
predictions: solutions, as text; the answer is found after ####, in a box, after "the answer is", or is the last number.
references: GSM8K's solutions, which end in `#### number`, or texts that are or end in the number.
announced_only: count an answer only if it is announced, not if it is just the last number.
"""


class Gsm8kExact(evaluate.Metric):  # type: ignore[misc]  # evaluate has no types
    """Exact match of final answers as a metric of the `evaluate` library; defined in DESCRIPTION."""

    def _info(self) -> evaluate.MetricInfo:
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
    ) -> dict[str, object]:
        """Compute the shares of exact matches and of texts without a number, and the verdict on every text.

        Raises:
            ValueError: a reference has no number.
        """
        answers = [final_answer(text) for text in predictions]
        expected = [_number(reference) for reference in references]
        right = [
            answer is not None and answer.value == value and (answer.announced or not announced_only)
            for answer, value in zip(answers, expected, strict=True)
        ]
        return {
            "exact_match": sum(right) / len(right),
            "no_answer": answers.count(None) / len(answers),
            "n": len(right),
            "right": right,
            "announced": [answer is not None and answer.announced for answer in answers],
            "answers": [None if answer is None else str(answer.value) for answer in answers],
        }


def _number(reference: str) -> Fraction:
    """Return the number that a reference ends in."""
    expected = expected_answer(reference)
    if expected is not None:
        return expected
    stated = final_answer(reference)
    if stated is None:
        raise ValueError(f"this reference has no number: {reference[:100]!r}")
    return stated.value
