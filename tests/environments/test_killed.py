"""A run that is killed in the middle of an episode continues to the same bits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import runs
import yaml
from test_episodes import tree

from rlhf.training.online_run import OnlineRun


def _lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def _settings(folder: Path, target: str, **environment: Any) -> dict[str, Any]:
    return {**tree(folder, target, **environment), "checkpoint": {"every": 1}, "schedule": {"steps": 4}}


def _assert_same_bits(folder: Path, whole: OnlineRun, rest: OnlineRun) -> None:
    for name in ("policy", "critic"):
        one, other = (runs.weights(getattr(run.models, name)) for run in (whole, rest))
        assert runs.largest_difference(one, other) == 0.0
    assert _lines(folder / "whole", "metrics.jsonl") == _lines(folder / "run", "metrics.jsonl")
    assert sum("env/return" in line for line in _lines(folder / "run", "metrics.jsonl")) == 4


def test_five_kills_change_nothing(tmp_path: Path) -> None:
    counter = tmp_path / "counter"
    settings = _settings(tmp_path, "KilledAt", kwargs={"counter": str(counter)})
    counter.write_text("0")
    whole = runs.trained(settings, f"run.out_dir={tmp_path / 'whole'}")
    assert -int(counter.read_text()) > 100
    for steps in (7, 45, 20, 60, 3):
        counter.write_text(str(steps))
        run = runs.online(settings)
        with pytest.raises(BaseException, match=r"^$") as caught:
            runs.train(run)
        assert type(caught.value).__name__ == "Killed"
        run.session.recorder.close()  # the lock of the folder, which dies with a process
    _assert_same_bits(tmp_path, whole, runs.trained(settings))
    assert all(line["seconds"]["environment"] > 0 for line in _lines(tmp_path / "whole", "timings.jsonl"))


def _killed(folder: Path, place: str, calls: int) -> None:
    """Start the run, and kill it with SIGKILL when its workers have called `place` so often; no worker stays."""
    (folder / "armed").write_text(f"{place} {calls}")
    (folder / "workers").write_text("")
    command = [sys.executable, "-m", "rlhf", "train", str(folder / "run.yaml")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    with (folder / "log").open("wb") as log:  # no pipe, which a worker that stays would keep open
        done = subprocess.run(command, stdout=log, stderr=log, env=environment, timeout=300)
    (folder / "armed").unlink()
    assert done.returncode == -signal.SIGKILL, (folder / "log").read_text()
    workers = {int(line) for line in (folder / "workers").read_text().splitlines()}
    assert len(workers) == 2
    left = [psutil.Process(pid) for pid in workers if psutil.pid_exists(pid)]
    _, left = psutil.wait_procs(left, timeout=20)
    assert [worker for worker in left if worker.status() != psutil.STATUS_ZOMBIE] == []


def test_a_killed_process_leaves_no_worker_and_continues_to_the_same_bits(tmp_path: Path) -> None:
    """In an action of the third step, then in a reset of the step that the run continues with."""
    settings = _settings(tmp_path, "KillsTheTrainer", kwargs={"folder": str(tmp_path)}, workers=2)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    whole = runs.trained(settings, f"run.out_dir={tmp_path / 'whole'}", "environment.workers=0")
    _killed(tmp_path, "step", 90)
    assert 1 < len(_lines(tmp_path / "run", "metrics.jsonl")) < 4
    _killed(tmp_path, "reset", 10)
    rest = runs.trained(settings)
    assert rest.episodes is not None
    rest.episodes.pool.stop()
    _assert_same_bits(tmp_path, whole, rest)
