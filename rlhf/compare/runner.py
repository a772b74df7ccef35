"""Run the cells one after another, each in a process of its own, so that a failure of one is only its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.text import Text

from rlhf.compare.judge import JUDGED
from rlhf.compare.plan import Cell, Plan, claim
from rlhf.config.compare import START
from rlhf.errors import UserError
from rlhf.runtime.progress import duration, printable
from rlhf.runtime.run_folder import write_aside
from rlhf.runtime.session import Interruption

FAILED = "failed.json"
ERRORS = "errors.log"
INTERRUPTED = 3  # exit code of a cell that was stopped and saved
POLL_S = 0.1

Outcome = Literal["done", "failed", "interrupted"]
RunCell = Callable[[Cell], Outcome]


def run_cells(plan: Plan, run: RunCell, console: Console) -> bool:
    """Every cell that is not done; one that failed before is tried again. False where the user stopped it.

    Raises:
        ConfigError: a folder belongs to another comparison.
        UserError: the start model itself cannot be judged.
    """
    for cell in plan.cells:
        claim(cell)
    for number, cell in enumerate(plan.cells, start=1):
        title = f"{number}/{len(plan.cells)}  {cell.arm}, seed {cell.seed}"
        if (cell.folder / JUDGED).is_file():
            console.print(Text(f"{title}: done before"))
            continue
        console.rule(title)
        (cell.folder / FAILED).unlink(missing_ok=True)
        began = time.perf_counter()
        outcome = run(cell)
        if outcome == "interrupted":
            return False
        console.print(Text(f"{title}: {outcome} in {duration(time.perf_counter() - began)}{_why(cell, outcome)}"))
        if outcome == "failed" and cell.arm == START:
            raise UserError(f"the start model could not be judged: {failure_of(cell.folder)}")
    return True


def record_failure(folder: Path, error: str) -> None:
    """Keep what went wrong, for the report."""
    write_aside(folder / FAILED, json.dumps({"error": error}, ensure_ascii=False) + "\n")


def failure_of(folder: Path) -> str | None:
    """What went wrong with a cell; None where nothing did."""
    path = folder / FAILED
    if not path.is_file() or (folder / JUDGED).is_file():
        return None
    return str(json.loads(path.read_text(encoding="utf-8"))["error"])


def run_in_process(cell: Cell, *, processes: int = 1) -> Outcome:
    """The cell in a process of its own; Ctrl-C and SIGTERM are passed on, and the cell saves and stops.

    A cell that trains is run in so many `processes`.
    """
    command = [sys.executable, *_launcher(cell, processes), "-m", "rlhf.compare", str(cell.folder)]
    log = cell.folder / ERRORS
    with log.open("wb") as errors, Interruption() as stop:
        process = subprocess.Popen(command, stderr=errors, env={**os.environ, "PYTHONUNBUFFERED": "1"})
        try:
            told = False
            while process.poll() is None:
                if stop.requested and not told:
                    process.send_signal(signal.SIGTERM)
                    told = True
                time.sleep(POLL_S)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    code = process.returncode
    if code == INTERRUPTED or stop.requested:  # of a cell that was finished all the same, judged.json is there
        return "interrupted"
    if code == 0:
        return "done"
    record_failure(cell.folder, _last_words(log, code))
    return "failed"


def _launcher(cell: Cell, processes: int) -> list[str]:
    """torchrun with a port of its own, where there is more than one process to start."""
    if processes == 1 or cell.config.budget is None:
        return []
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]


def _last_words(log: Path, code: int) -> str:
    """The error that ended a process, from what it wrote last."""
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    starts = [i for i, line in enumerate(lines) if line.startswith("error: ")]
    if code == 2 and starts:
        return "\n".join(lines[starts[-1] :]).removeprefix("error: ")
    if starts:  # of several processes: what follows is the launcher's
        return lines[starts[-1]].removeprefix("error: ")
    if code < 0:
        return f"the process was ended by {signal.Signals(-code).name}; out of memory, if nobody did it"
    return f"{lines[-1] if lines else f'exit code {code}'} (all of it is in {log})"


def _why(cell: Cell, outcome: Outcome) -> str:
    if outcome != "failed":
        return ""
    return f"\n  {printable(failure_of(cell.folder) or '')}"
