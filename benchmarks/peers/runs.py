"""Start one side's job in a process of its own and read what it found."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from pathlib import Path
from typing import Any

from peers.work import Job

HERE = Path(__file__).resolve().parent
SideResult = dict[str, Any]


def run_side(python: str, script: str, job: Job, folder: Path) -> SideResult:
    """One job; its plan is written into `folder`.

    Raises:
        RuntimeError: it failed; with the last lines it wrote.
    """
    plan = folder / "job.json"
    job.write(plan)
    environment = {**os.environ, "OMP_NUM_THREADS": str(job.threads), "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [python, str(HERE / script), str(plan)], capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode:
        raise RuntimeError(f"{script} {job.trainer}: {done.stderr[-2000:]}")
    found: SideResult = json.loads(done.stdout.splitlines()[-1])
    return found


def phase(found: SideResult, name: str) -> float | None:
    """The median seconds of a phase; None where it was not seen."""
    values = [each[name] for each in found["phases"] if name in each]
    return statistics.median(values) if values else None
