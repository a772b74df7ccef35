"""Run the cells of a comparison, `jobs` at a time, each in its own process (or several, started by torchrun).

A cell that fails does not affect the others; a stop is passed on to all running cells.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal, Protocol, runtime_checkable

import torch

from rlhf.comparison.board import OUTPUT, Board
from rlhf.comparison.inputs import Digests, record_inputs, record_inputs_of_suites
from rlhf.comparison.plan import Cell, CellPlan, ensure_owner
from rlhf.comparison.trial import (
    FAILED,
    INTERRUPTED,
    JUDGED,
    failed_by_its_values,
    failure_of,
    record_failure,
    suite_file,
    unmeasured_suites,
)
from rlhf.comparison.view import ComparisonView
from rlhf.config.compare import START_FOLDER
from rlhf.errors import CheckpointError, ConfigError, UserError
from rlhf.tracking.metrics import format_duration
from rlhf.tracking.progress import printable
from rlhf.tracking.run_folder import FolderLock
from rlhf.training.session import Interruption

POLL_S = 0.05

CellOutcome = Literal["done", "failed", "interrupted"]


@runtime_checkable
class Running(Protocol):
    """A cell that was started."""

    def outcome(self) -> CellOutcome | None:
        """Return how the cell ended; None while it runs."""

    def stop(self) -> None:
        """Ask the cell to save and stop."""

    def kill(self) -> None:
        """Kill the cell at once."""


StartCell = Callable[[Cell, int], Running]  # the cell, and which of the `jobs` slots it takes


def run_cells(plan: CellPlan, start: StartCell, view: ComparisonView, digests: Digests | None = None) -> bool:
    """Run every cell that is not over, including arms that failed before; return False if the user stopped it.

    Args:
        plan: the cells, and the number that run at once (`jobs`).
        start: starts a cell.
        view: shows the progress.
        digests: the digests of weights and rows that were read already.

    Raises:
        ConfigError: a folder belongs to another comparison.
        UserError: the start model itself cannot be judged.
    """
    for cell in plan.cells:
        ensure_owner(cell)
        for name in unmeasured_suites(cell.config, cell.folder):  # results of other settings are not to be reported
            suite_file(cell.folder, name).unlink(missing_ok=True)
    with Interruption() as stop, view.board(len(plan.cells), alone=plan.config.jobs == 1) as board:
        scheduler = _Scheduler(plan, start, board, stop, digests or Digests())
        try:
            scheduler.run()
        finally:
            scheduler.kill()
    if scheduler.failed_start is not None:
        raise UserError(f"the start model could not be judged: {failure_of(scheduler.failed_start.folder)}")
    return not scheduler.stopping or all(map(is_over, plan.cells))


def is_over(cell: Cell) -> bool:
    """Return whether a cell is not to be run again: it is judged and measured, or it is a lost trial of tuning.

    A trial that diverges, whose settings are refused, or that fails twice by the same error is a loss that later rounds
    are planned with. Any other failed cell is tried again.
    """
    is_judged = (cell.folder / JUDGED).is_file()
    is_lost = cell.config.trial is not None and failed_by_its_values(cell.folder)
    return is_lost or (is_judged and not unmeasured_suites(cell.config, cell.folder))


@dataclass(frozen=True)
class _Slot:
    """A running cell in one of the `jobs` slots."""

    cell: Cell
    title: str
    running: Running
    started: float


@dataclass
class _Scheduler:
    """The cells that wait, those that run and in which slot, and whether the comparison is stopping."""

    plan: CellPlan
    start: StartCell
    board: Board
    stop: Interruption
    digests: Digests
    slots: dict[int, _Slot] = field(default_factory=dict)
    stopping: bool = False
    failed_start: Cell | None = None  # a cell of the start model that failed
    errors: dict[Path, str | None] = field(default_factory=dict)  # of the cells' last try
    awaited: set[Path] = field(default_factory=set)  # the run folders that other processes still use

    def run(self) -> None:
        """Run until no cell runs and none waits, or until all running cells have stopped."""
        waiting = deque(enumerate(self.plan.cells, start=1))
        while self.slots or (waiting and not self.stopping):
            if self.stop.requested and not self.stopping:
                self._stop()
            elif self._has_room() and waiting and not self._is_in_use(waiting[0][1]):
                self._begin(*waiting.popleft())
            else:
                time.sleep(POLL_S)
            self._collect()
            self.board.refresh()

    def _has_room(self) -> bool:
        return not self.stopping and len(self.slots) < self.plan.config.jobs

    def _is_in_use(self, cell: Cell) -> bool:
        """Return whether the process of a comparison that was killed still ends its step in the cell's run."""
        is_trained = (cell.folder / JUDGED).is_file()
        if is_trained or not (cell.run_folder / FolderLock.NAME).is_file():
            return False
        try:
            FolderLock(cell.run_folder, "out_dir").release()
        except CheckpointError as error:
            if cell.run_folder not in self.awaited:
                self.board.note(f"{cell.label}: waiting until no other process uses its folder; {error}")
            self.awaited.add(cell.run_folder)
            return True
        except OSError:  # the cell tells it
            pass
        return False

    def kill(self) -> None:
        """Kill the cells that still run."""
        for slot in self.slots.values():
            slot.running.kill()

    def _begin(self, number: int, cell: Cell) -> None:
        title = f"{number}/{len(self.plan.cells)}  {cell.label}"
        is_done = is_over(cell)
        self.errors[cell.folder] = failure_of(cell.folder)
        if not is_done or cell.config.trial is None:  # the loss of a trial stays; an arm may need no more what failed
            (cell.folder / FAILED).unlink(missing_ok=True)
        if is_done:
            self.board.note(f"{title}: done before", ended=True)
            return
        record_inputs(cell, self.digests)
        free = min(set(range(self.plan.config.jobs)) - set(self.slots))
        self.board.cell_started(cell, title)
        started = time.perf_counter()
        self.slots[free] = _Slot(cell, title, self.start(cell, free), started)

    def _collect(self) -> None:
        for number, slot in list(self.slots.items()):
            outcome = slot.running.outcome()
            if outcome is None:
                continue
            del self.slots[number]
            record_inputs_of_suites(slot.cell, self.digests)
            if outcome == "failed" and (self.stopping or self.stop.requested):
                outcome = "interrupted"  # asked to stop: not a failure of the cell
            if outcome != "failed":
                (slot.cell.folder / FAILED).unlink(missing_ok=True)
            elif (error := failure_of(slot.cell.folder)) and error == self.errors[slot.cell.folder]:
                record_failure(slot.cell.folder, error, by_values=True)  # the same twice
            self.board.cell_ended(slot.cell)
            if outcome == "interrupted":
                self._stop()
                continue
            took = format_duration(time.perf_counter() - slot.started)
            self.board.note(f"{slot.title}: {outcome} in {took}{_reason(slot.cell, outcome)}", ended=True)
            if outcome == "failed" and slot.cell.arm == START_FOLDER:
                self.failed_start = self.failed_start or slot.cell
                self._stop()

    def _stop(self) -> None:
        if self.stopping:
            return
        self.stopping = True
        for slot in self.slots.values():
            slot.running.stop()


