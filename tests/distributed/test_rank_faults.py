"""A process of several that dies, freezes, is slow or is told to stop: the run ends in time, and can be continued."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from odd_rank import HAPPENS
from sharded import LIMIT, Tree, at, case, distance, environment, free_port, launch, metrics, needs, samples

ODD = Path(__file__).with_name("odd_rank.py")
DEAD_S = 30.0  # the others and the launcher have ended so long after a process died; the launcher's own limit is 30
FREEZE_S = 10.0  # sharding.timeout_s if a process freezes
CALL = 5  # the fault's place: so many words of the processes to each other after the first checkpoint, before the end


class Launched:
    """torchrun with two processes, one of them odd."""

    def __init__(self, tree: Tree, folder: Path, odd: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        config = folder / "config.yaml"
        config.write_text(yaml.safe_dump(tree))
        self.log = folder / "log"
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
        command += [f"--master-port={free_port()}", str(ODD), json.dumps(odd), "train", str(config)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, cwd=folder, env=environment(), stdout=log, stderr=log)

    def ended(self, timeout_s: float = 120.0) -> int:
        """The exit code."""
        return self.process.wait(timeout=timeout_s)

    @property
    def output(self) -> str:
        """The output of all processes."""
        return self.log.read_text(errors="replace")


@contextmanager
def launched(tree: Tree, folder: Path, odd: dict[str, Any]) -> Iterator[Launched]:
    run = Launched(tree, folder, odd)
    try:
        yield run
    finally:
        run.process.kill()
        run.process.wait()


def tree_for_two(folder: Path, mode: str, *, timeout_s: float = 120.0) -> Tree:
    """The run for two processes; the run of one is made here and now."""
    tree = case("ppo", folder / "ppo")
    launch([at(tree, folder / "one")], folder / "one-plan", processes=1)
    return at(tree, folder / "many", sharding={"mode": mode, "timeout_s": timeout_s})


def fault(folder: Path, rank: int, what: str) -> dict[str, Any]:
    """Something that happens in the middle of a run."""
    return {"rank": rank, "call": CALL, "what": what, "after": str(folder / "many" / "checkpoints")}


def assert_same(folder: Path) -> None:
    assert distance(folder / "one", folder / "many") < LIMIT
    assert samples(folder / "one") == samples(folder / "many")
    steps = [row["step"] for row in metrics(folder / "many")]
    assert steps == [row["step"] for row in metrics(folder / "one")]


def assert_continues(tree: Tree, folder: Path, fault_run: Launched) -> None:
    assert 0 < len(metrics(folder / "many")) < 7, fault_run.output  # it was in the middle
    with launched(tree, folder / "again", {}) as again:
        assert again.ended() == 0, again.output
        assert "continuing from" in again.output
    assert_same(folder)


@pytest.mark.slow
@pytest.mark.parametrize("mode, rank", [("ddp", 1), ("ddp", 0), ("zero3", 1)])
def test_when_a_process_dies_the_others_stop_in_time_and_the_same_command_continues(
    tmp_path: Path, mode: str, rank: int
) -> None:
    needs(mode)
    tree = tree_for_two(tmp_path, mode)
    with launched(tree, tmp_path / "first", fault(tmp_path, rank, "die")) as first:
        while HAPPENS not in first.output and first.process.poll() is None:
            time.sleep(0.05)
        died = time.monotonic()
        assert first.ended(DEAD_S) != 0
        assert time.monotonic() - died < DEAD_S
        if (mode, rank) == ("ddp", 1):  # if the first process dies, torchrun alone may tell of it
            assert "lost contact with another rank" in " ".join(first.output.split())
        assert_continues(tree, tmp_path, first)


@pytest.mark.slow
def test_a_process_that_freezes_is_waited_for_so_long_and_no_longer(tmp_path: Path) -> None:
    tree = tree_for_two(tmp_path, "ddp", timeout_s=FREEZE_S)
    with launched(tree, tmp_path / "first", fault(tmp_path, 1, "freeze")) as first:
        assert first.ended() != 0
        assert "lost contact with another rank" in " ".join(first.output.split())
        assert_continues(tree, tmp_path, first)


@pytest.mark.slow
def test_one_process_far_slower_than_the_other_changes_nothing(tmp_path: Path) -> None:
    tree = tree_for_two(tmp_path, "ddp")
    with launched(tree, tmp_path / "first", {"rank": 1, "call": 1, "what": "dawdle"}) as first:
        assert first.ended() == 0, first.output
    assert_same(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["sigterm", "sigterm_launcher"])
def test_sigterm_saves_and_says_how_to_go_on(tmp_path: Path, what: str) -> None:
    tree = tree_for_two(tmp_path, "ddp")
    with launched(tree, tmp_path / "first", fault(tmp_path, 1, what)) as first:
        code = first.ended()
        assert (code == 0) == (what == "sigterm")  # torchrun itself ends with 1 when it was told to stop
        assert first.output.count("the same command continues from there") == 1, first.output
        assert_continues(tree, tmp_path, first)
