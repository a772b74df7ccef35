"""JSON lines that are the same bytes for the same figures and rewind exactly; trackers that are asked for by name."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from rlhf.errors import CheckpointError, UserError
from rlhf.tracking.progress import Progress
from rlhf.tracking.run_folder import RunFolder
from rlhf.tracking.trackers import (
    BackendTracker,
    CallbackTracker,
    JsonlLogger,
    Trackers,
    encode_line,
    flatten,
    open_trackers,
    read_jsonl,
    to_json,
)
from rlhf.training.session import Recorder

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def test_a_line_is_sorted_and_writes_nonfinite_numbers_as_null() -> None:
    record = {"step": 3, "b/x": math.nan, "a/y": math.inf, "a/z": 0.1, "parts": {"q": 1.5, "c": -math.inf}}
    expected = b'{"a/y": null, "a/z": 0.1, "b/x": null, "parts": {"c": null, "q": 1.5}, "step": 3}\n'
    assert encode_line(record) == expected


@given(st.dictionaries(st.text(), JSON_VALUES, max_size=4))
def test_any_record_is_one_line_and_is_read_back_unchanged(record: dict[str, object]) -> None:
    line = encode_line(record)
    assert line.count(b"\n") == 1
    assert json.loads(line) == record


def test_lone_surrogates_and_line_separators_survive(tmp_path: Path) -> None:
    text = "half \ud83d and \u2028 and \x85 and \r\n"
    with JsonlLogger(tmp_path / "s.jsonl") as log:
        log.log({"completion": text})
        log.log({"completion": "next"})
    assert [row["completion"] for row in read_jsonl(tmp_path / "s.jsonl")] == [text, "next"]


def test_numpy_scalars_are_numbers_and_other_objects_are_refused() -> None:
    assert to_json({"a": np.float32(0.5), "b": np.int64(3), "c": np.float64("nan")}) == {"a": 0.5, "b": 3, "c": None}
    with pytest.raises(TypeError, match="set"):
        to_json({"a": {1, 2}})


def test_a_rewound_file_continues_as_if_never_interrupted(tmp_path: Path) -> None:
    with JsonlLogger(tmp_path / "whole.jsonl") as whole:
        for step in range(6):
            whole.log({"step": step, "x": step / 3})
    with JsonlLogger(tmp_path / "m.jsonl") as log:
        for step in range(3):
            log.log({"step": step, "x": step / 3})
        checkpoint = log.position()
        log.log({"step": 3, "x": 99.0})  # after the checkpoint, before the crash
    with JsonlLogger(tmp_path / "m.jsonl") as log:
        log.truncate(checkpoint)
        for step in range(3, 6):
            log.log({"step": step, "x": step / 3})
    assert (tmp_path / "m.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_position_is_the_length_of_what_was_logged(tmp_path: Path) -> None:
    with JsonlLogger(tmp_path / "deep" / "m.jsonl") as log:
        assert log.position() == 0
        log.log({"é": 1})
        assert log.position() == len('{"é": 1}\n'.encode())


@pytest.mark.parametrize(
    "tail", [b'{"step": 2, "sc', b'{"step": 2}', b"x" * 100_000], ids=["half", "no newline", "long"]
)
def test_a_line_cut_off_by_a_crash_is_neither_read_nor_kept(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n' + tail)
    assert list(read_jsonl(path)) == [{"step": 1}]
    with JsonlLogger(path) as log:
        log.log({"step": 2})
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'


def test_a_file_of_nothing_but_a_cut_off_line_becomes_empty(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"st')
    with JsonlLogger(path) as log:
        assert log.position() == 0


def test_a_file_that_lost_lines_since_the_checkpoint_is_refused(tmp_path: Path) -> None:
    with JsonlLogger(tmp_path / "m.jsonl") as log:
        log.log({"step": 1})
        with pytest.raises(CheckpointError, match="lines have been removed"):
            log.truncate(log.position() + 1)
        with pytest.raises(CheckpointError, match="inside a line"):
            log.truncate(4)
        log.truncate(0)
        assert log.position() == 0


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step":\n{"step": 3}\n')
    with pytest.raises(CheckpointError, match=r"m\.jsonl, line 2"):
        list(read_jsonl(path))
    path.write_bytes(b"[1]\n")
    with pytest.raises(CheckpointError, match="line 1: expected an object, found list"):
        list(read_jsonl(path))
    assert list(read_jsonl(tmp_path / "absent.jsonl")) == []


def test_flatten_joins_keys_with_dots_and_keeps_lists() -> None:
    assert flatten({"a": {"b": {"c": 1}, "d": [1, 2]}, "e": {}}) == {"a.b.c": 1, "a.d": [1, 2], "e": {}}


def test_no_tracker_imports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate.tracking", None)  # importing it would raise
    trackers = open_trackers([], folder=tmp_path, name="r", config={})
    trackers.log(1, {"score/mean": 0.5})
    trackers.close()


def test_a_missing_tracker_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for backend, hint in (
        ("wandb", r"setup\.sh track"),
        ("mlflow", r"setup\.sh mlflow"),
        ("trackio", "pip install trackio"),
    ):
        with pytest.raises(UserError, match=hint):
            open_trackers([backend], folder=tmp_path, name="r", config={})
    with pytest.raises(UserError, match="'neptune' is not one of mlflow, tensorboard, trackio, wandb"):
        open_trackers(["neptune"], folder=tmp_path, name="r", config={})


class FakeTracker:
    """Stands for accelerate's: records its arguments."""

    def __init__(self, **arguments: object) -> None:
        self.arguments = arguments
        self.calls: list[tuple[str, object]] = []
        made.append(self)

    def start(self) -> None:
        self.calls.append(("start", None))

    def store_init_configuration(self, values: dict[str, object]) -> None:
        self.calls.append(("config", values))

    def log(self, values: dict[str, float], step: int) -> None:
        self.calls.append(("log", (step, values)))

    def finish(self) -> None:
        self.calls.append(("finish", None))


