"""Run a cell in several processes, started by torchrun on this host."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import BinaryIO

import torch

from rlhf.compare.board import OUTPUT
from rlhf.compare.cell import INTERRUPTED
from rlhf.compare.plan import Cell
from rlhf.compare.processes import ERRORS, CellProcess, cores, last_words, share, visible_devices
from rlhf.compare.runner import Outcome, Running, record_failure


def start_cell(cell: Cell, place: int, *, jobs: int, processes: int) -> Running:
    """Start a cell in slot `place` of the `jobs` slots, in `processes` processes if it trains."""
    if processes == 1 or cell.config.budget is None:
        return CellProcess(cell, place, jobs)
    return LaunchedCell(cell, place, jobs, processes)


class LaunchedCell:
    """A cell run by torchrun; implements rlhf.compare.runner.Running."""

    def __init__(self, cell: Cell, place: int, jobs: int, processes: int) -> None:
        """Start the cell in `processes` processes, in slot `place` of the `jobs` slots."""
        self.cell = cell
        self._stop_requested = False
        environment = share(place, jobs, cores=cores(), devices=visible_devices(os.environ), environ=os.environ)
        if torch.cuda.device_count() > 1:
            environment.pop("CUDA_VISIBLE_DEVICES", None)  # each of its processes takes one GPU
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        self._files: list[BinaryIO] = [(cell.folder / ERRORS).open("wb")]
        if jobs > 1:
            self._files.append((cell.folder / OUTPUT).open("wb"))
        self.process = subprocess.Popen(
            [*command, "-m", "rlhf.compare", str(cell.folder)],
            stderr=self._files[0],
            stdout=self._files[1] if jobs > 1 else None,
            env={**os.environ, **environment, "PYTHONUNBUFFERED": "1"},
        )

    def outcome(self) -> Outcome | None:
        """Return how the cell ended, None while it runs; the error of a failed cell is recorded in its folder."""
        code = self.process.poll()
        if code is None:
            return None
        for file in self._files:
            file.close()
        if code == 0:
            return "done"
        if code == INTERRUPTED or self._stop_requested:
            return "interrupted"
        record_failure(self.cell.folder, last_words(self.cell.folder / ERRORS, code, launched=True))
        return "failed"

    def stop(self) -> None:
        """Ask the cell to save and stop: torchrun passes the signal on to its processes, and waits."""
        self._stop_requested = True
        self.process.terminate()

    def kill(self) -> None:
        """Kill the process at once."""
        self.process.kill()
        self.process.wait()
