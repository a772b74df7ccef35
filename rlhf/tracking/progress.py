"""The progress display of a run: live on a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rlhf.tracking.metrics import format_duration, format_number, table_of

SECONDS_BETWEEN_LINES = 10.0  # without a terminal, so that the log of a long run stays readable
SECONDS_BETWEEN_SHARES = 30.0  # of a computation outside the steps
RECENT = 20  # updates the speed is averaged over; evaluation and checkpoints count, the first compilation drops out


def announced_share(announce: Callable[[str], None], what: str) -> Callable[[float], None]:
    """Return a function that is told the share of `what` that is done, and announces it twice a minute."""
    start = shown = time.monotonic()

    def tell(share: float) -> None:
        nonlocal shown
        now = time.monotonic()
        if share and now - shown >= SECONDS_BETWEEN_SHARES:
            shown = now
            announce(f"{what}: {share:.0%} computed, {format_duration((now - start) * (1 - share) / share)} left")

    return tell


class Progress:
    """Shows step, speed, time left and a few metrics of a run, and times its phases.

    Use as a context manager. On a terminal the display is updated in place and `note` prints above it; elsewhere a line
    is printed every SECONDS_BETWEEN_LINES, and always for the first update, an evaluation and the last update.

    Args:
        console: where to draw; standard output if None. `Console(quiet=True)` draws nothing.
        start_step: steps done before this process started (a resumed run).
        targets: target values shown beside metrics, by metric name: {"kl/reference": 6.0}.
        clock: returns the time in seconds; tests replace it.
    """

    def __init__(
        self,
        title: str,
        total_steps: int,
        console: Console | None = None,
        *,
        start_step: int = 0,
        targets: Mapping[str, float] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.title = printable(title)
        self.total_steps = total_steps
        self.step = start_step
        self._console = Console() if console is None else console
        self._targets = dict(targets or {})
        self._clock = clock
        self._started_at = clock()
        self._marks: deque[tuple[int, float]] = deque([(start_step, self._started_at)], maxlen=RECENT + 1)
        self._shown: dict[str, str] = {}
        self._last_line: float | None = None  # when it was printed
        self._has_unprinted = False
        self._phases = _PhaseClock(clock)
        self._live = (
            Live(console=self._console, get_renderable=self._display, refresh_per_second=4)
            if self._console.is_interactive
            else None
        )

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
        elif self._has_unprinted:
            self._print_line()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside the context towards `name`; a nested phase pauses the outer one's clock."""
        self._phases.push(name)
        try:
            yield
        finally:
            self._phases.pop()

    def take_timings(self) -> dict[str, float]:
        """Return the seconds per phase since the last call, and reset them."""
        return self._phases.take()

    def update(self, step: int, metrics: Mapping[str, float], show: Sequence[str]) -> None:
        """Report that `step` steps are done, displaying the `metrics` that `show` names."""
        self.step = step
        if step != self._marks[-1][0]:
            self._marks.append((step, self._clock()))
        self._shown = {
            label: _with_target(name, metrics[name], self._targets)
            for name, label in _labels([name for name in show if name in metrics]).items()
        }
        if self._live is not None:
            self._live.refresh()
            return
        has_evaluation = any(name.startswith("eval/") for name in show if name in metrics)
        if has_evaluation or step >= self.total_steps or self._is_line_due():
            self._print_line()
        else:
            self._has_unprinted = True

    def note(self, text: str) -> None:
        """Print `text` verbatim above the display: a warning, a summary, a sample."""
        self._print(printable(text))

    def _is_line_due(self) -> bool:
        return self._last_line is None or self._clock() - self._last_line >= SECONDS_BETWEEN_LINES

    def _print_line(self) -> None:
        self._print(self._line())
        self._last_line = self._clock()
        self._has_unprinted = False

    def _print(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True, highlight=False)

    def _seconds_per_step(self) -> float | None:
        (first_step, first), (last_step, last) = self._marks[0], self._marks[-1]
        return (last - first) / (last_step - first_step) if last_step > first_step else None

    def _speed(self) -> str:
        seconds = self._seconds_per_step()
        return "" if seconds is None else f"{seconds:.3g} s/step"

    def _eta(self) -> str:
        seconds = self._seconds_per_step()
        if seconds is None or self.step >= self.total_steps:
            return ""
        return f"eta {format_duration(seconds * (self.total_steps - self.step))}"

    def _line(self) -> str:
        shown = [f"{label} {value}" for label, value in self._shown.items()]
        parts = [f"step {self.step}/{self.total_steps}", *shown, self._speed(), self._eta()]
        return "  ".join(part for part in parts if part)

    def _display(self) -> RenderableType:
        header = Table.grid(padding=(0, 2), expand=True)
        for _ in range(3):
            header.add_column(no_wrap=True)
        header.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        times = "  ".join(
            t for t in (format_duration(self._clock() - self._started_at), self._speed(), self._eta()) if t
        )
        header.add_row(
            Text(self.title, style="bold"),
            ProgressBar(total=max(1, self.total_steps), completed=min(self.step, self.total_steps), width=28),
            Text(f"{self.step}/{self.total_steps}"),
            Text(times, style="cyan"),
        )
        return Group(header, self._metrics_row())

    def _metrics_row(self) -> RenderableType:
        row = Text(no_wrap=True, overflow="ellipsis")
        for label, value in self._shown.items():
            row.append(f"{label} ", style="dim").append(f"{value}  ")
        phase = self._phases.current()
        if phase:
            row.append(f"▸ {printable(phase)}", style="magenta")
        return row


class _PhaseClock:
    """Exclusive seconds per phase: time counts towards the innermost open phase."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._open: list[str] = []
        self._since = 0.0
        self._seconds: dict[str, float] = {}

    def push(self, name: str) -> None:
        self._count()
        self._open.append(name)

    def pop(self) -> None:
        self._count()
        self._open.pop()

    def current(self) -> str:
        names = self._open[-1:]  # one read, since the display's thread may call this while a phase ends
        return names[0] if names else ""

    def take(self) -> dict[str, float]:
        self._count()
        seconds, self._seconds = self._seconds, {}
        return seconds

    def _count(self) -> None:
        now = self._clock()
        if self._open:
            name = self._open[-1]
            self._seconds[name] = self._seconds.get(name, 0.0) + now - self._since
        self._since = now


def _labels(names: Sequence[str]) -> dict[str, str]:
    """Map metric names to short labels, keeping the full name if two labels would be the same."""
    table = table_of(names)
    short = [table[name].label or name if name in table else name for name in names]
    return {name: label if short.count(label) == 1 else name for name, label in zip(names, short, strict=True)}


def _with_target(name: str, value: float, targets: Mapping[str, float]) -> str:
    text = format_number(value)
    return f"{text} (target {format_number(targets[name])})" if name in targets else text


# Control characters (C0, C1, DEL) in model text could move the terminal's cursor, and do not belong in a page either.
_CONTROLS = dict.fromkeys(range(0x7F, 0xA0), "\N{REPLACEMENT CHARACTER}")
_CONTROLS |= {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"}
# The two overrides of Unicode's bidirectional algorithm show letters in another order than the text's.
_CONTROLS |= dict.fromkeys((0x202D, 0x202E), "\N{REPLACEMENT CHARACTER}")


def printable(text: str) -> str:
    """Make control characters in `text` visible and replace lone surrogates; newlines and tabs stay."""
    return text.translate(_CONTROLS).encode("utf-8", "replace").decode("utf-8")
