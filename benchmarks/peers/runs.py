"""Start one side's job in a process of its own and read its result."""

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


def run_side(python: str, script: str, job: Job, folder: Path, *, timeout_s: float | None = None) -> SideResult:
    """Run one job; its plan is written into `folder`.

    Raises:
        RuntimeError: it failed; with the last lines it wrote.
        subprocess.TimeoutExpired: it took longer than `timeout_s`.
    """
    plan = folder / "job.json"
    job.write(plan)
    environment = {**os.environ, "OMP_NUM_THREADS": str(job.threads), "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [python, str(HERE / script), str(plan)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=timeout_s,
    )
    if done.returncode:
        raise RuntimeError(f"{script} {job.trainer}: {done.stderr[-2000:]}")
    result: SideResult = json.loads(done.stdout.splitlines()[-1])
    return result


def phase(result: SideResult, name: str) -> float | None:
    """Return the median seconds of a phase; None if it did not occur."""
    values = [each[name] for each in result["phases"] if name in each]
    return statistics.median(values) if values else None
