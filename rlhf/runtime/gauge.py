"""Peak memory, of the process and of each phase."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")


class MemoryGauge:
    """The largest memory so far, in MB, and in each phase since it was last asked.

    What a phase holds while another is open inside it counts for both.
    """

    def __init__(self, peak: Callable[[], float], reset: Callable[[], None]) -> None:
        """`peak` is the largest memory in MB since `reset`."""
        self._peak = peak
        self._reset = reset
        self._highest = 0.0
        self._open: list[str] = []
        self._by_phase: dict[str, float] = {}

    def peak_mb(self) -> float:
        """The largest so far."""
        return self._look()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What is used inside counts towards `name`."""
        self._look()
        self._reset()
        self._open.append(name)
        try:
            yield
        finally:
            self._look()
            self._open.pop()
            self._reset()

    def take(self) -> dict[str, float]:
        """MB at the peak of each phase since the last call."""
        taken, self._by_phase = self._by_phase, {}
        return taken

    def _look(self) -> float:
        now = self._peak()
        for name in self._open:
            self._by_phase[name] = max(self._by_phase.get(name, 0.0), now)
        self._highest = max(self._highest, now)
        return self._highest


def memory_gauge(device: torch.device) -> MemoryGauge:
    """Of the GPU's allocator where there is one, else of the process's resident set."""
    if device.type == "cuda":
        return MemoryGauge(
            lambda: torch.cuda.max_memory_allocated(device) / 2**20,
            lambda: torch.cuda.reset_peak_memory_stats(device),
        )
    return MemoryGauge(_peak_resident_mb, _reset_peak_resident)


def _peak_resident_mb() -> float:
    with suppress(OSError):
        for line in STATUS.read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) / 1024
    return float("nan")


def _reset_peak_resident() -> None:
    """Linux resets the mark; elsewhere a phase's peak is the process's so far."""
    with suppress(OSError):
        CLEAR.write_text("5", encoding="ascii")
