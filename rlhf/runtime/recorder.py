"""Everything a run says: metrics, timings, samples and notes to its folder, progress to the terminal."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from rlhf.runtime.gauge import MemoryGauge
from rlhf.runtime.loggers import JsonlLogger, SilentLogger, Trackers
from rlhf.runtime.metrics import describe
from rlhf.runtime.progress import Progress
from rlhf.runtime.run_folder import RunFolder


class Recorder:
    """The run's files and its display. Metrics and samples are deterministic; times are kept apart."""

    def __init__(
        self,
        folder: RunFolder,
        progress: Progress,
        trackers: Trackers,
        *,
        show: Sequence[str],
        writes: bool = True,
        memory: MemoryGauge | None = None,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        """`show` are the metrics for the progress display; `writes` is False where another process writes the files;
        `memory` tells the peak of each phase; `release` lets other processes into the folder."""
        self.folder = folder
        self.progress = progress
        self.trackers = trackers
        self.show = tuple(show)
        self._memory = memory
        self._release = release

        def opened(path: Path) -> JsonlLogger | SilentLogger:
            return JsonlLogger(path) if writes else SilentLogger()

        self._metrics = opened(folder.metrics)
        self._samples = opened(folder.samples)
        self._timings = opened(folder.timings)
        self._notes = opened(folder.notes)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside, and the peak of memory, towards `name`."""
        with self.progress.phase(name), self._memory.phase(name) if self._memory else nullcontext():
            yield

    def note(self, text: str) -> None:
        """Tell the user, and keep it for the report."""
        self.progress.note(text)
        self._notes.log({"step": self.progress.step, "text": text})

    def metrics(self, step: int, values: Mapping[str, float], *, tokens: int, memory_mb: float) -> None:
        """One line of metrics.jsonl and one of timings.jsonl."""
        for name in values:
            describe(name)
        seconds = self.progress.take_timings()
        spent = sum(seconds.values())
        self._metrics.log({"step": step, **values})
        self._timings.log(
            {
                "step": step,
                "seconds": seconds,
                "tokens_per_second": tokens / spent if spent else None,
                "peak_memory_mb": memory_mb,
                "peak_memory_mb_by_phase": self._memory.take() if self._memory else {},
                "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            }
        )
        self.trackers.log(step, values)
        self.progress.update(step, values, self.show)

    def samples(self, records: Sequence[Mapping[str, object]]) -> None:
        """Lines of samples.jsonl."""
        for record in records:
            self._samples.log(record)

    def positions(self) -> dict[str, int]:
        """Where the deterministic files stand, everything before being on the disk."""
        return {"metrics": self._metrics.position(), "samples": self._samples.position()}

    def rewind(self, positions: Mapping[str, int]) -> None:
        """Forget what was written after a checkpoint."""
        self._metrics.truncate(positions["metrics"])
        self._samples.truncate(positions["samples"])

    def close(self) -> None:
        """Close the files and the trackers."""
        for logger in (self._metrics, self._samples, self._timings, self._notes):
            logger.close()
        self.trackers.close()
        self._release()
