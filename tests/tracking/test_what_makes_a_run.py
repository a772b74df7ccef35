"""Settings that may change when a run is continued: one list, and every other change makes another run."""

from __future__ import annotations

import json
import os
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf.config.load import dump, load_reward_model, train_config
from rlhf.config.sections import RewardModelConfig, TrainConfig, TrainSections
from rlhf.errors import CheckpointError, called_from_python
from rlhf.models.folders import digest_of_calibration, digest_of_model
from rlhf.tracking.fingerprint import BLOCK, WHOLE, content_digest, weights_digest
from rlhf.tracking.run_folder import FolderLock, RunFolder, completed_step
from rlhf.tracking.same_run import (
    FIXED,
    MAY_CHANGE,
    Change,
    changes,
    check_same_run,
    finished_step,
    matches,
    move_aside,
    remove_leftovers,
)

ROOT = Path(__file__).resolve().parents[2]
PART_OF_THE_RUN = (
    "run.seed",
    "data*",
    "reward",
    "reward.source*",
    "reward.cost*",
    "reward.process*",
    "reward.shaping*",
    "reference*",
    "teacher",
    *(f"teacher.{name}" for name in ("type", "model", "tokenizer", "path", "top_k")),
    "algorithm*",
    "loss*",
    "ensemble*",
    "process*",
    "calibration*",
    "reference.weights",
    "eval.source*",
    "eval.prompts",
    "checkpoint.best.by",
    "environment",
    *(f"environment.{name}" for name in ("target", "kwargs", "max_turns", "max_tokens", "on_error", "truncation")),
    "overlap.ahead",
    "overlap.ahead_steps",
    "overlap.ratio_cap",
    "overlap.trace_cap",
    "sampling.correction*",
    *(f"sampling.{name}" for name in ("top_k", "top_p", "min_p")),
    *(f"batch.{name}" for name in ("prompts_per_step", "epochs", "minibatches", "shuffle")),
    *(f"sampling.{name}" for name in ("completions_per_prompt", "max_new_tokens", "temperature", "old_log_probs")),
    *(f"critic.{name}" for name in ("init", "head", "shared", "warmup_steps", "epochs")),
    *(
        f"{model}.{name}"
        for model in ("policy", "critic", "model")
        for name in ("betas", "adam_eps", "weight_decay", "optimizer", "weights", "lora*")
    ),
    *(f"{model}.{name}" for model in ("policy", "model") for name in ("model", "tokenizer", "ema_decay", "head_dtype")),
)
SECTIONS = ("run", "critic", "overlap", "offload", "batch", "sampling", "policy", "model", "eval", "checkpoint")


def all_settings() -> set[str]:
    """Every key of a training run and of a reward model's, sections with settings of their own left out."""
    namespace = runpy.run_path(str(ROOT / "scripts" / "make_config_doc.py"))
    keys = set()
    for root in (TrainSections, RewardModelConfig):
        for shape in namespace["shapes"](root):
            keys |= {f"{key}.{name}".lstrip(".") for key in shape.keys for name in shape.kind.model_fields}
    return keys - {"logging", "guard", "sharding", "schedule", *SECTIONS}


def test_every_setting_may_change_or_belongs_to_the_run() -> None:
    """A new setting fails here until somebody decides which."""
    settings = all_settings()
    assert {"policy.lr", "run.seed"} <= settings
    undecided = [key for key in settings if not Change(key, 0, 1).is_allowed and not matches(key, PART_OF_THE_RUN)]
    assert undecided == [], "on neither side"


def test_the_lists_name_only_settings_that_exist() -> None:
    settings = all_settings()
    patterns = [*MAY_CHANGE, *FIXED]
    assert [pattern for pattern in patterns if not any(matches(key, [pattern]) for key in settings)] == []


def test_what_decides_the_result_may_not_change() -> None:
    for key in (
        "algorithm.preset",
        "policy.model",
        "data.prompts.path",
        "run.seed",
        "reward.source.path",
        "data.system",
    ):
        assert not Change(key, 0, 1).is_allowed
    for key in ("schedule.steps", "policy.lr", "logging.every", "eval.every", "batch.micro_batch_size"):
        assert Change(key, 0, 1).is_allowed


def test_changes_are_named_with_both_values_and_the_main_ones_first() -> None:
    old = {"algorithm": {"preset": "ppo", "kl": {"coef": 0.05}}, "policy": {"lora": None, "lr": 1e-6}, "a": [1, 2]}
    new = {"algorithm": {"preset": "grpo", "kl": {"coef": 0.05}}, "policy": {"lora": {"r": 8}, "lr": 1e-6}, "a": [1, 3]}
    assert [str(change) for change in changes(old, new)] == [
        "algorithm.preset: ppo → grpo",
        "a: [1, 2] → [1, 3]",
        "policy.lora: null → {'r': 8}",
    ]
    assert changes(new, new) == []


