"""Run the cells, `jobs` at a time; a failure of one is only its own, and a stop is passed on to all that run."""

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
        """What became of it; None while it runs."""

    def stop(self) -> None:
        """Ask it to save and stop."""

    def kill(self) -> None:
        """End it at once."""


StartCell = Callable[[Cell, int], Running]  # the cell, and which of the `jobs` places it takes


def run_cells(plan: Plan, start: StartCell, console: Console) -> bool:
    """Every cell that is not done; one that failed before is tried again. False where the user stopped it.

    Args:
        plan: the cells; as many run at once as its `jobs` says.
        start: how a cell is started.
        console: where it reports.

    Raises:
        ConfigError: a folder belongs to another comparison.
        UserError: the start model itself cannot be judged.
    """
    for cell in plan.cells:
        claim(cell)
    with Interruption() as stop, Board(console, len(plan.cells), alone=plan.config.jobs == 1) as board:
        course = _Course(plan, start, board, stop)
        try:
            course.run()
        finally:
            course.kill()
    if course.broken is not None:
        raise UserError(f"the start model could not be judged: {failure_of(course.broken.folder)}")
    return not course.stopping or all((cell.folder / JUDGED).is_file() for cell in plan.cells)


def record_failure(folder: Path, error: str) -> None:
    """Keep what went wrong, for the report."""
    write_aside(folder / FAILED, json.dumps({"error": error}, ensure_ascii=False) + "\n")


def failure_of(folder: Path) -> str | None:
    """What went wrong with a cell; None where nothing did."""
    path = folder / FAILED
    if not path.is_file() or (folder / JUDGED).is_file():
        return None
    return str(json.loads(path.read_text(encoding="utf-8"))["error"])


@dataclass(frozen=True)
class _Place:
    """A cell on one of the places, since when."""

    cell: Cell
    title: str
    running: Running
    began: float


@dataclass
class _Course:
    """What waits, what runs where, and whether it goes on."""

    plan: Plan
    start: StartCell
    board: Board
    stop: Interruption
    places: dict[int, _Place] = field(default_factory=dict)
    stopping: bool = False
    broken: Cell | None = None  # a start model's cell that failed

    def run(self) -> None:
        """Until nothing runs and nothing waits, or all that ran have stopped."""
        waiting = deque(enumerate(self.plan.cells, start=1))
        while self.places or (waiting and not self.stopping):
            if self.stop.requested and not self.stopping:
                self._stop()
            elif waiting and not self.stopping and len(self.places) < self.plan.config.jobs:
                self._begin(*waiting.popleft())
            else:
                time.sleep(POLL_S)
            self._collect()
            self.board.refresh()

    def kill(self) -> None:
        """End what still runs."""
        for place in self.places.values():
            place.running.kill()

    def _begin(self, number: int, cell: Cell) -> None:
        title = f"{number}/{len(self.plan.cells)}  {cell.arm}, seed {cell.seed}"
        if (cell.folder / JUDGED).is_file():
            self.board.note(f"{title}: done before", ended=True)
            return
        (cell.folder / FAILED).unlink(missing_ok=True)
        free = min(set(range(self.plan.config.jobs)) - set(self.places))
        self.board.began(cell, title)
        began = time.perf_counter()
        self.places[free] = _Place(cell, title, self.start(cell, free), began)

    def _collect(self) -> None:
        for number, place in list(self.places.items()):
            outcome = place.running.outcome()
            if outcome is None:
                continue
            del self.places[number]
            if outcome == "failed" and (self.stopping or self.stop.requested):
                (place.cell.folder / FAILED).unlink(missing_ok=True)  # it was told to stop: no failure of its own
                outcome = "interrupted"
            self.board.ended(place.cell)
            if outcome == "interrupted":
                self._stop()
                continue
            took = duration(time.perf_counter() - place.began)
            self.board.note(f"{place.title}: {outcome} in {took}{_why(place.cell, outcome)}", ended=True)
            if outcome == "failed" and place.cell.arm == START:
                self.broken = self.broken or place.cell
                self._stop()

    def _stop(self) -> None:
        if self.stopping:
            return
        self.stopping = True
        for place in self.places.values():
            place.running.stop()


def _why(cell: Cell, outcome: Outcome) -> str:
    return f"\n  {printable(failure_of(cell.folder) or '')}" if outcome == "failed" else ""
