"""Run each cell in its own process (or several, started by torchrun), on its share of the machine.

Importing torch and transformers takes seconds, and a comparison has dozens of cells. So on Linux without a GPU, cells
are forked from one process that has imported everything and computed nothing (multiprocessing's fork server, see
fork_server.py). CUDA does not survive a fork: with a GPU, and on other systems, each cell is a fresh interpreter.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import BinaryIO

import torch

from rlhf.comparison.plan import Cell
from rlhf.comparison.scheduler import OUTPUT, Outcome, Running, record_failure
from rlhf.comparison.trial import INTERRUPTED, cell_main
from rlhf.process import silence_libraries

ERRORS = "errors.log"
FORK_SERVER = "rlhf.comparison.fork_server"
PR_SET_PDEATHSIG = 1  # linux/prctl.h
THREADS, DEVICES = "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"

_stop_requested = False


class CellProcess:
    """A cell in one process; implements rlhf.comparison.scheduler.Running."""

    def __init__(self, cell: Cell, place: int, jobs: int) -> None:
        """Start the cell in slot `place` of the `jobs` slots."""
        self.cell = cell
        environment = resource_environment(
            place, jobs, cores=count_cores(), devices=visible_devices(os.environ), environ=os.environ
        )
        threads = int(environment[THREADS]) if THREADS in environment else None
        self.process: BaseProcess = _process_class()(target=run, args=(cell.folder, jobs > 1, threads))
        (cell.folder / OUTPUT).unlink(missing_ok=True)
        with _environment_set(environment):
            self.process.start()

    def outcome(self) -> Outcome | None:
        """Return how the cell ended, None while it runs; the error of a failed cell is recorded in its folder."""
        code = self.process.exitcode
        if code is None:
            return None
        if code == 0:
            return "done"
        if code == INTERRUPTED:
            return "interrupted"
        record_failure(self.cell.folder, extract_error(self.cell.folder / ERRORS, code))
        return "failed"

    def stop(self) -> None:
        """Ask the cell to save and stop; on Windows it ends at once, and continues from its last checkpoint."""
        self.process.terminate()

    def kill(self) -> None:
        """Kill the process at once."""
        self.process.kill()
        self.process.join()


def run(folder: Path, beside_others: bool, threads: int | None) -> None:
    """Run the cell in `folder` as the main function of a new process.

    Its errors go into a file there, and so does its output if it runs beside others.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    silence_libraries()
    end_with_parent()
    if _stop_requested:
        sys.exit(INTERRUPTED)
    _redirect(folder / ERRORS, 2)
    if beside_others:
        _redirect(folder / OUTPUT, 1)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if threads is not None:
        torch.set_num_threads(threads)
    sys.exit(cell_main(folder))


def end_with_parent() -> None:
    """Request SIGTERM (save and stop) for this process when its parent dies; on Linux only.

    The fork server dies with the comparison, however that ends, and so its cells are stopped too.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def handle_sigterm(_number: int, _frame: FrameType | None) -> None:
    """Handle SIGTERM in the fork server.

    It keeps running, so that the exit codes of its cells are known; a cell that was just forked stops.
    """
    global _stop_requested
    _stop_requested = True


def resource_environment(
    place: int, jobs: int, *, cores: int, devices: Sequence[str], environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment variables that give a cell in slot `place` of `jobs` its share of the machine.

    A cell that has the machine alone gets none. Processor cores are divided evenly, at least one for each cell, unless
    OMP_NUM_THREADS is set; of several GPUs each cell sees one, assigned in turn.
    """
    if jobs == 1:
        return {}
    changes = {} if environ.get(THREADS) else {THREADS: str(max(1, cores // jobs))}
    if len(devices) > 1:
        changes[DEVICES] = devices[place % len(devices)]
    return changes


def visible_devices(environ: Mapping[str, str]) -> list[str]:
    """List the GPUs that this process may use, by their names in CUDA_VISIBLE_DEVICES."""
    count = torch.cuda.device_count()
    named = [name.strip() for name in environ.get(DEVICES, "").split(",") if name.strip()]
    return named[:count] if named else [str(number) for number in range(count)]


def extract_error(log: Path, code: int, *, launched: bool = False) -> str:
    """Extract the error that ended a process from the end of its log.

    `launched` means that a launcher wrote to the log after the process.
    """
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    lines = [line for line in text.splitlines() if line.strip()]
    starts = [i for i, line in enumerate(lines) if line.startswith("error: ")]
    if code == 2 and starts:
        return "\n".join(lines[starts[-1] :]).removeprefix("error: ")
    if launched and starts:
        return lines[starts[-1]].removeprefix("error: ")
    if code < 0:
        return f"the process was ended by {signal.Signals(-code).name}; if nobody sent it, probably out of memory"
    return f"{lines[-1] if lines else f'exit code {code}'} (all of it is in {log})"


def _process_class() -> type[BaseProcess]:
    if sys.platform != "linux" or torch.cuda.device_count():
        return multiprocessing.get_context("spawn").Process
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([FORK_SERVER])
    return context.Process


def count_cores() -> int:
    """Count the processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _redirect(path: Path, descriptor: int) -> None:
    with path.open("wb") as file:
        os.dup2(file.fileno(), descriptor)


@contextmanager
def _environment_set(changes: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables temporarily, for processes that are started meanwhile to inherit."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def start_cell(cell: Cell, place: int, *, jobs: int, processes: int) -> Running:
    """Start a cell in slot `place` of the `jobs` slots, in `processes` processes if it trains."""
    if processes == 1 or cell.config.budget is None:
        return CellProcess(cell, place, jobs)
    return LaunchedCell(cell, place, jobs, processes)


class LaunchedCell:
    """A cell run by torchrun; implements rlhf.comparison.scheduler.Running."""

    def __init__(self, cell: Cell, place: int, jobs: int, processes: int) -> None:
        """Start the cell in `processes` processes, in slot `place` of the `jobs` slots."""
        self.cell = cell
        self._stop_requested = False
        environment = resource_environment(
            place, jobs, cores=count_cores(), devices=visible_devices(os.environ), environ=os.environ
        )
        if torch.cuda.device_count() > 1:
            environment.pop("CUDA_VISIBLE_DEVICES", None)  # each of its processes takes one GPU
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        self._files: list[BinaryIO] = [(cell.folder / ERRORS).open("wb")]
        if jobs > 1:
            self._files.append((cell.folder / OUTPUT).open("wb"))
        self.process = subprocess.Popen(
            [*command, "-m", "rlhf.comparison", str(cell.folder)],
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
        record_failure(self.cell.folder, extract_error(self.cell.folder / ERRORS, code, launched=True))
        return "failed"

    def stop(self) -> None:
        """Ask the cell to save and stop: torchrun passes the signal on to its processes, and waits."""
        self._stop_requested = True
        self.process.terminate()

    def kill(self) -> None:
        """Kill the process at once."""
        self.process.kill()
        self.process.wait()