def test_the_arguments_of_a_function_are_not_settings_of_ours() -> None:
    old, new = ({"reward": {"source": {"kwargs": {"timeout_s": value}}}} for value in (1, 2))
    (change,) = changes(old, new)
    assert (change.key, change.is_allowed) == ("reward.source.kwargs", False)


def test_two_spellings_of_a_path_are_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").touch()
    assert changes({"path": "data/a.jsonl"}, {"path": str(tmp_path / "data" / "a.jsonl")}) == []
    assert len(changes({"path": "data/a.jsonl"}, {"path": "data/b.jsonl"})) == 1


def config(folder: Path, **run: Any) -> TrainConfig:
    tree: dict[str, Any] = {
        "run": {"out_dir": str(folder)},
        "policy": {"model": "start"},
        "data": {"sft": {"path": "rows.jsonl"}},
        "algorithm": {"preset": "sft"},
        "schedule": {"steps": 3},
    }
    for key, value in run.items():
        tree[key] = {**tree.get(key, {}), **value}
    return train_config(tree)


def make_run(folder: Path, *, step: int = 3, complete: bool = True) -> None:
    """A folder as a run of `config` leaves it, without any weights."""
    run = RunFolder(folder)
    run.write_config(dump(config(folder)), is_new=True)
    (run.checkpoints / f"step-{step:06d}").mkdir(parents=True)
    run.model.mkdir()
    if complete:
        run.write_complete(step)


def test_another_run_in_the_folder_is_an_error_with_every_way_out(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    make_run(folder)
    message = r"holds another run \(step 3\): algorithm\.preset: sft → dpo, .* and \d+ more\. "
    ways = (
        r".*run\.out_dir=\.\.\..*checkpoint\.resume=never; the old run moves to .*run\.old-1.*checkpoint\.resume=always"
    )
    other = config(folder, algorithm={"preset": "dpo"}, data={"preferences": {"path": "pairs.jsonl"}})
    with pytest.raises(CheckpointError, match=message + ways):
        check_same_run(other)
    with called_from_python(), pytest.raises(CheckpointError, match=r'folder=\.\.\., .*resume="always"') as error:
        check_same_run(other)
    assert "checkpoint.resume" not in str(error.value)
    assert [str(c) for c in check_same_run(config(folder, schedule={"steps": 5}))] == ["schedule.steps: 3 → 5"]
    assert check_same_run(config(folder)) == []
    assert (
        check_same_run(config(tmp_path / "empty", algorithm={"preset": "dpo"}, data={"preferences": {"path": "p"}}))
        == []
    )


def test_always_takes_other_settings_but_no_other_kind_of_weights(tmp_path: Path) -> None:
    make_run(tmp_path)
    always = {"resume": "always"}
    different = check_same_run(config(tmp_path, checkpoint=always, run={"seed": 1, "out_dir": str(tmp_path)}))
    assert "run.seed" in [change.key for change in different]
    with pytest.raises(CheckpointError, match=r"policy\.lora: null → ") as error:
        check_same_run(config(tmp_path, checkpoint=always, policy={"model": "start", "lora": {"r": 4}}))
    assert "resume=always" not in str(error.value)
    rows = {"preferences": {"path": "pairs.jsonl"}}
    (tmp_path / "rm.yaml").write_text(yaml.safe_dump({"model": {"model": "start"}, "data": rows, "checkpoint": always}))
    with pytest.raises(CheckpointError, match=r"model: not set → |policy: .* → not set"):
        check_same_run(load_reward_model(tmp_path / "rm.yaml", [f"run.out_dir={tmp_path}"]))


def test_a_config_of_another_version_is_compared_by_what_both_know(tmp_path: Path) -> None:
    make_run(tmp_path)
    text = yaml.safe_load((tmp_path / "config.yaml").read_text())
    del text["policy"]["packing"]  # a setting that is newer than the run
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(text))
    assert check_same_run(config(tmp_path)) == []
    text["policy"]["gone"] = 1  # one that is older
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(text))
    assert check_same_run(config(tmp_path)) == []
    with pytest.raises(CheckpointError, match=r"run\.seed: 0 → 1"):
        check_same_run(config(tmp_path, run={"seed": 1, "out_dir": str(tmp_path)}))


@pytest.mark.parametrize("truncation", ["drop", "zero"])
def test_masking_that_an_earlier_version_derived_from_drop_is_no_change(tmp_path: Path, truncation: str) -> None:
    tree = {
        "run": {"out_dir": str(tmp_path)},
        "policy": {"model": "start"},
        "data": {"prompts": {"path": "rows.jsonl"}},
        "algorithm": {"preset": "grpo"},
        "environment": {"target": "game.py:Game", "truncation": truncation},
        "schedule": {"steps": 3},
    }
    make_run(tmp_path)
    stored = dump(train_config(tree))
    stored["algorithm"]["mask_truncated"] = True
    RunFolder(tmp_path).write_config(stored, is_new=True)
    if truncation == "drop":
        assert check_same_run(train_config(tree)) == []
    else:
        with pytest.raises(CheckpointError, match="mask_truncated: true → false"):
            check_same_run(train_config(tree))


