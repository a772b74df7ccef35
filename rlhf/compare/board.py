"""What a comparison shows while it goes: one cell's own display, or a line for each of several."""

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

from rlhf.compare.plan import Cell
from rlhf.runtime.progress import duration, printable

OUTPUT = "output.log"  # what a cell that is not alone writes instead of to the terminal
EVERY_S = 0.25


class Tail:
    """The lines that another process adds to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._position = 0
        self._rest = b""

    def lines(self) -> list[str]:
        """Those that were completed since the last call."""
        if not self.path.is_file():
            return []
        with self.path.open("rb") as file:
            file.seek(self._position)
            found = file.read()
        self._position += len(found)
        *whole, self._rest = (self._rest + found).split(b"\n")
        return [text for line in whole if (text := printable(line.decode("utf-8", "replace")).strip())]


@dataclass
class _Shown:
    name: str
    tail: Tail
    began: float
    last: str = ""


class Board:
    """Use as a context manager around the cells.

    A cell that is alone draws on the terminal itself, under a rule with its title. Of several at once each writes into
    its output.log: on a terminal its newest line is shown in place, elsewhere every line, after the cell's name.

    Args:
        console: where to draw.
        total: how many cells there are.
        alone: whether one cell runs at a time.
        clock: seconds, for the tests.
    """

    def __init__(
        self, console: Console, total: int, *, alone: bool, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._console, self._total, self._alone, self._clock = console, total, alone, clock
        self._shown: dict[Path, _Shown] = {}
        self._done = 0
        self._looked = 0.0
        self._began = clock()
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

    def began(self, cell: Cell, title: str) -> None:
        """A cell starts."""
        if self._alone:
            self._console.rule(title)
            return
        self._shown[cell.folder] = _Shown(f"{cell.arm}, seed {cell.seed}", Tail(cell.folder / OUTPUT), self._clock())
        if not self._in_place:
            self.note(f"{title}: started")

    def ended(self, cell: Cell) -> None:
        """A cell ended; what it said last is shown before it goes."""
        shown = self._shown.get(cell.folder)
        if shown is not None:
            self._read(shown)
            del self._shown[cell.folder]

    def note(self, text: str, *, ended: bool = False) -> None:
        """A line of the comparison's own; `ended` counts a cell."""
        self._done += ended
        self._console.print(Text(text), soft_wrap=True)

    def refresh(self) -> None:
        """Read what the running cells wrote since."""
        if self._clock() - self._looked < EVERY_S:
            return
        self._looked = self._clock()
        for shown in self._shown.values():
            self._read(shown)

    def _read(self, shown: _Shown) -> None:
        for line in shown.tail.lines():
            shown.last = line
            if not self._in_place:
                self._console.print(Text(f"{shown.name} | {line}"), soft_wrap=True, highlight=False)

    def _display(self) -> RenderableType:
        head = Text(f"{self._done}/{self._total} cells", style="bold")
        head.append(f"  {duration(self._clock() - self._began)}", style="cyan")
        rows = Table.grid(padding=(0, 2), expand=True)
        for _ in range(2):
            rows.add_column(no_wrap=True)
        rows.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        for shown in list(self._shown.values()):
            rows.add_row(
                Text(shown.name), Text(duration(self._clock() - shown.began), style="cyan"), Text(shown.last, "dim")
            )
        return Group(head, rows)
