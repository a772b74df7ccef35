"""The ifeval verifier: the share of a row's checkable instructions that a completion follows."""

from __future__ import annotations

from typing import Any, Literal

from rlhf.constraints.checks import require_langdetect
from rlhf.constraints.reward import ARGUMENTS_COLUMN, DETECTING_KINDS, KIND_COLUMN, read_constraints, verify
from rlhf.verifiers.grader import GradeFunction, Grader, Row


class IfevalGrader(Grader):
    """Grades by IFEval's instructions (Zhou et al. 2023): the row has `instruction_id_list` and `kwargs`."""

    type: Literal["ifeval"] = "ifeval"
    loose: bool = False
    """Check the eight loose variants of the completion, too, like the loose accuracy of IFEval."""
    all: bool = False
    """Only a completion that follows every instruction earns 1; false: the share of those that it follows."""

    def check_row(self, row: Row) -> None:
        """Check that the package that detects languages is there if an instruction of the row needs it."""
        if isinstance(kinds := row.get(KIND_COLUMN), list) and DETECTING_KINDS.intersection(kinds):
            require_langdetect()

    def start(self) -> GradeFunction:
        """Return the function that checks the instructions; the verdicts are the suite's."""

        def grade(completion: str, row: Row) -> float | None:
            if row.get(KIND_COLUMN) is None:
                return None
            given: dict[str, Any] = {KIND_COLUMN: row[KIND_COLUMN], ARGUMENTS_COLUMN: row.get(ARGUMENTS_COLUMN)}
            self.check_row(row)
            verdict = verify(read_constraints(given), completion)
            met = verdict.loose if self.loose else verdict.strict
            return float(all(met)) if self.all else sum(met) / len(met)

        return grade