def test_a_moved_folder_holds_the_same_run(tmp_path: Path) -> None:
    rows = {"sft": {"path": str(tmp_path / "a" / "data" / "sft.jsonl")}}
    make_run(tmp_path / "a")
    RunFolder(tmp_path / "a").write_config(dump(config(tmp_path / "a", data=rows)))
    (tmp_path / "a").rename(tmp_path / "b")
    moved = {"sft": {"path": str(tmp_path / "b" / "data" / "sft.jsonl")}}
    assert [change.key for change in check_same_run(config(tmp_path / "b", data=moved))] == ["run.out_dir"]


def test_a_finished_run_is_known_without_loading_anything(tmp_path: Path) -> None:
    def finished(**changed: Any) -> int | None:
        asked = config(folder, **changed)
        return finished_step(asked, check_same_run(asked))

    folder = tmp_path / "run"
    assert finished() is None
    make_run(folder, complete=False)
    assert finished() is None
    RunFolder(folder).write_complete(3)
    assert finished() == 3
    assert finished(logging={"every": 7}) == 3
    assert finished(schedule={"steps": 5}) is None
    assert finished(policy={"model": "start", "export_dtype": "float32"}) is None  # to be exported again
    assert finished(checkpoint={"resume": "never"}) is None
    (folder / "checkpoints" / "step-000004").mkdir()  # it has gone on since
    assert finished() is None
    assert completed_step(RunFolder(folder)) is None
    (folder / "checkpoints" / "step-000004").rmdir()
    assert finished() == 3
    RunFolder(folder).write_config(dump(config(folder, schedule={"steps": 5})))  # of a start that was killed
    assert finished(schedule={"steps": 5}) is None


def test_an_input_newer_than_the_end_is_looked_at(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}\n")
    folder = tmp_path / "run"
    make_run(folder)
    asked = config(folder, data={"sft": {"path": str(rows)}})
    RunFolder(folder).write_config(dump(asked))
    ended = RunFolder(folder).complete.stat().st_mtime
    os.utime(rows, (ended - 10, ended - 10))
    assert finished_step(asked, []) == 3
    os.utime(rows, (ended + 10, ended + 10))
    assert finished_step(asked, []) is None


def test_a_run_is_moved_aside_whole(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    make_run(folder)
    lock = FolderLock(folder)
    names = {path.name for path in folder.iterdir()} - {".lock"}
    first, second = move_aside(folder), move_aside(folder)
    lock.release()
    assert (first.name, second.name) == ("run.old-1", "run.old-2")
    assert {path.name for path in first.iterdir()} == names
    assert [path.name for path in folder.iterdir()] == [".lock"]


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for name in ("checkpoints/.deleting-step-000002", "best/.deleting-step-000001", ".writing-model"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "weights").write_text("half")
    (tmp_path / ".config.yaml.17.new").write_text("run:")
    (tmp_path / "checkpoints" / "step-000003").mkdir()
    remove_leftovers(run)
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert left == ["best", "checkpoints", "checkpoints/step-000003"]


def test_a_digest_of_a_file_notices_size_and_content(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_bytes(b"abc")
    two.write_bytes(b"abc")
    assert content_digest(one) == content_digest(two)
    two.write_bytes(b"abd")
    assert content_digest(one) != content_digest(two)
    for path in (one, two):  # too large to be read whole: both ends and places in between are
        with path.open("wb") as file:
            file.truncate(WHOLE + BLOCK)
    assert content_digest(one) == content_digest(two)
    with two.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    assert content_digest(one) != content_digest(two)


def test_the_calibration_of_a_reward_model_has_a_digest_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"w")
    digests = []
    for settings in ({}, {"vocab_size": 9}, {"score_mean": 0.5, "score_std": 2.0}, {"score_mean": 0.0}):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | settings))
        assert digest_of_model(str(tmp_path)) == weights_digest(tmp_path)
        digests.append(digest_of_calibration(str(tmp_path)))
    assert digests[:2] == [None, None]
    assert len(set(digests)) == 3


def test_the_digest_of_a_model_is_of_its_weights(tmp_path: Path) -> None:
    assert weights_digest(tmp_path) is None
    (tmp_path / "model.safetensors").write_bytes(b"w")
    before = weights_digest(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert weights_digest(tmp_path) == before
    (tmp_path / "model.safetensors").write_bytes(b"v")
    assert weights_digest(tmp_path) != before
