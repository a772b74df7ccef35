"""The reports of a comparison while it runs: its warnings, the cells that run, and its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from rlhf.comparison.board import Board
from rlhf.comparison.results import ComparisonResults
from rlhf.guard.rule import Violation
from rlhf.tracking.view import View


class ComparisonView:
    """Receives the reports of a comparison, and shows nothing; a subclass overrides methods to show some.

    The `rlhf` program has the subclass rlhf.comparison.terminal.ComparisonTerminal.

    Args:
        run: receives the reports of runs in this process (the lab's), and headings and notes.
    """

    def __init__(self, run: View | None = None) -> None:
        self.run = run or View()

    def violations(self, violations: Mapping[str, Sequence[Violation]]) -> None:
        """Receive the rules that each arm breaks, by its name."""

    def board(self, total: int, *, alone: bool) -> Board:
        """Return the display of `total` cells while they run; `alone`: one at a time."""
        return Board(Console(quiet=True), total, alone=alone)

    def results(self, results: ComparisonResults, report: Path) -> None:
        """Receive the results, and the path of the page."""
