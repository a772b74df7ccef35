"""The script of `rlhf launch --slurm`, under stand-ins for SLURM's commands: it trains, stops in time, continues."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import yaml
from sharded import LIMIT, Tree, at, case, distance, environment, free_port, launch, metrics, samples
from slurm_stand_in import SlurmStandIn

from rlhf.commands.launch import LaunchOptions, launch_script


def cluster_for(tree: Tree, folder: Path) -> SlurmStandIn:
    """Two nodes with one process each, and the script that trains `tree` on them."""
    folder.mkdir(parents=True)
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(tree))
    script = launch_script(str(config), [], LaunchOptions(launcher="slurm", nodes=2, processes=1))
    return SlurmStandIn(script, folder, port=free_port(), environment=environment())


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.slow
def test_a_job_near_its_limit_is_saved_and_requeued_and_ends_as_one_that_was_not(tmp_path: Path) -> None:
    tree = case("ppo", tmp_path / "ppo")
    launch([at(tree, tmp_path / "one")], tmp_path / "one-plan", processes=1)
    cluster = cluster_for(at(tree, tmp_path / "run", checkpoint={"every": 0}), tmp_path / "cluster")
    lines = tmp_path / "run" / "metrics.jsonl"

    job = cluster.submit()
    try:
        while job.poll() is None and not (lines.is_file() and len(lines.read_text().splitlines()) > 1):
            time.sleep(0.01)
        job.send_signal(signal.SIGUSR1)  # like SLURM, so long before the limit
        assert job.wait(timeout=120) == 0, cluster.read("log")
    finally:
        job.kill()
    assert cluster.read("log").count("the same command continues from there") == 1, cluster.read("log")
    assert cluster.read("asked") == f"requeue {cluster.job_id}\n"
    assert 0 < len(metrics(tmp_path / "run")) < 7, cluster.read("log")
    assert all(is_gone(int(pid)) for pid in cluster.read("tasks").split())
    assert "SignalException" not in cluster.read("log")  # torchrun was not told to stop

    again = cluster.submit()
    try:
        assert again.wait(timeout=240) == 0, cluster.read("log")
    finally:
        again.kill()
    assert "continuing from" in cluster.read("log")
    assert cluster.read("asked").count("requeue") == 1  # not again: nobody told it to stop
    assert distance(tmp_path / "one", tmp_path / "run") < LIMIT
    assert samples(tmp_path / "one") == samples(tmp_path / "run")


@pytest.mark.slow
def test_a_run_that_fails_is_not_requeued_and_its_exit_code_is_the_job_s(tmp_path: Path) -> None:
    tree = at(case("ppo", tmp_path / "ppo"), tmp_path / "run", reward={"source": {"target": "nowhere:nothing"}})
    cluster = cluster_for(tree, tmp_path / "cluster")
    assert cluster.submit().wait(timeout=240) != 0
    assert "nowhere" in cluster.read("log")
    assert cluster.read("asked") == ""
