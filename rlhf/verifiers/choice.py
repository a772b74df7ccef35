"""The choice verifier: the letter of a multiple-choice answer."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from rlhf.verifiers.grader import GradeFunction, Grader, Row

JOINED = r"\s*(?:[,/&]|\bor\b|\band\b)\s*"
NO_OTHER = rf"(?!\)?{JOINED}\(?{{letters}}\)?(?:{JOINED}|[\s.}}}}]*$))"  # "B or C" announces two
ANNOUNCED = (
    r"\\boxed\s*\{{?\s*(?:\\(?:text|textbf|mathrm|mathbf)\s*\{{)?\s*\(?({letters})\b" + NO_OTHER,
    r"\banswer\b(?:\s+is|\s*[:=])?\s*(?:is\s*)?[:=]?[*_`\"'\s]*\(?({letters})\b(?!['’])" + NO_OTHER,
)
ALONE = r"[\s(*_`\"']*({letters})[\s).:*_`\"']*"  # the whole of a line is the letter
FIRST = r"[\s*_`\"']*\(?({letters})[).:](?:\s|$)"  # the first line begins with it: "B) Paris"


class ChoiceGrader(Grader):
    """Grades a multiple-choice answer by its letter: 1 if it is the row's, else 0; 0 if two letters are announced."""

    argument: ClassVar[str | None] = None

    type: Literal["choice"] = "choice"
    answer: str = "answer"
    """The column with the right letter; or its number, from 0, also as text. If digits are among the letters, a number
    is the letter itself."""
    letters: Annotated[str, Field(min_length=2)] = "ABCDEFGH"
    """The letters of the choices, in their order: capitals or digits, each once."""

    @field_validator("letters")
    @classmethod
    def _check_letters(cls, letters: str) -> str:
        if not letters.isalnum() or letters != letters.upper() or len(set(letters)) < len(letters):
            raise ValueError(f"{letters!r}: write capitals or digits, each once, as in ABCD")
        return letters

    def start(self) -> GradeFunction:
        """Return the function that compares the letters."""

        def grade(completion: str, row: Row) -> float | None:
            expected = self._expected(row)
            return None if expected is None else float(chosen_letter(completion, self.letters) == expected)

        return grade

    def reference(self, row: Row) -> str | None:
        """Return the answer's sentence."""
        expected = self._expected(row)
        return None if expected is None else f"The answer is {expected}."

    def _expected(self, row: Row) -> str | None:
        """Return the right letter; None if the row has no answer.

        Raises:
            ValueError: the column has something else.
        """
        value = row.get(self.answer)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # 1.0 is pandas' form of a column of whole numbers with gaps
        letter = str(value).strip().strip("().:").upper()
        if len(letter) == 1 and letter in self.letters:
            return letter
        has_digits = any(one.isdecimal() for one in self.letters)
        if letter.isdecimal() and int(letter) < len(self.letters) and not has_digits:
            return self.letters[int(letter)]
        raise ValueError(f"the column {self.answer!r} has {value!r}, which is none of the letters {self.letters}")


def chosen_letter(text: str, letters: str) -> str | None:
    """Return the letter that a text announces as its answer; None without one, or if its last line announces two.

    Searched, in this order: the last `\\boxed{B}`, the last "answer is B" or "answer: B", a last line that is the
    letter alone, and a first line that begins with it, as in "B) Paris". An article ("A cat") is no answer.
    """
    any_letter = f"[{re.escape(letters)}]"
    for pattern in ANNOUNCED:
        every = re.findall(pattern.format(letters=any_letter), text, re.IGNORECASE | re.MULTILINE)
        capitals = [letter for letter in every if letter in letters]
        if capitals:
            last_line = text.strip().rpartition("\n")[2]
            last = {letter for letter in re.findall(pattern.format(letters=any_letter), last_line) if letter in letters}
            return capitals[-1] if len(last) <= 1 else None
    lines = [line for line in text.strip().splitlines() if line.strip()]
    if not lines:
        return None
    alone = re.fullmatch(ALONE.format(letters=any_letter), lines[-1])
    first = re.match(FIRST.format(letters=any_letter), lines[0])
    match = alone or first
    return match[1] if match else None
