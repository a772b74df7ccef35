"""Several cells at once: the same results, each failure its own, one stop for all, a display that can be read."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from subprocess import PIPE
from typing import Any, NoReturn

import pytest
from cases import at_once, compare_tree, compared, failing_arm, plan_of
from quick import quick
from rich.console import Console

from rlhf.api.comparing import run_compare
from rlhf.comparison import trial
from rlhf.comparison.board import OUTPUT, Board, Tail
from rlhf.comparison.costs import COSTS
from rlhf.comparison.plan import Cell, ensure_owner
from rlhf.comparison.scheduler import (
    ERRORS,
    CellProcess,
    MachineShare,
    Running,
    advice_on_memory,
    check_devices,
    extract_error,
    resource_environment,
    run_cells,
    visible_devices,
)
from rlhf.comparison.terminal import ComparisonTerminal
from rlhf.comparison.trial import (
    FAILED,
    INTERRUPTED,
    JUDGED,
    cell_main,
    failed_by_its_values,
    failure_of,
    record_failure,
)
from rlhf.comparison.view import ComparisonView
from rlhf.config.files import merge
from rlhf.config.load import compare_config, dump, validate
from rlhf.config.sections import OnlineConfig
from rlhf.errors import CheckpointError, ConfigError, DivergenceError, RewardError
from rlhf.tracking.run_folder import FolderLock
from rlhf.tracking.same_run import check_same_run
from rlhf.tracking.trackers import read_jsonl


def in_processes(tree: dict[str, Any], console: Console | None = None) -> bool:
    config = compare_config(tree)
    start = partial(CellProcess, jobs=config.jobs)
    view = None if console is None else ComparisonTerminal(console)
    return run_compare(config, beside=Path(), view=view, start=start)


def timeless(tree: Any) -> Any:
    """Leave out the figures of a clock or of the memory's gauge, and the folder."""
    if isinstance(tree, dict):
        measured = ("seconds", "peak_memory_mb", "folder")
        return {key: timeless(value) for key, value in tree.items() if key not in measured}
    return [timeless(value) for value in tree] if isinstance(tree, list) else tree


def results_of(folder: Path) -> Any:
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


@pytest.mark.usefixtures("warm_start")
def test_two_at_once_give_what_one_after_another_gives(tmp_path: Path) -> None:
    """One arm is broken in both; every other judged byte is the same."""
    arms = {"dpo": None, "best_of_n": None, "bad": failing_arm(tmp_path)}
    tree = compare_tree(tmp_path, seeds=[0], arms=arms, budget={"completions": 32}, evaluations=1)
    alone = tree | {"out_dir": str(tmp_path / "alone")}
    beside = alone | {"out_dir": str(tmp_path / "beside"), "jobs": 2}
    assert compared(alone)
    output = io.StringIO()
    assert in_processes(beside, Console(file=output, width=200))
    one, two = (results_of(tmp_path / name) for name in ("alone", "beside"))
    assert timeless(one) == timeless(two)
    assert two["arms"]["bad"]["status"] == "failed"
    for arm in ("start", "ppo", "grpo"):
        first, second = (tmp_path / name / arm / "seed-0" for name in ("alone", "beside"))
        assert (first / JUDGED).read_bytes() == (second / JUDGED).read_bytes()
    lines = output.getvalue().splitlines()
    assert any(line.startswith("ppo, seed 0 | step 2/2") for line in lines)
    assert any(line.startswith("grpo, seed 0 | step 2/2") for line in lines)
    assert any(line.endswith("bad, seed 0: started") for line in lines)
    assert "no such thing" in (tmp_path / "beside" / "bad" / "seed-0" / ERRORS).read_text()
    page = (tmp_path / "beside" / "report.html").read_text()
    assert "2 cells ran at once" in page
    assert "ran at once" not in (tmp_path / "alone" / "report.html").read_text()


@pytest.mark.usefixtures("warm_start")
def test_a_cell_that_is_killed_is_the_only_one_that_fails(tmp_path: Path) -> None:
    tree = compare_tree(tmp_path, seeds=[0], jobs=2, arms={"dpo": None, "best_of_n": None})

    def start(cell: Cell, place: int) -> CellProcess:
        process = CellProcess(cell, place, jobs=2)
        if cell.arm == "ppo":
            os.kill(process.process.pid, signal.SIGKILL)
        return process

    assert run_compare(compare_config(tree), beside=Path(), start=start)
    folder = tmp_path / "compare"
    assert "SIGKILL" in (failure_of(folder / "ppo" / "seed-0") or "")
    statuses = {name: arm["status"] for name, arm in results_of(folder)["arms"].items()}
    assert statuses == {"ppo": "failed", "grpo": "done"}


