"""The terminal's display of a comparison: its cells while they run, and its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlhf.comparison.board import Board
from rlhf.comparison.results import ArmResult, ComparisonResults
from rlhf.comparison.summary import format_gain, ranking, suite_tables, verdict
from rlhf.comparison.tuning.run import tuning_notes, tuning_table
from rlhf.comparison.view import ComparisonView
from rlhf.guard.rule import Violation
from rlhf.report.charts import Table as SuiteTable
from rlhf.report.terminal import STYLES, Terminal
from rlhf.tracking.progress import printable


class ComparisonTerminal(ComparisonView):
    """Prints the reports of a comparison, and draws the cells that run."""

    def __init__(self, console: Console) -> None:
        super().__init__(Terminal(console))
        self._console = console

    def violations(self, violations: Mapping[str, Sequence[Violation]]) -> None:
        """Print the violations of each arm, a line each."""
        for name, broken in violations.items():
            for violation in broken:
                level = violation.rule.level
                self._console.print(Text(f"{level}: {name}: {violation}", style=STYLES[level]), soft_wrap=True)

    def board(self, total: int, *, alone: bool) -> Board:
        """Return a display in the terminal."""
        return Board(self._console, total, alone=alone)

    def results(self, results: ComparisonResults, report: Path) -> None:
        """Print a row for each arm, the tuning, the suites, caveats about cells, the verdict and the page's path."""
        table = Table("arm", "judge's score", "gain over start", "KL, nats", "status", box=None, pad_edge=False)
        ranked = ranking(results)
        for name in [*ranked, *(name for name in results.arms if name not in ranked)]:
            table.add_row(name, *_row(results.arms[name]))
        self._console.print(table)
        _print_tuning(results, self._console)
        for suite in suite_tables(results):
            _print_suite(suite, self._console)
        for note in results.notes:
            self._console.print(Text(printable(note)), soft_wrap=True)
        self._console.print(Text(printable(verdict(results))))
        self.run.note(f"report  {report}")


def _row(arm: ArmResult) -> list[str]:
    """Format an arm for the terminal: score, gain, KL and status."""
    if arm.final is None:
        return ["", "", "", arm.status]
    measures, bound = arm.final.measures, "≤ " if arm.kl_is_bound else ""
    return [
        "" if measures.score is None else f"{measures.score:.2f}",
        "" if measures.score is None else format_gain(arm.final.gain),
        "" if measures.kl is None else f"{bound}{measures.kl:.2f}",
        arm.status,
    ]


def _print_tuning(results: ComparisonResults, console: Console) -> None:
    """Print what tuning changed, without its costs (see the page)."""
    tuning = tuning_table(results)
    if tuning is None:
        return
    shown = [number for number, column in enumerate(tuning.columns) if not column.endswith("for tuning")]
    table = Table(box=None, pad_edge=False)
    for number in shown:
        table.add_column(tuning.columns[number] or "tuning", overflow="fold")
    for row in tuning.rows:
        table.add_row(*("" if row[number] is None else str(row[number]) for number in shown))
    console.print(table)
    for note in tuning_notes(results):
        console.print(Text(printable(note)), soft_wrap=True)


def _print_suite(suite: SuiteTable, console: Console) -> None:
    """Print the arm, the first two figures and the gain of each row; the page shows the rest."""
    table = Table(suite.title, *_shown_cells(suite.columns), box=None, pad_edge=False)
    for row in suite.rows:
        table.add_row(str(row[0]), *_shown_cells(row))
    console.print(table)


def _shown_cells(row: Sequence[object]) -> list[str]:
    """Return the first figure with its interval, the second without it, if there is one, and the gain."""
    _, first, *others, gain = map(str, row)
    return [first, *(figure.partition(" [")[0] for figure in others[:1]), gain]
