"""Run the cells of a comparison, `jobs` at a time.

A cell that fails does not affect the others; a stop is passed on to all running cells.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from rich.console import Console

from rlhf.compare.board import Board
from rlhf.compare.judge import JUDGED
from rlhf.compare.plan import Cell, Plan, claim
from rlhf.config.compare import START
from rlhf.errors import UserError
from rlhf.runtime.progress import duration, printable
from rlhf.runtime.run_folder import write_aside
from rlhf.runtime.session import Interruption

FAILED = "failed.json"
POLL_S = 0.05

Outcome = Literal["done", "failed", "interrupted"]


@runtime_checkable
class Running(Protocol):
    """A cell that was started."""

    def outcome(self) -> Outcome | None:
        """Return how the cell ended; None while it runs."""

    def stop(self) -> None:
        """Ask the cell to save and stop."""

    def kill(self) -> None:
        """Kill the cell at once."""


StartCell = Callable[[Cell, int], Running]  # the cell, and which of the `jobs` slots it takes


def run_cells(plan: Plan, start: StartCell, console: Console) -> bool:
    """Run every cell that is not done, including those that failed before; return False if the user stopped it.

    Args:
        plan: the cells, and the number that run at once (`jobs`).
        start: starts a cell.
        console: where progress is printed.

    Raises:
        ConfigError: a folder belongs to another comparison.
        UserError: the start model itself cannot be judged.
    """
    for cell in plan.cells:
        claim(cell)
    with Interruption() as stop, Board(console, len(plan.cells), alone=plan.config.jobs == 1) as board:
        scheduler = _Scheduler(plan, start, board, stop)
        try:
            scheduler.run()
        finally:
            scheduler.kill()
    if scheduler.failed_start is not None:
        raise UserError(f"the start model could not be judged: {failure_of(scheduler.failed_start.folder)}")
    return not scheduler.stopping or all((cell.folder / JUDGED).is_file() for cell in plan.cells)


def record_failure(folder: Path, error: str) -> None:
    """Write the error of a failed cell into its folder, for the report."""
    write_aside(folder / FAILED, json.dumps({"error": error}, ensure_ascii=False) + "\n")


def failure_of(folder: Path) -> str | None:
    """Return the error of a failed cell; None if it did not fail."""
    path = folder / FAILED
    if not path.is_file() or (folder / JUDGED).is_file():
        return None
    return str(json.loads(path.read_text(encoding="utf-8"))["error"])


@dataclass(frozen=True)
class _Slot:
    """A running cell in one of the `jobs` slots."""

    cell: Cell
    title: str
    running: Running
    started: float


@dataclass
class _Scheduler:
    """The cells that wait, those that run and in which slot, and whether the comparison is stopping."""

    plan: Plan
    start: StartCell
    board: Board
    stop: Interruption
    slots: dict[int, _Slot] = field(default_factory=dict)
    stopping: bool = False
    failed_start: Cell | None = None  # a cell of the start model that failed

    def run(self) -> None:
        """Run until no cell runs and none waits, or until all running cells have stopped."""
        waiting = deque(enumerate(self.plan.cells, start=1))
        while self.slots or (waiting and not self.stopping):
            if self.stop.requested and not self.stopping:
                self._stop()
            elif waiting and not self.stopping and len(self.slots) < self.plan.config.jobs:
                self._begin(*waiting.popleft())
            else:
                time.sleep(POLL_S)
            self._collect()
            self.board.refresh()

    def kill(self) -> None:
        """Kill the cells that still run."""
        for slot in self.slots.values():
            slot.running.kill()

    def _begin(self, number: int, cell: Cell) -> None:
        title = f"{number}/{len(self.plan.cells)}  {cell.arm}, seed {cell.seed}"
        if (cell.folder / JUDGED).is_file():
            self.board.note(f"{title}: done before", ended=True)
            return
        (cell.folder / FAILED).unlink(missing_ok=True)
        free = min(set(range(self.plan.config.jobs)) - set(self.slots))
        self.board.began(cell, title)
        started = time.perf_counter()
        self.slots[free] = _Slot(cell, title, self.start(cell, free), started)

    def _collect(self) -> None:
        for number, slot in list(self.slots.items()):
            outcome = slot.running.outcome()
            if outcome is None:
                continue
            del self.slots[number]
            if outcome == "failed" and (self.stopping or self.stop.requested):
                (slot.cell.folder / FAILED).unlink(missing_ok=True)  # asked to stop: not a failure of the cell
                outcome = "interrupted"
            self.board.ended(slot.cell)
            if outcome == "interrupted":
                self._stop()
                continue
            took = duration(time.perf_counter() - slot.started)
            self.board.note(f"{slot.title}: {outcome} in {took}{_reason(slot.cell, outcome)}", ended=True)
            if outcome == "failed" and slot.cell.arm == START:
                self.failed_start = self.failed_start or slot.cell
                self._stop()

    def _stop(self) -> None:
        if self.stopping:
            return
        self.stopping = True
        for slot in self.slots.values():
            slot.running.stop()


def _reason(cell: Cell, outcome: Outcome) -> str:
    return f"\n  {printable(failure_of(cell.folder) or '')}" if outcome == "failed" else ""