PATIENT = """
import time
from pathlib import Path

calls = 0


def score(*, completions, **rest):
    global calls
    calls += 1
    deadline = time.monotonic() + 300
    while calls > 6 and not Path({stop!r}).exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    if calls > 6:
        time.sleep(0.5)  # the signal is on its way
    return [float(text.count("good")) for text in completions]
"""


@pytest.mark.usefixtures("warm_start")
@pytest.mark.parametrize("jobs", quick([1, 2], [2]))
def test_a_stop_reaches_every_cell_and_the_same_command_continues(tmp_path: Path, jobs: int) -> None:
    tree = compare_tree(tmp_path, seeds=[0], arms={"dpo": None, "best_of_n": None}, jobs=jobs)
    tree["budget"] = {"completions": 16 * 8}
    stop, patient = tmp_path / "stop", tmp_path / "patient.py"
    patient.write_text(
        PATIENT.format(stop=str(stop)), encoding="utf-8"
    )  # no cell ends before the stop, however slow another is
    tree["shared"]["reward"] = {"source": {"type": "function", "target": f"{patient}:score"}}
    running = [tmp_path / "compare" / arm / "seed-0" for arm in ("ppo", "grpo")[:jobs]]

    def stop_when_all_are_under_way() -> None:
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and not all(len(list(read_jsonl(cell / COSTS))) > 2 for cell in running):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)
        stop.touch()

    waiting = threading.Thread(target=stop_when_all_are_under_way)
    waiting.start()
    assert not in_processes(tree)
    waiting.join()
    assert {arm["status"] for arm in results_of(tmp_path / "compare")["arms"].values()} == {"unfinished"}
    for cell in running:
        assert not (cell / FAILED).exists()
        steps = [row["step"] for row in read_jsonl(cell / COSTS)]
        assert 3 <= len(steps) < 8
        assert f"step-{steps[-1]:06d}" in {path.name for path in (cell / "checkpoints").iterdir()}
    assert in_processes(tree)
    for arm in ("ppo", "grpo"):
        cell = tmp_path / "compare" / arm / "seed-0"
        assert [row["step"] for row in read_jsonl(cell / COSTS)] == list(range(1, 9))
        assert (cell / JUDGED).is_file()


def test_shares_by_hand() -> None:
    four = {"cores": 4, "devices": (), "environ": {}}
    assert resource_environment(MachineShare(0, 1), **four) == {}
    assert resource_environment(MachineShare(1, 2), **four) == {"OMP_NUM_THREADS": "2"}
    assert resource_environment(MachineShare(7, 8), **four) == {"OMP_NUM_THREADS": "1"}
    assert resource_environment(MachineShare(1, 2), cores=4, devices=(), environ={"OMP_NUM_THREADS": "3"}) == {}
    gpus = [
        resource_environment(MachineShare(place, 3), cores=8, devices=("2", "5"), environ={})["CUDA_VISIBLE_DEVICES"]
        for place in range(3)
    ]
    assert gpus == ["2", "5", "2"]
    assert "CUDA_VISIBLE_DEVICES" not in resource_environment(MachineShare(0, 2), cores=8, devices=("0",), environ={})


def test_cells_of_several_processes_have_gpus_of_their_own() -> None:
    def given(place: int, *, launched: bool = True) -> dict[str, str]:
        share = MachineShare(place, 2, 2, launched=launched)
        return resource_environment(share, cores=8, devices=("0", "1", "2", "3"), environ={})

    assert given(0) == {"OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": "0,1"}
    assert given(1) == {"OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": "2,3"}
    assert given(1, launched=False) == {"OMP_NUM_THREADS": "4", "CUDA_VISIBLE_DEVICES": "2"}


def test_cells_that_would_share_a_gpu_between_processes_are_refused(tmp_path: Path) -> None:
    tree = compare_tree(tmp_path, jobs=2, processes=2)
    check_devices(plan_of(tree), ("0", "1"))  # the base's device is the CPU
    base = Path(tree["base"])
    base.write_text(base.read_text().replace("device: cpu", "device: auto"))
    plan = plan_of(tree)
    for cpu_or_enough in ((), ("0", "1", "2", "3")):
        check_devices(plan, cpu_or_enough)
    with pytest.raises(ConfigError, match=r"jobs=2 with processes=2 needs 4 GPUs.* there are 2"):
        check_devices(plan, ("0", "1"))
    check_devices(plan_of({**tree, "jobs": 1}), ("0", "1"))  # one after another


def test_the_gpus_that_one_may_use_keep_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert visible_devices({}) == ["0", "1"]
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "GPU-a, GPU-b"}) == ["GPU-a", "GPU-b"]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "3"}) == []


