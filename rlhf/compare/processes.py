"""A cell in a process of its own, on its share of the machine.

Importing torch and transformers takes seconds, and a comparison has dozens of cells. So on Linux without a GPU cells
are forked from one process that has imported everything and computed nothing (multiprocessing's fork server, see
nursery.py). CUDA does not survive a fork: there, and on other systems, each cell starts from nothing.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType

import torch

from rlhf.compare.board import OUTPUT
from rlhf.compare.cell import INTERRUPTED, cell_main
from rlhf.compare.plan import Cell
from rlhf.compare.runner import Outcome, record_failure
from rlhf.quiet import quiet_libraries

ERRORS = "errors.log"
NURSERY = "rlhf.compare.nursery"
PR_SET_PDEATHSIG = 1  # linux/prctl.h
THREADS, DEVICES = "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"

_told_to_stop = False


class CellProcess:
    """A cell that was started; a rlhf.compare.runner.Running."""

    def __init__(self, cell: Cell, place: int, jobs: int) -> None:
        """Start it on place `place` of `jobs`."""
        self.cell = cell
        environment = share(place, jobs, cores=cores(), devices=visible_devices(os.environ), environ=os.environ)
        threads = int(environment[THREADS]) if THREADS in environment else None
        self.process: BaseProcess = _context().Process(target=run, args=(cell.folder, jobs > 1, threads))
        (cell.folder / OUTPUT).unlink(missing_ok=True)
        with _set(environment):
            self.process.start()

    def outcome(self) -> Outcome | None:
        """What became of it; None while it runs. What ended a failed one is recorded in its folder."""
        code = self.process.exitcode
        if code is None:
            return None
        if code == 0:
            return "done"
        if code == INTERRUPTED:
            return "interrupted"
        record_failure(self.cell.folder, last_words(self.cell.folder / ERRORS, code))
        return "failed"

    def stop(self) -> None:
        """Ask it to save and stop."""
        self.process.terminate()

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.join()


def run(folder: Path, beside_others: bool, threads: int | None) -> None:
    """In the new process: run the cell in `folder`, its errors and (beside others) its output into files there."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    quiet_libraries()
    end_with_parent()
    if _told_to_stop:
        sys.exit(INTERRUPTED)
    _into(folder / ERRORS, 2)
    if beside_others:
        _into(folder / OUTPUT, 1)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if threads is not None:
        torch.set_num_threads(threads)
    sys.exit(cell_main(folder))


def end_with_parent() -> None:
    """On Linux: SIGTERM for this process (save and stop) when its parent dies. The process that cells are forked from
    dies with the comparison, however that ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def remember_to_stop(_number: int, _frame: FrameType | None) -> None:
    """The nursery's answer to SIGTERM: it stays, so that the cells' ends are known; a cell just forked stops."""
    global _told_to_stop
    _told_to_stop = True


def share(place: int, jobs: int, *, cores: int, devices: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """What the environment of a cell on place `place` of `jobs` has besides; nothing where it has the machine alone.

    Processor cores are shared out evenly, at least one each, unless OMP_NUM_THREADS is set; of several GPUs each cell
    sees one, dealt in turn.
    """
    if jobs == 1:
        return {}
    found = {} if environ.get(THREADS) else {THREADS: str(max(1, cores // jobs))}
    if len(devices) > 1:
        found[DEVICES] = devices[place % len(devices)]
    return found


def visible_devices(environ: Mapping[str, str]) -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    count = torch.cuda.device_count()
    named = [name.strip() for name in environ.get(DEVICES, "").split(",") if name.strip()]
    return named[:count] if named else [str(number) for number in range(count)]


def last_words(log: Path, code: int, *, launched: bool = False) -> str:
    """The error that ended a process, from what it wrote last; `launched` says that a launcher wrote after it."""
    written = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    lines = [line for line in written.splitlines() if line.strip()]
    starts = [i for i, line in enumerate(lines) if line.startswith("error: ")]
    if code == 2 and starts:
        return "\n".join(lines[starts[-1] :]).removeprefix("error: ")
    if launched and starts:
        return lines[starts[-1]].removeprefix("error: ")
    if code < 0:
        return f"the process was ended by {signal.Signals(-code).name}; out of memory, if nobody did it"
    return f"{lines[-1] if lines else f'exit code {code}'} (all of it is in {log})"


def _context() -> ForkServerContext | SpawnContext:
    if sys.platform != "linux" or torch.cuda.device_count():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([NURSERY])
    return context


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _into(path: Path, descriptor: int) -> None:
    with path.open("wb") as file:
        os.dup2(file.fileno(), descriptor)


@contextmanager
def _set(changes: Mapping[str, str]) -> Iterator[None]:
    """With these variables in the environment, which a process that starts meanwhile inherits."""
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
