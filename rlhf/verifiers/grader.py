"""The family of graders: their base, and the contract of a grade.

    grade(completion, row) -> float | None | {name: float}

None means that the grader does not apply to the row. A mapping has several named rewards, and a name that is left out
or None does not apply. A class below `Grader` is a verifier that `reward.source.name` can name, in this package or in
a plug-in.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from rlhf.errors import did_you_mean
from rlhf.section import Choice

Row: TypeAlias = Mapping[str, Any]
Grade: TypeAlias = float | Mapping[str, float | None] | None
GradeFunction: TypeAlias = Callable[[str, Row], Grade]
FUNCTION = "function"  # the type of a grader that is a function of the user


class Grader(Choice):
    """Grades one completion by a program; `type` is the verifier's name."""

    argument: ClassVar[str | None] = None
    """The field that the text after the colon in `name: TYPE:...` sets; None: the name has no colon."""
    default_weights: ClassVar[Mapping[str, float]] = {}
    """Factors of the named rewards if `reward.source.weights` has none; a name that is in neither has 1."""

    @abstractmethod
    def start(self) -> GradeFunction:
        """Return the function that grades; called once in each child process.

        Raises:
            UserError: a package is missing, or the grader cannot be trusted; the message says what to do.
        """

    def describe(self) -> str:
        """Return the grader's short name."""
        return self.type if self.argument is None else f"{self.type}:{getattr(self, self.argument)}"

    def check(self) -> None:
        """Check before a run, quickly, that the packages and files of the grader are there.

        Raises:
            UserError: one is missing; the message says what to do.
        """

    def check_row(self, row: Row) -> None:
        """Check before a run, quickly, that the packages that a row needs are there.

        Raises:
            UserError: one is missing; the message says what to do.
        """

    def reference(self, row: Row) -> str | None:
        """Return a completion that earns the best grade of the row; None if the row does not tell one."""
        return None

    def code_files(self) -> Mapping[str, Path]:
        """Return the files of user code by their field."""
        return {}


def settings_of(name: str) -> dict[str, Any]:
    """Return the settings that a short name stands for: math, reasoning_gym:TASK, or my.py:grade.

    Raises:
        ValueError: no verifier has this name.
    """
    head, colon, rest = name.partition(":")
    members = Grader.choices()
    if not colon and name in members:
        return {"type": name}
    argument = members[head].argument if head in members else None
    if argument is not None and rest:
        return {"type": head, argument: rest}
    if colon and head and rest and head not in members:
        return {"type": FUNCTION, "target": name}
    raise ValueError(
        f"no verifier {name!r}; choose from {', '.join(members)}, or name a function of yours as my_file.py:grade"
        f"{did_you_mean(name, members)}"
    )


def checked_grade(grade: object) -> dict[str, float] | float | None:
    """Return a grade as plain data; named rewards that do not apply are left out, and an empty mapping is None.

    Raises:
        TypeError: it is neither a number, None nor a mapping of names to numbers.
        ValueError: a number is NaN or infinite.
    """
    if isinstance(grade, Mapping):
        named = {str(name): _number(value) for name, value in grade.items() if value is not None}
        return named or None
    return None if grade is None else _number(grade)


def _number(value: object) -> float:
    value = value.item() if hasattr(value, "item") else value
    if not isinstance(value, int | float):
        raise TypeError(f"a grade is a number, None or a dict of numbers, not {type(value).__name__}")
    if not math.isfinite(value):
        raise ValueError(f"a grade is {value}: return None if the grader does not apply")
    return float(value)
