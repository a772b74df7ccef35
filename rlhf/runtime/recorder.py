"""The output of a run: metrics, timings, samples and notes to its folder, progress to the terminal."""

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
    """Writes the run's files and its display. Metrics and samples are deterministic; timings are kept apart."""

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
        """Open the files.

        Args:
            show: the metrics for the progress display.
            writes: False on ranks that leave the files to the main rank.
            memory: measures the peak memory of each phase.
            release: called on closing, to unlock the folder.
        """
        self.folder = folder
        self.progress = progress
        self.trackers = trackers
        self.show = tuple(show)
        self._memory = memory
        self._release = release

        def open_logger(path: Path) -> JsonlLogger | SilentLogger:
            return JsonlLogger(path) if writes else SilentLogger()

        self._metrics = open_logger(folder.metrics)
        self._samples = open_logger(folder.samples)
        self._timings = open_logger(folder.timings)
        self._notes = open_logger(folder.notes)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time and the peak memory inside the context towards `name`."""
        with self.progress.phase(name), self._memory.phase(name) if self._memory else nullcontext():
            yield

    def note(self, text: str) -> None:
        """Print a message for the user and keep it for the report."""
        self.progress.note(text)
        self._notes.log({"step": self.progress.step, "text": text})

    def metrics(self, step: int, values: Mapping[str, float], *, tokens: int, memory_mb: float) -> None:
        """Write one line of metrics.jsonl and one of timings.jsonl, and update trackers and display."""
        for name in values:
            describe(name)
        seconds = self.progress.take_timings()
        total_seconds = sum(seconds.values())
        self._metrics.log({"step": step, **values})
        self._timings.log(
            {
                "step": step,
                "seconds": seconds,
                "tokens_per_second": tokens / total_seconds if total_seconds else None,
                "peak_memory_mb": memory_mb,
                "peak_memory_mb_by_phase": self._memory.take() if self._memory else {},
                "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            }
        )
        self.trackers.log(step, values)
        self.progress.update(step, values, self.show)

    def samples(self, records: Sequence[Mapping[str, object]]) -> None:
        """Append records to samples.jsonl."""
        for record in records:
            self._samples.log(record)

    def positions(self) -> dict[str, int]:
        """Flush the deterministic files to disk and return their lengths in bytes."""
        return {"metrics": self._metrics.position(), "samples": self._samples.position()}

    def rewind(self, positions: Mapping[str, int]) -> None:
        """Cut the deterministic files back to the positions stored in a checkpoint."""
        self._metrics.truncate(positions["metrics"])
        self._samples.truncate(positions["samples"])

    def close(self) -> None:
        """Close the files and the trackers, and unlock the folder."""
        for logger in (self._metrics, self._samples, self._timings, self._notes):
            logger.close()
        self.trackers.close()
        self._release()
