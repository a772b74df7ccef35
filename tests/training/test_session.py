"""The course of a run: the steps of evaluations, records and checkpoints; interruption."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from runs import offline, offline_tree

from rlhf.errors import CheckpointError, ConfigError
from rlhf.tracking.checkpoint import Checkpoints
from rlhf.tracking.progress import Progress
from rlhf.tracking.run_folder import RunFolder
from rlhf.tracking.trackers import Trackers
from rlhf.training.session import Recorder, Session, TrainState


def session(folder: Path, **changes: Any) -> Session:
    run = RunFolder(folder)
    recorder = Recorder(run, Progress("t", 5, Console(quiet=True)), Trackers(), show=())
    settings: dict[str, Any] = {
        "state": TrainState(),
        "total_steps": 5,
        "recorder": recorder,
        "checkpoints": Checkpoints(run.checkpoints, keep=9),
        "save": lambda path: (path / "weights").write_text("w"),
        "evaluate": lambda step: {"eval/score": float(step)},
        "memory_mb": lambda: 1.0,
        "checkpoint_every": 2,
        "eval_every": 3,
        "log_every": 2,
    }
    return Session(**{**settings, **changes})


def run_to_end(one: Session) -> list[int]:
    done = []
    for step in one.steps():
        one.report({"score/mean": float(step)}, tokens=10)
        done.append(step)
    return done


def test_what_happens_when(tmp_path: Path) -> None:
    one = session(tmp_path)
    assert run_to_end(one) == [1, 2, 3, 4, 5]
    metrics = one.recorder.folder.read_metrics()
    assert metrics == [
        {"step": 0, "eval/score": 0.0},
        {"step": 2, "score/mean": 2.0},
        {"step": 3, "score/mean": 3.0, "eval/score": 3.0},
        {"step": 4, "score/mean": 4.0},
        {"step": 5, "score/mean": 5.0, "eval/score": 5.0},
    ]
    assert [path.name for path in one.checkpoints.all()] == ["step-000002", "step-000004", "step-000005"]
    assert not one.interrupted


def test_tokens_of_unlogged_steps_count_towards_the_next_line(tmp_path: Path) -> None:
    one = session(tmp_path, eval_every=0)
    run_to_end(one)
    timings = one.recorder.folder.read_timings()
    assert [row["step"] for row in timings] == [0, 2, 4, 5]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_after_the_step_and_says_how_to_continue(tmp_path: Path, number: int) -> None:
    one = session(tmp_path)
    for step in one.steps():
        one.report({"score/mean": float(step)}, tokens=1)
        if step == 3:
            os.kill(os.getpid(), number)
    assert one.interrupted
    assert one.state.step == 3
    assert one.checkpoints.all()[-1].name == "step-000003"
    assert "the same command continues" in one.recorder.folder.read_notes()[-1]["text"]
    state, positions = TrainState.read(one.checkpoints.all()[-1])
    rest = session(tmp_path, state=state, resumed=True)
    rest.recorder.rewind(positions)
    assert run_to_end(rest) == [4, 5]
    whole = session(tmp_path / "whole")
    run_to_end(whole)
    assert rest.recorder.folder.metrics.read_bytes() == whole.recorder.folder.metrics.read_bytes()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C raises, as in a terminal; in a shell's background process it is ignored from the start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_a_second_interrupt_stops_at_once(tmp_path: Path) -> None:
    one = session(tmp_path)

    def interrupt_twice() -> None:
        for _ in one.steps():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        interrupt_twice()
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)  # the handlers are restored


def test_a_finished_run_does_nothing(tmp_path: Path) -> None:
    one = session(tmp_path, state=TrainState(step=5), resumed=True)
    assert run_to_end(one) == []
    assert one.checkpoints.all() == []


def test_a_state_of_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text('{"state": {"stepp": 1}, "positions": {}}')
    with pytest.raises(CheckpointError, match="another version"):
        TrainState.read(tmp_path)


def test_an_unknown_metric_is_an_error(tmp_path: Path) -> None:
    one = session(tmp_path)
    with pytest.raises(ConfigError):
        one.recorder.metrics(1, {"score/meen": 1.0}, tokens=1, memory_mb=1.0)


class Purse:
    """A budget of tokens."""

    def __init__(self, limit: int) -> None:
        self.limit, self.tokens, self.steps = limit, 0, list[int]()
        self.seconds: list[float] = []

    @property
    def spent(self) -> bool:
        return self.tokens >= self.limit

    def spend(self, step: int, metrics: Mapping[str, float], *, tokens: int, seconds: float) -> None:
        assert metrics == {"score/mean": float(step)}  # the loop's metrics, before evaluation adds to them
        self.tokens += tokens
        self.steps.append(step)
        self.seconds.append(seconds)


def test_a_run_ends_as_runs_end_when_its_budget_is_spent(tmp_path: Path) -> None:
    purse = Purse(25)
    one = session(tmp_path, budget=purse)
    assert run_to_end(one) == [1, 2, 3]  # ten tokens each
    assert purse.steps == [1, 2, 3]
    assert all(seconds > 0 for seconds in purse.seconds)
    assert not one.interrupted
    assert one.recorder.folder.read_metrics()[-1] == {"step": 3, "score/mean": 3.0, "eval/score": 3.0}
    assert one.checkpoints.all()[-1].name == "step-000003"
    again = session(tmp_path, state=TrainState(step=3), resumed=True, budget=purse)
    assert run_to_end(again) == []


def test_evaluation_is_not_in_the_seconds_of_a_step(tmp_path: Path) -> None:
    purse = Purse(1000)

    def slow(_: int) -> dict[str, float]:
        time.sleep(0.3)
        return {}

    run_to_end(session(tmp_path, budget=purse, evaluate=slow, eval_every=1, checkpoint_every=0))
    assert max(purse.seconds) < 0.2


@pytest.mark.parametrize(("epochs", "warmup", "is_told"), [(1, 20, True), (1, 7, False), (None, 20, False)])
def test_a_warm_up_that_covers_the_epochs_is_noted(
    tmp_path: Path, epochs: int | None, warmup: int, is_told: bool
) -> None:
    schedule = {"epochs": epochs, "steps": None if epochs else 4, "warmup_steps": warmup}
    run = offline(offline_tree(tmp_path, "dpo", schedule=schedule, eval={"every": 0}))
    run.session.recorder.close()
    notes = " ".join(row["text"] for row in run.session.recorder.folder.read_notes())
    assert ("schedule.warmup_steps=20: it never reaches its peak" in notes) is is_told
