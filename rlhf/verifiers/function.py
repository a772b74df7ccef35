"""The verifier that is a Python function: grade(completion, row)."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from rlhf.errors import ConfigError, RewardError
from rlhf.user_code import OBJECT, files_of, load_function
from rlhf.verifiers.grader import GradeFunction, Grader


class FunctionGrader(Grader):
    """Grades by a function of yours: `grade(completion, row)`, which returns a number, None or named numbers."""

    argument: ClassVar[str | None] = "target"

    type: Literal["function"] = "function"
    target: str
    """path/to/file.py:function, or module:function."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments passed to the function unchanged."""

    def check(self) -> None:
        """Import the function and check its arguments.

        Raises:
            RewardError: it cannot be imported, or does not take a completion and a row.
            ConfigError: it is a Python object without an import path, which a child process cannot have.
        """
        if self.target.startswith(OBJECT):
            raise ConfigError(
                f"the verifier {self.target!r} is a Python object without a file, and verifiers run in processes of "
                "their own: put the function into a .py file and name it as my_file.py:grade"
            )
        function = load_function(self.target)
        try:
            inspect.signature(function).bind("", {}, **self.kwargs)
        except ValueError:  # some built-ins have no signature
            return
        except TypeError as error:
            arguments = ", ".join(["completion", "row", *self.kwargs])
            raise RewardError(
                f"the verifier {self.target!r} is called with ({arguments}), but has the arguments "
                f"{inspect.signature(function)}: {error}. Write grade(completion, row)"
            ) from error

    def describe(self) -> str:
        """Return the import path."""
        return self.target

    def code_files(self) -> Mapping[str, Path]:
        """Return the file of the function, if the target names one."""
        return files_of(self.target)

    def start(self) -> GradeFunction:
        """Return the function.

        Raises:
            RewardError: it cannot be imported.
        """
        function = load_function(self.target)
        return partial(function, **self.kwargs) if self.kwargs else function