def _reason(cell: Cell, outcome: CellOutcome) -> str:
    return f"\n  {printable(failure_of(cell.folder) or '')}" if outcome == "failed" else ""


ERRORS = "errors.log"
THREADS, DEVICES = "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"


class CellProcess:
    """A cell in a process of its own, or run by torchrun; implements rlhf.comparison.scheduler.Running.

    The process stops when its standard input ends, so that no cell outlives the comparison, however that ends.
    """

    def __init__(self, cell: Cell, place: int, *, jobs: int, processes: int = 1) -> None:
        """Start the cell in slot `place` of the `jobs` slots, in `processes` processes if it trains."""
        self.cell, self._jobs = cell, jobs
        self._launched = processes > 1 and cell.config.budget is not None
        self._stop_requested = False
        share = MachineShare(place, jobs, processes, launched=self._launched)
        devices = visible_devices(os.environ)
        environment = resource_environment(share, cores=count_cores(), devices=devices, environ=os.environ)
        command = [sys.executable]
        if self._launched:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        self._files: list[BinaryIO] = [(cell.folder / ERRORS).open("wb")]
        if jobs > 1:
            self._files.append((cell.folder / OUTPUT).open("wb"))
        self.process = subprocess.Popen(
            [*command, "-m", "rlhf.comparison", str(cell.folder)],
            stdin=subprocess.PIPE,
            stderr=self._files[0],
            stdout=self._files[1] if jobs > 1 else None,
            env={**os.environ, **environment, "PYTHONUNBUFFERED": "1"},
            start_new_session=self._launched,  # a terminal's Ctrl-C would reach torchrun, which kills: see `stop`
        )

    def outcome(self) -> CellOutcome | None:
        """Return how the cell ended, None while it runs; the error of a failed cell is recorded in its folder."""
        code = self.process.poll()
        if code is None:
            return None
        self._close()
        if code == 0:
            return "done"
        if code == INTERRUPTED or self._stop_requested:
            return "interrupted"
        if failure_of(self.cell.folder) is None:  # the cell itself recorded none
            if is_over(self.cell):
                return "done"  # the error came after its last file
            error = extract_error(self.cell.folder / ERRORS, code, launched=self._launched)
            record_failure(self.cell.folder, error + advice_on_memory(error, self._jobs))
        return "failed"

    def stop(self) -> None:
        """Ask the cell to save and stop, by the end of its input: torchrun would kill its processes after 30 seconds.

        On Windows it ends at once, and continues from its last checkpoint.
        """
        assert self.process.stdin is not None
        self._stop_requested = True
        self.process.stdin.close()

    def kill(self) -> None:
        """Kill the process at once; processes of torchrun save and stop after their step, as their input ends."""
        self.process.kill()
        self.process.wait()
        self._close()

    def _close(self) -> None:
        assert self.process.stdin is not None
        for file in (*self._files, self.process.stdin):
            file.close()


