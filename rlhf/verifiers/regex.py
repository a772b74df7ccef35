"""The regex verifier: a pattern that the completion has to match."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import field_validator, model_validator

from rlhf.verifiers.grader import GradeFunction, Grader, Row


class RegexGrader(Grader):
    """Grades 1 if a regular expression matches, else 0; with `answer`, its first group has to be the answer too."""

    type: Literal["regex"] = "regex"
    pattern: str | None = None
    """The regular expression, of Python; null: the pattern in the row's column `row_pattern`."""
    row_pattern: str = "pattern"
    """The column with each row's own pattern, if `pattern` is null; a row without one is not graded."""
    answer: str | None = None
    """The column with the text that the last match's first group has to be, without outer white space; null: a match
    is enough."""
    whole: bool = False
    """The pattern has to match the whole completion, without outer white space."""

    @field_validator("pattern")
    @classmethod
    def _check_pattern(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
        return pattern

    @model_validator(mode="after")
    def _check_group(self) -> RegexGrader:
        if self.answer is not None and self.pattern is not None and re.compile(self.pattern).groups == 0:
            raise ValueError("answer is set, and pattern has no group: put what is the answer into parentheses")
        return self

    def start(self) -> GradeFunction:
        """Return the function that matches."""

        def grade(completion: str, row: Row) -> float | None:
            pattern = self.pattern if self.pattern is not None else row.get(self.row_pattern)
            expected = row.get(self.answer) if self.answer is not None else None
            if pattern is None or (self.answer is not None and expected is None):
                return None
            compiled, text = re.compile(str(pattern), re.DOTALL), completion.strip()
            if self.whole:
                whole = compiled.fullmatch(text)
                matches = [] if whole is None else [whole]
            else:
                matches = list(compiled.finditer(text))
            if not matches or self.answer is None:
                return float(bool(matches))
            return float((matches[-1].group(1) or "").strip() == str(expected).strip())

        return grade
