"""The cells of a comparison that run, those that have ended, and the output of each, shown in the terminal."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rlhf.comparison.plan import Cell
from rlhf.tracking.metrics import format_duration
from rlhf.tracking.progress import printable

OUTPUT = "output.log"  # the standard output of a cell that runs beside others
REFRESH_S = 0.25


class Tail:
    """Reader of the lines that another process appends to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._position = 0
        self._rest = b""

    def lines(self) -> list[str]:
        """Return the lines that were completed since the last call."""
        if not self.path.is_file():
            return []
        with self.path.open("rb") as file:
            file.seek(self._position)
            added = file.read()
        self._position += len(added)
        *complete, self._rest = (self._rest + added).split(b"\n")
        return [text for line in complete if (text := printable(line.decode("utf-8", "replace")).strip())]


@dataclass
class _CellStatus:
    name: str
    tail: Tail
    started: float
    last_line: str = ""


class Board:
    """The terminal display of a comparison, used as a context manager around its cells.

    A cell that runs alone draws on the terminal itself, under a rule with its title. Cells that run at the same time
    write into their output.log: on a terminal the newest line of each is shown in place, elsewhere every line is
    printed after the cell's name.

    Args:
        console: where to draw.
        total: the number of cells.
        alone: whether one cell runs at a time.
        clock: returns the time in seconds; tests pass their own.
    """

    def __init__(
        self, console: Console, total: int, *, alone: bool, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._console, self._total, self._alone, self._clock = console, total, alone, clock
        self._running: dict[Path, _CellStatus] = {}
        self._done = 0
        self._refreshed = 0.0
        self._started = clock()
        self._live = Live(console=console, get_renderable=self._display, refresh_per_second=4)
        self._in_place = not alone and console.is_interactive

    def __enter__(self) -> Board:
        if self._in_place:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._in_place:
            self._live.stop()

    def cell_started(self, cell: Cell, title: str) -> None:
        """Show that a cell has started."""
        if self._alone:
            self._console.rule(title)
            return
        self._running[cell.folder] = _CellStatus(cell.label, Tail(cell.folder / OUTPUT), self._clock())
        if not self._in_place:
            self.note(f"{title}: started")

    def cell_ended(self, cell: Cell) -> None:
        """Show the last lines of a cell that ended, and remove it from the display."""
        status = self._running.get(cell.folder)
        if status is not None:
            self._read(status)
            del self._running[cell.folder]

    def note(self, text: str, *, ended: bool = False) -> None:
        """Print a line of the comparison itself; `ended` counts one more cell as ended."""
        self._done += ended
        self._console.print(Text(text), soft_wrap=True)

    def refresh(self) -> None:
        """Read and show what the running cells have written since the last refresh."""
        if self._clock() - self._refreshed < REFRESH_S:
            return
        self._refreshed = self._clock()
        for status in self._running.values():
            self._read(status)

    def _read(self, status: _CellStatus) -> None:
        for line in status.tail.lines():
            status.last_line = line
            if not self._in_place:
                self._console.print(Text(f"{status.name} | {line}"), soft_wrap=True, highlight=False)

    def _display(self) -> RenderableType:
        head = Text(f"{self._done}/{self._total} cells", style="bold")
        head.append(f"  {format_duration(self._clock() - self._started)}", style="cyan")
        rows = Table.grid(padding=(0, 2), expand=True)
        for _ in range(2):
            rows.add_column(no_wrap=True)
        rows.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        for status in list(self._running.values()):
            rows.add_row(
                Text(status.name),
                Text(format_duration(self._clock() - status.started), style="cyan"),
                Text(status.last_line, "dim"),
            )
        return Group(head, rows)