@dataclass(frozen=True)
class MachineShare:
    """A cell's share of the machine: one of `jobs` slots, each with room for `processes` processes."""

    place: int
    jobs: int
    processes: int = 1
    launched: bool = False  # whether the cell runs in all of these processes, rather than in one

    @property
    def workers(self) -> int:
        """Return the number of processes of the cell."""
        return self.processes if self.launched else 1


def resource_environment(
    share: MachineShare, *, cores: int, devices: Sequence[str], environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment variables that give a cell its share of the machine.

    A cell that has the machine alone gets none. Processor cores are divided evenly, at least one for each process,
    unless OMP_NUM_THREADS is set; of several GPUs each process sees one, assigned in turn.
    """
    if share.jobs == 1:
        return {}
    changes = {} if environ.get(THREADS) else {THREADS: str(max(1, cores // (share.jobs * share.workers)))}
    if len(devices) > 1:
        first = share.place * share.processes
        changes[DEVICES] = ",".join(devices[(first + i) % len(devices)] for i in range(share.workers))
    return changes


def check_devices(plan: CellPlan, devices: Sequence[str]) -> None:
    """Check that cells that run at once, in several processes each, do not need the same GPU.

    Raises:
        ConfigError: there are too few GPUs.
    """
    jobs, processes = plan.config.jobs, plan.config.processes
    on_gpus = devices and any(cell.config.train.run.device != "cpu" for cell in plan.cells)
    if on_gpus and jobs > 1 and processes > 1 and jobs * processes > len(devices):
        raise ConfigError(
            f"jobs={jobs} with processes={processes} needs {jobs * processes} GPUs, one for each process, and there "
            f"are {len(devices)}: lower jobs or processes"
        )


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
    if launched:  # below this line the launcher tells the same of all processes
        ends = (i for i, line in enumerate(lines) if re.match(r"E\d{4} .*failed \(exitcode", line))
        lines = [line for line in lines[: next(ends, None)] if not re.match(r"[WE]\d{4} .*torch/distributed", line)]
    if code < 0:
        return f"the process was ended by {signal.Signals(-code).name}; if nobody sent it, probably out of memory"
    return f"{lines[-1] if lines else f'exit code {code}'} (all of it is in {log})"


MEMORY_ENDED = ("out of memory", "OutOfMemoryError", "MemoryError", "can't allocate memory", "ALLOC_FAILED")


def advice_on_memory(error: str, jobs: int) -> str:
    """Return what to do about a cell that ran out of memory beside others, to append to its error; else nothing."""
    if jobs == 1 or not any(words in error for words in MEMORY_ENDED):
        return ""
    return f". {jobs} cells ran at once and share the memory: set jobs lower, and the same command tries it again"


def count_cores() -> int:
    """Count the processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
