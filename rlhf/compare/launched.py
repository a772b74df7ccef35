"""A cell in several processes, started by torchrun on this host."""

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
    """The cell on place `place` of `jobs`; one that trains, in so many processes."""
    if processes == 1 or cell.config.budget is None:
        return CellProcess(cell, place, jobs)
    return LaunchedCell(cell, place, jobs, processes)


class LaunchedCell:
    """A cell that torchrun was started for; a rlhf.compare.runner.Running."""

    def __init__(self, cell: Cell, place: int, jobs: int, processes: int) -> None:
        """Start it in `processes` processes, on place `place` of `jobs`."""
        self.cell = cell
        self._told = False
        mine = share(place, jobs, cores=cores(), devices=visible_devices(os.environ), environ=os.environ)
        if torch.cuda.device_count() > 1:
            mine.pop("CUDA_VISIBLE_DEVICES", None)  # its processes take one each
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        self._files: list[BinaryIO] = [(cell.folder / ERRORS).open("wb")]
        if jobs > 1:
            self._files.append((cell.folder / OUTPUT).open("wb"))
        self.process = subprocess.Popen(
            [*command, "-m", "rlhf.compare", str(cell.folder)],
            stderr=self._files[0],
            stdout=self._files[1] if jobs > 1 else None,
            env={**os.environ, **mine, "PYTHONUNBUFFERED": "1"},
        )

    def outcome(self) -> Outcome | None:
        """What became of it; None while it runs. What ended a failed one is recorded in its folder."""
        code = self.process.poll()
        if code is None:
            return None
        for file in self._files:
            file.close()
        if code == 0:
            return "done"
        if code == INTERRUPTED or self._told:
            return "interrupted"
        record_failure(self.cell.folder, last_words(self.cell.folder / ERRORS, code, launched=True))
        return "failed"

    def stop(self) -> None:
        """Ask it to save and stop: torchrun passes the signal on, and waits."""
        self._told = True
        self.process.terminate()

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait()