def test_seconds_are_no_budget_for_cells_that_share_the_machine(tmp_path: Path) -> None:
    seconds = {"completions": None, "seconds": 5.0}
    assert plan_of(compare_tree(tmp_path, budget=seconds)).config.jobs == 1
    with pytest.raises(ConfigError, match=r"budget\.seconds with jobs=2.*slow each other down.*set jobs=1"):
        plan_of(compare_tree(tmp_path, budget=seconds, jobs=2))
    with pytest.raises(ConfigError, match="jobs"):
        plan_of(compare_tree(tmp_path, jobs=0))


def test_the_words_that_ended_a_process(tmp_path: Path) -> None:
    log = tmp_path / ERRORS
    assert extract_error(log, 1).startswith("exit code 1 ")
    log.write_text("noise\nerror: policy.model: no such folder\nsecond line\n")
    assert extract_error(log, 2) == "policy.model: no such folder\nsecond line"
    assert extract_error(log, 1).startswith("second line (all of it is in")
    assert "SIGKILL" in extract_error(log, -9)


def test_the_launchers_own_words_are_not_the_error(tmp_path: Path) -> None:
    log = tmp_path / ERRORS
    log.write_text(
        "W1129 00:31:57.000 12 torch/distributed/run.py:7] ****\nTraceback (most recent call last):\n"
        "ZeroDivisionError: division by zero\n"
        "W1129 00:32:56.000 12 torch/distributed/elastic/multiprocessing/api.py:9] Sending process 3 closing signal\n"
        "E1129 00:32:57.000 12 torch/distributed/elastic/multiprocessing/api.py:9] failed (exitcode: 1) local_rank: 0\n"
        "Traceback (most recent call last):\n====\n"
    )
    assert extract_error(log, 1, launched=True).startswith("ZeroDivisionError: division by zero (all of it is in")


def test_settings_are_the_cause_of_some_failures_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another try of a run that diverged diverges too; a reward server that was away may be there."""
    for name, error in (("one", DivergenceError("NaN")), ("two", RewardError("no answer"))):
        (tmp_path / name).mkdir()
        monkeypatch.setattr(trial, "read_cell", raising(error))
        assert cell_main(tmp_path / name) == 2
    assert (failure_of(tmp_path / "one"), failed_by_its_values(tmp_path / "one")) == ("NaN", True)
    assert failure_of(tmp_path / "two") is None  # the comparison reads it from the log
    record_failure(tmp_path / "two", "no answer")
    assert not failed_by_its_values(tmp_path / "two")


def raising(error: Exception) -> Callable[[Path], NoReturn]:
    def function(folder: Path) -> NoReturn:
        raise error

    return function


def test_a_cell_waits_for_the_process_that_a_killed_comparison_left(tmp_path: Path) -> None:
    tree = compare_tree(tmp_path, seeds=[0], arms={"dpo": None, "best_of_n": None, "grpo": None})
    (cell,) = plan_of(tree).of("ppo")
    cell.run_folder.mkdir(parents=True)
    hold = "import sys; from filelock import FileLock; lock = FileLock(sys.argv[1]); "
    hold += "lock.acquire(); print(flush=True); sys.stdin.read()"
    path = str(cell.run_folder.resolve() / FolderLock.NAME)
    with subprocess.Popen([sys.executable, "-c", hold, path], stdin=PIPE, stdout=PIPE) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        holder.stdout.readline()
        notes = io.StringIO()

        class Waiting(io.StringIO):
            def write(self, text: str) -> int:
                if "waiting until no other process" in text:
                    holder.stdin.close()
                return notes.write(text)

        view = ComparisonTerminal(Console(file=Waiting(), width=400))
        assert run_compare(compare_config(tree), beside=Path(), view=view, start=at_once)
    assert notes.getvalue().count("ppo, seed 0: waiting until no other process uses its folder") == 1
    assert (cell.folder / JUDGED).is_file()


def test_a_run_and_a_comparison_do_not_share_a_folder(tmp_path: Path) -> None:
    tree = compare_tree(tmp_path, seeds=[0], arms={"dpo": None, "best_of_n": None, "grpo": None})
    folder = tmp_path / "compare"
    folder.mkdir()
    (folder / "config.yaml").write_text("{}")
    (folder / "model").mkdir()
    with pytest.raises(ConfigError, match="compare holds a run: choose another out_dir"):
        compared(tree)
    (folder / "config.yaml").rename(folder / "compare.yaml")
    (cell,) = plan_of(tree).of("ppo")
    for resume in ("auto", "never"):
        tree = merge(dump(cell.config.train), {"run": {"out_dir": str(folder)}, "checkpoint": {"resume": resume}})
        with pytest.raises(CheckpointError, match=r"compare holds a comparison: choose another run\.out_dir"):
            check_same_run(validate(OnlineConfig, tree))


NO_MEMORY = """
from pathlib import Path