made: list[FakeTracker] = []


def test_trackers_are_started_given_the_config_logged_to_and_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.clear()
    tracking = importlib.import_module("accelerate.tracking")
    monkeypatch.setattr(tracking, "TensorBoardTracker", FakeTracker)
    monkeypatch.setattr(tracking, "WandBTracker", FakeTracker)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: find_spec("json") if name in ("tensorboard", "wandb") else find_spec(name),
    )
    config = {"policy": {"lr": 0.1, "lora": None}, "logging": {"backends": ["wandb"]}}
    trackers = open_trackers(["tensorboard", "wandb"], folder=tmp_path, name="ppo", config=config, first_step=7)
    trackers.log(8, {"score/mean": 0.5})
    trackers.close()
    board, wandb = made
    assert board.arguments == {"run_name": "tensorboard", "logging_dir": str(tmp_path), "purge_step": 7}
    assert wandb.arguments == {"run_name": "rlhf", "name": "ppo", "dir": str(tmp_path)}
    flat = {"policy.lr": 0.1, "policy.lora": "null", "logging.backends": '["wandb"]'}
    expected = [("start", None), ("config", flat), ("log", (8, {"score/mean": 0.5})), ("finish", None)]
    assert board.calls == wandb.calls == expected


def test_tensorboard_files_hold_the_metrics(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trackers = open_trackers(["tensorboard"], folder=tmp_path, name="r", config={"policy": {"lr": 0.1}})
    trackers.log(3, {"score/mean": 0.5})
    trackers.close()
    events = reader.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("score/mean")] == [(3, 0.5)]


def test_tensorboard_keeps_the_step_of_the_checkpoint_and_hides_what_came_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    clock = SimpleNamespace(time=partial(next, itertools.count(1e9, 10)))  # files are read by the time in their names
    monkeypatch.setattr("tensorboard.summary.writer.event_file_writer.time", clock)
    for first_step, logged in ((0, {0: 9.0, 1: 9.0}), (0, {0: 0.0, 1: 1.0, 2: 2.0, 3: 9.0}), (3, {3: 3.0})):
        trackers = open_trackers(["tensorboard"], folder=tmp_path, name="r", config={}, first_step=first_step)
        for step, value in logged.items():
            trackers.log(step, {"score/mean": value})
        trackers.close()
    events = reader.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("score/mean")] == [(s, float(s)) for s in range(4)]


COMPLETION = {"step": 3, "split": "eval", "prompt": "a|b", "completion": "c\nd", "score": 0.5, "kl": 0.0, "length": 2}


def test_tensorboard_shows_completions_as_a_table(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trackers = open_trackers(["tensorboard"], folder=tmp_path, name="r", config={})
    trackers.log_samples(3, [COMPLETION])
    trackers.close()
    events = reader.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    (event,) = events.Tensors("completions/text_summary")
    table = event.tensor_proto.string_val[0].decode().splitlines()
    assert event.step == 3
    assert table[0] == "| step | split | prompt | completion | score | kl | length | finished |"
    assert table[2] == "| 3 | eval | a\\|b | c<br>d | 0.5 | 0.0 | 2 | None |"


def test_wandb_gets_completions_as_a_table() -> None:
    class Wandb(FakeTracker):
        def log_table(self, name: str, columns: list[str], data: list[list[object]], step: int) -> None:
            self.calls.append(("table", (name, columns[3], data[0][3], step)))

    tracker = Wandb()
    Trackers([BackendTracker("wandb", tracker)]).log_samples(3, [COMPLETION])
    assert tracker.calls == [("table", ("completions", "completion", "c\nd", 3))]


class Unreachable(FakeTracker):
    """Fails like a server that is away, at some steps and at the end."""

    def log(self, values: dict[str, float], step: int) -> None:
        if step < 3:
            raise ConnectionError(f"no answer at step {step}")
        super().log(values, step)

    def finish(self) -> None:
        raise RuntimeError("no answer at the end")


def test_a_backend_that_fails_is_told_of_once_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.clear()
    monkeypatch.setattr(importlib.import_module("accelerate.tracking"), "WandBTracker", Unreachable)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: find_spec("json" if name == "wandb" else name))
    trackers = open_trackers(["wandb"], folder=tmp_path, name="r", config={})
    recorder = Recorder(RunFolder(tmp_path), Progress("r", 3, Console(quiet=True)), trackers, show=())
    for step in (1, 2, 3):
        recorder.metrics(step, {"score/mean": 0.5}, tokens=1, memory_mb=1.0)
    recorder.close()
    assert [call for call in made[0].calls if call[0] == "log"] == [("log", (3, {"score/mean": 0.5}))]
    assert [row["step"] for row in RunFolder(tmp_path).read_metrics()] == [1, 2, 3]
    assert [row["text"] for row in RunFolder(tmp_path).read_notes()] == [
        "warning: logging.backends: wandb did not take the metrics of step 1 (ConnectionError: no answer at step 1). "
        "The run goes on, and metrics.jsonl has all of its metrics"
    ]


