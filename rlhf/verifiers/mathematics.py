"""The math verifier: the final answer of a worked solution, compared with the row's."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from fractions import Fraction
from typing import Any, Literal

from rlhf.errors import ConfigError, RewardError, install_hint
from rlhf.verifiers.grader import GradeFunction, Grader, Row
from rlhf.verifiers.numeric_answers import boxed_number, expected_answer, final_answer, last_box, lone_number

# Gold answer, prediction, whether they are the same. The order of gold and prediction matters to math-verify.
SELF_TEST: tuple[tuple[str, str, bool], ...] = (
    ("1/2", "\\boxed{0.5}", True),
    ("42", "The answer is 42.", True),
    ("42", "The answer is 43.", False),
    ("1000", "\\boxed{1,000}", True),
    ("3", "I count 1, 2, and 3", True),
    ("3", "3 is not the answer: \\boxed{4}", False),
    ("-7", "\\boxed{-7}", True),
    ("-7", "\\boxed{7}", False),
    ("0.25", "\\boxed{\\frac{1}{4}}", True),
    ("72", "48 + 24 = 72\n#### 72", True),
    ("72", "#### 27", False),
    ("5", "", False),
    ("5", "I don't know.", False),
    ("\\frac{3}{4}", "\\boxed{3/4}", True),
    ("\\frac{3}{4}", "\\boxed{4/3}", False),
    ("12", "\\boxed{12}", True),
    ("12", "\\boxed{12} or \\boxed{13}", False),
    ("0", "\\boxed{0}", True),
    ("0", "\\boxed{}", False),
    ("100", "She pays \\$100.", True),
    ("-1/2", "\\boxed{-\\frac{1}{2}}", True),
    ("1/2", "\\boxed{-\\frac{1}{2}}", False),
    ("-3", "\\boxed{- 3}", True),
    ("5", "\\boxed{5\\text{ cm}}", True),
    ("5", "\\boxed{5x}", False),
    ("2", "\\boxed{2+3}", False),
)
SYMBOLIC_TEST: tuple[tuple[str, str, bool], ...] = (
    ("x^2 - 1", "\\boxed{(x-1)(x+1)}", True),
    ("\\sqrt{8}", "\\boxed{2\\sqrt{2}}", True),
    ("\\sqrt{8}", "\\boxed{2\\sqrt{3}}", False),
    ("6", "\\boxed{2\\cdot 3}", True),
    ("2", "\\boxed{2\\sqrt{3}}", False),
)


class MathGrader(Grader):
    """Grades 1 if the final answer is the row's, else 0.

    A number is compared exactly, as a fraction, by our own parser. Anything else (an expression, a set, an interval)
    needs the package math-verify, which the extra `math` installs; without it such a row is not graded, and such an
    answer in a box (`\\boxed{2\\sqrt{3}}`) of a row with a number is wrong.
    """

    type: Literal["math"] = "math"
    answer: str = "answer"
    """The column with the right answer: a number, or a worked solution that ends in `#### 42` or `\\boxed{42}`."""
    announced: bool = False
    """The answer has to be announced, as in `\\boxed{42}`, `#### 42` or "the answer is 42"; false: the last number of
    the text counts if none is announced."""
    symbolic: Literal["auto", "off", "on"] = "auto"
    """Compare by math-verify if the answer is no number. auto: if it is installed; on: refuse to start if not."""

    def check(self) -> None:
        """Check that math-verify is installed if `symbolic` is on.

        Raises:
            ConfigError: it is missing.
        """
        if self.symbolic == "on" and not _has_math_verify():
            raise ConfigError(f"symbolic=on needs the package math-verify: {install_hint('math')}")

    def start(self) -> GradeFunction:
        """Return the comparison, after a self test, which tells whether gold and prediction are mixed up.

        Raises:
            ConfigError: math-verify is not installed, and `symbolic` is on.
            RewardError: the self test fails.
        """
        self.check()
        symbolic = _symbolic() if self.symbolic != "off" and _has_math_verify() else None

        def compare(gold: str, text: str) -> float | None:
            expected = expected_number(gold)
            if expected is None:
                return None if symbolic is None else float(symbolic(gold, text))
            answer = final_answer(text)
            if answer is None:  # the box may have an expression
                box = last_box(text)
                return float(bool(box) and symbolic is not None and symbolic(str(expected), f"\\boxed{{{box}}}"))
            return float(answer.value == expected and (answer.announced or not self.announced))

        tests = SELF_TEST + (() if symbolic is None else SYMBOLIC_TEST)
        wrong = [
            pair
            for pair in tests
            if not (self.announced and "\\boxed" not in pair[1]) and compare(*pair[:2]) != pair[2]
        ]
        if wrong:
            raise RewardError(f"the math verifier fails its self test at gold {wrong[0][0]!r}, answer {wrong[0][1]!r}")

        def grade(completion: str, row: Row) -> float | None:
            gold = row.get(self.answer)
            return None if gold is None else compare(str(gold), completion)

        return grade

    def reference(self, row: Row) -> str | None:
        """Return the row's answer in a box."""
        gold = row.get(self.answer)
        if gold is None:
            return None
        expected = expected_number(str(gold))
        return f"The answer is \\boxed{{{gold if expected is None else expected}}}."


def expected_number(gold: str) -> Fraction | None:
    """Return the number that a gold answer is, or that its worked solution ends in; None if it is no number."""
    marked = expected_answer(gold)
    if marked is not None:
        return marked
    return boxed_number(gold) if last_box(gold) is not None else lone_number(gold)


def _has_math_verify() -> bool:
    return importlib.util.find_spec("math_verify") is not None


def _symbolic() -> Callable[[str, str], bool]:
    """Return math-verify's comparison, without its own timers: they work in the main thread only, and ours kill."""
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timers are off
    configs: list[Any] = [math_verify.LatexExtractionConfig(), math_verify.ExprExtractionConfig()]

    def compare(gold: str, text: str) -> bool:
        marked = gold if "\\boxed" in gold or "$" in gold else f"\\boxed{{{gold}}}"
        parsed_gold = math_verify.parse(marked, configs, parsing_timeout=None)
        parsed = math_verify.parse(text, configs, parsing_timeout=None)
        if not parsed_gold:
            raise ValueError(f"math-verify cannot read the row's answer {gold!r}")
        return bool(math_verify.verify(parsed_gold, parsed, timeout_seconds=None))

    return compare