import torch


def score(*, completions, **rest):
    if Path({full!r}).exists():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    return [float(text.count("good")) for text in completions]
"""


def test_the_error_on_the_page_has_no_key(tmp_path: Path) -> None:
    record_failure(tmp_path, "the reward server http://h:1/score?token=a1b2c3 refused: Bearer abcdefgh1234")
    assert failure_of(tmp_path) == "the reward server http://h:1/score?token=*** refused: Bearer ***"


@pytest.mark.usefixtures("warm_start")
def test_a_cell_without_memory_beside_others_names_jobs_and_is_tried_again(tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.touch()
    (tmp_path / "reward.py").write_text(NO_MEMORY.format(full=str(full)))
    reward = {"type": "function", "target": f"{tmp_path / 'reward.py'}:score"}
    tree = compare_tree(tmp_path, seeds=[0], jobs=2, arms={"ppo": None, "dpo": None, "best_of_n": None})

    def start(cell: Cell, place: int) -> Running:
        return CellProcess(cell, place, jobs=2) if cell.arm == "grpo" else at_once(cell, place)

    tree["reward_source"] = reward
    plan = plan_of(tree)
    judged_first = replace(plan, cells=plan.of("start"))
    full.unlink()
    run_cells(judged_first, start, ComparisonView())
    full.touch()
    assert run_compare(compare_config(tree), beside=Path(), start=start)
    folder = tmp_path / "compare" / "grpo" / "seed-0"
    error = failure_of(folder) or ""
    assert "CUDA out of memory" in error
    assert error.endswith(
        "2 cells ran at once and share the memory: set jobs lower, and the same command tries it again"
    )
    full.unlink()
    assert compared({**tree, "jobs": 1})
    assert (folder / JUDGED).is_file()
    assert results_of(folder.parents[1])["arms"]["grpo"]["status"] == "done"


def test_what_is_advised_about_memory(tmp_path: Path) -> None:
    assert advice_on_memory("CUDA out of memory", 1) == ""
    assert advice_on_memory("policy.model: no such folder", 8) == ""
    assert "set jobs lower" in advice_on_memory(extract_error(tmp_path / ERRORS, -9), 8)


def test_lines_are_shown_once_and_whole(tmp_path: Path) -> None:
    log = tmp_path / OUTPUT
    tail = Tail(log)
    assert tail.lines() == []
    log.write_bytes(b"one\ntw")
    assert tail.lines() == ["one"]
    log.write_bytes(b"one\ntwo\n\n\x1b[2Jthree \xc3\xa9\n")
    assert tail.lines() == ["two", "␛[2Jthree é"]
    assert tail.lines() == []


def test_on_a_terminal_each_cell_has_one_line(tmp_path: Path) -> None:
    cells = plan_of(compare_tree(tmp_path)).of("start")
    for cell in cells:
        cell.folder.mkdir(parents=True)
    now = [0.0]
    console = Console(file=io.StringIO(), force_terminal=True, width=100, record=True)
    board = Board(console, 10, alone=False, clock=lambda: now[0])
    for cell in cells:
        board.cell_started(cell, "title")
    (cells[0].folder / OUTPUT).write_text("step 1/4\nstep 2/4\n")
    now[0] = 9.0
    board.refresh()
    board.note("3/10  ppo, seed 0: done in 1.0s", ended=True)
    console.print(board._display())
    assert [line.split() for line in console.export_text().splitlines()] == [
        ["3/10", "ppo,", "seed", "0:", "done", "in", "1.0s"],
        ["1/10", "cells", "9.0s"],
        ["start,", "seed", "0", "9.0s", "step", "2/4"],
        ["start,", "seed", "1", "9.0s"],
    ]
    for cell in cells:
        board.cell_ended(cell)
    console.print(board._display())
    assert "start" not in console.export_text()


@pytest.mark.parametrize("processes", quick([1, 2], [2]))
def test_a_cell_does_not_outlive_a_comparison_that_is_killed(tmp_path: Path, processes: int) -> None:
    """The kernel closes the pipe of a comparison that ends, however it ends; the cell has two hours of work."""
    tree = compare_tree(tmp_path, seeds=[0], arms={"dpo": None, "best_of_n": None}, jobs=2)
    tree["budget"] = {"completions": 10**6}
    (cell,) = plan_of(tree).of("ppo")
    ensure_owner(cell)
    process = CellProcess(cell, 0, jobs=2, processes=processes)
    # A terminal's Ctrl-C does not reach torchrun, which would kill its processes after 30 seconds.
    assert (os.getsid(process.process.pid) == os.getsid(0)) == (processes == 1)
    process.stop()
    try:
        assert process.process.wait(60) in (-signal.SIGTERM, INTERRUPTED, 1)
    finally:
        process.kill()