def test_a_failure_at_the_end_is_told_and_the_folder_released(tmp_path: Path) -> None:
    released: list[bool] = []
    trackers = Trackers([BackendTracker("wandb", Unreachable())])
    recorder = Recorder(
        RunFolder(tmp_path),
        Progress("r", 3, Console(quiet=True)),
        trackers,
        show=(),
        release=lambda: released.append(True),
    )
    recorder.close()
    assert released == [True]
    (note,) = RunFolder(tmp_path).read_notes()
    assert "wandb did not take the end of the run (RuntimeError: no answer at the end)" in note["text"]


def test_an_error_of_the_callers_own_function_ends_the_run() -> None:
    def own(step: int, metrics: Mapping[str, float]) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Trackers([CallbackTracker(own)]).log(1, {"score/mean": 0.5})


def test_wandb_runs_offline_in_the_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    trackers = open_trackers(["wandb"], folder=tmp_path, name="r", config={"policy": {"lr": 0.1}})
    trackers.log(3, {"score/mean": 0.5})
    trackers.close()
    (written,) = tmp_path.rglob("*.wandb")
    deadline = time.monotonic() + 20  # wandb's own process writes the file, a moment after it said that it finished
    while b"score/mean" not in written.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert b"score/mean" in written.read_bytes()


# In a process of their own: both read their environment once, and warn of themselves.
LOGGED = """
import sys
from pathlib import Path
from rlhf.tracking.trackers import open_trackers
backend, folder = sys.argv[1], Path(sys.argv[2])
trackers = open_trackers([backend], folder=folder, name="ppo", config={"policy": {"lr": 0.1, "lora": None}})
trackers.log(3, {"score/mean": 0.5})
trackers.log(4, {"score/mean": 0.75})
trackers.log_samples(4, [{"step": 4, "completion": "the end"}])
trackers.close()
"""
READ_MLFLOW = """
import mlflow
client = mlflow.MlflowClient()
(run,) = client.search_runs([client.get_experiment_by_name("rlhf").experiment_id])
history = client.get_metric_history(run.info.run_id, "score/mean")
table = mlflow.load_table("completions/step-000004.json", run_ids=[run.info.run_id])
assert list(table["completion"]) == ["the end"]
result = [run.info.run_name, run.info.status, run.data.params["policy.lr"], [[m.step, m.value] for m in history]]
"""
READ_TRACKIO = """
from trackio.sqlite_storage import SQLiteStorage
rows = SQLiteStorage.get_logs("rlhf", "ppo")
config = SQLiteStorage.get_run_config("rlhf", "ppo")
result = ["ppo", "FINISHED", str(config["policy.lr"]), [[row["step"], row["score/mean"]] for row in rows]]
"""


@pytest.mark.parametrize(
    ("backend", "reader", "files"), [("mlflow", READ_MLFLOW, "mlruns"), ("trackio", READ_TRACKIO, "trackio")]
)
def test_local_trackers_hold_the_metrics_in_the_run_folder(
    tmp_path: Path, backend: str, reader: str, files: str
) -> None:
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed: docs/run_folder.md says how")
    names = ("MLFLOW_TRACKING_URI", "TRACKIO_DIR", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")
    environment = {key: value for key, value in os.environ.items() if key not in names}
    program = f"{LOGGED}{reader}import json; print(json.dumps(result))"
    command = [sys.executable, "-c", program, backend, str(tmp_path)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (result,) = [line for line in done.stdout.splitlines() if line.startswith('["ppo"')]  # both print more than this
    assert json.loads(result) == ["ppo", "FINISHED", "0.1", [[3, 0.5], [4, 0.75]]]
    assert [path.name for path in tmp_path.iterdir()] == [files]
