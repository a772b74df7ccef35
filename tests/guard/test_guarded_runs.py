"""Tiny runs under guard: alarms and their actions, the best checkpoint, and both after an interruption."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from runs import offline_tree, ppo_tree, quiet

from rlhf.config.files import merge, parse_overrides
from rlhf.config.load import train_config
from rlhf.data.paths import resolve_best
from rlhf.errors import ConfigError
from rlhf.factory.run import TrainingRun, build_run
from rlhf.models.folders import digest_of_model
from rlhf.report.page import write_report
from rlhf.tracking.run_folder import RunFolder
from rlhf.tracking.trackers import Trackers
from rlhf.training.session import TrainState

JUDGE = {"type": "function", "target": f"{Path(__file__).parents[1] / 'word_rewards.py'}:count_words"}
FIERCE = {
    "policy": {"lr": 1.0},
    "critic": {"lr": 5.0e-6},
    "algorithm": {"advantage": {"gae_lambda": 0.95}},
}  # the policy jumps


def run_of(tree: dict[str, Any], *overrides: str) -> TrainingRun:
    return build_run(train_config(merge(tree, parse_overrides(overrides))), quiet())


def finished(tree: dict[str, Any], *overrides: str) -> tuple[TrainingRun, bool]:
    run = run_of(tree, *overrides)
    is_complete = run.train()
    run.session.recorder.close()
    return run, is_complete


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def tree_of(folder: Path, **changes: Any) -> dict[str, Any]:
    guard = {"alarms": {"kl-jump": "lower_lr", "repetition": "raise_kl"}, "lr_factor": 0.25}
    best = {"best": {}, "every": 3, "keep": 2}
    sections = {**FIERCE, "checkpoint": best, "guard": guard, "eval": {"every": 1, "source": JUDGE}}
    return merge(ppo_tree(folder, **sections, schedule={"steps": 7}), changes)


def test_an_interrupted_run_has_the_same_alarms_actions_and_best_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_steps: list[int] = []  # from which on TensorBoard hides an earlier attempt's events

    def open_no_trackers(*_: object, first_step: int, **__: object) -> Trackers:
        first_steps.append(first_step)
        return Trackers()

    monkeypatch.setattr("rlhf.factory.context.open_trackers", open_no_trackers)
    straight, _ = finished(tree_of(tmp_path))
    folder = straight.session.recorder.folder
    alarms = folder.read_alarms()
    assert ("kl-jump", 1, "lower_lr") in [(line["alarm"], line["step"], line["action"]) for line in alarms]
    assert straight.session.state.lr_scale == 0.25
    rates = [row["policy/lr"] for row in folder.read_metrics() if "policy/lr" in row]  # not if nothing was learned
    assert rates[0] == 1.0
    assert set(rates[1:]) == {0.25}
    raised = [line["step"] for line in alarms if line["action"] == "raise_kl"]
    coefficients = [row["kl/coef"] for row in folder.read_metrics()[1:]]
    assert raised
    assert coefficients[raised[0] - 1 :][:2] == [0.05, 0.1]

    shutil.copytree(folder.path, tmp_path / "again")
    checkpoint = tmp_path / "again" / "checkpoints"
    shutil.rmtree(checkpoint / "step-000007")  # killed before its last save: it goes on from step 6
    assert [path.name for path in sorted(checkpoint.iterdir())] == ["step-000006"]
    shutil.rmtree(tmp_path / "again" / "model")
    resumed, _ = finished(tree_of(tmp_path), f"run.out_dir={tmp_path / 'again'}")
    for name in ("metrics.jsonl", "alarms.jsonl", "samples.jsonl"):
        assert (tmp_path / "again" / name).read_bytes() == (folder.path / name).read_bytes(), name
    assert first_steps == [0, 7]  # the checkpoint's is not logged again
    assert resumed.session.state == straight.session.state
    assert weights(tmp_path / "again" / "model") == weights(folder.path / "model")


def test_a_run_that_an_alarm_stops_saves_and_goes_on_when_asked(tmp_path: Path) -> None:
    tree = tree_of(tmp_path, guard={"alarms": {"kl-jump": "stop", "repetition": "ignore"}}, checkpoint={"best": None})
    run, is_complete = finished(tree)
    notes = [row["text"] for row in run.session.recorder.folder.read_notes()]
    assert (is_complete, run.session.state.step) == (False, 1)
    assert "stopped at step 1 by the alarm kl-jump (guard.alarms.kl-jump=warn only warns)" in notes[-1]
    assert "the same command continues" in notes[-1]
    again, is_complete = finished(tree)
    assert (is_complete, again.session.state.step) == (True, 7)
    lines = run.session.recorder.folder.read_alarms()
    assert [line["step"] for line in lines if line["alarm"] == "kl-jump" and line["event"] == "on"] == [1]
    page = write_report(run.session.recorder.folder.path).read_text(encoding="utf-8")
    assert 'id="alarms"' in page
    assert "triangle-down" in page


def test_the_best_checkpoint_is_exported_named_and_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, is_complete = finished(tree_of(tmp_path, checkpoint={"best": {"patience": 2}}))
    folder, state = run.session.recorder.folder.path, run.session.state
    assert is_complete
    assert state.best is not None
    assert state.step == state.best.step + 2 < 7
    best = Path(resolve_best(f"{folder}@best"))
    assert best.name == f"step-{state.best.step:06d}"
    assert weights(folder / "model") == weights(best / "model")
    assert weights(folder / "model") != weights(folder / "checkpoints" / f"step-{state.step:06d}" / "model")
    assert json.loads((best / "best.json").read_text())["by"] == "score"
    rows = RunFolder(folder).read_metrics()
    assert [row["best/step"] for row in rows[-2:]] == [float(state.best.step)] * 2
    assert rows[state.best.step]["best/gain_low"] > 0 >= rows[-1]["best/gain_low"]
    assert RunFolder(best).read_config()["policy"] == RunFolder(folder).read_config()["policy"]
    assert run_of(tree_of(tmp_path, checkpoint={"best": {"patience": 2}})).train()  # nothing is left to do
    exported = digest_of_model(str(folder))
    (folder / "model").rename(folder / "moved")
    assert digest_of_model(str(folder)) == exported
    (folder / "moved").rename(folder / "model")
    with pytest.raises(ConfigError, match="has kept no best checkpoint"):
        resolve_best(f"{tmp_path}@best")
    assert resolve_best("owner/name@main") == "owner/name@main"
    damaged = best / "model" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:200])
    notes: list[str] = []
    monkeypatch.setattr(type(run.session.recorder), "note", lambda _recorder, text: notes.append(text))
    assert run.session.best is not None
    assert run.session.best.finish() is None  # the last checkpoint is exported
    assert "model.safetensors has 200 bytes" in notes[-1]


def test_the_best_checkpoint_is_chosen_by_the_prompts_that_are_judged(tmp_path: Path) -> None:
    body = "def grade(completion, row):\n    return None if 'blue' in row['prompt'] else float(len(completion))\n"
    (tmp_path / "judge.py").write_text(body)
    judge = {"type": "verifier", "name": f"{tmp_path / 'judge.py'}:grade", "workers": 1}
    tree = tree_of(tmp_path, eval={"source": judge}, schedule={"steps": 1})
    tree["eval"]["source"] = judge
    run, _ = finished(tree)
    best = run.session.state.best
    assert best is not None
    judged = [value for value in best.values if value is not None]
    assert 0 < len(judged) < len(best.values)
    record = json.loads((Path(resolve_best(f"{run.session.recorder.folder.path}@best")) / "best.json").read_text())
    assert record["rows"] == len(judged)
    assert record["mean"] == pytest.approx(sum(judged) / len(judged))


def test_with_restore_off_the_last_checkpoint_is_exported(tmp_path: Path) -> None:
    run, _ = finished(tree_of(tmp_path, checkpoint={"best": {"restore": False, "patience": 1}}))
    folder, step = run.session.recorder.folder.path, run.session.state.step
    assert weights(folder / "model") == weights(folder / "checkpoints" / f"step-{step:06d}" / "model")


@pytest.mark.parametrize("by, sign", [("auto", 1.0), ("loss", -1.0), ("accuracy", 1.0)])
def test_offline_runs_keep_the_best_by_score_loss_or_accuracy(tmp_path: Path, by: str, sign: float) -> None:
    data = {} if by == "auto" else {"data": {"eval_prompts": None}, "eval": {"source": None}}
    tree = merge(offline_tree(tmp_path, "dpo", eval={"every": 1}, checkpoint={"best": {"by": by}, "every": 0}), data)
    run, _ = finished(tree)
    state, rows = run.session.state, run.session.recorder.folder.read_metrics()
    name = {"auto": "eval/score", "loss": "eval/preference_loss", "accuracy": "eval/preference_accuracy"}[by]
    assert state.best is not None
    values = [value for value in state.best.values if value is not None]
    assert sign * sum(values) / len(values) == pytest.approx(rows[state.best.step][name])


def test_kto_keeps_the_best_by_accuracy_on_held_out_pairs_which_have_no_loss_of_its_own(tmp_path: Path) -> None:
    changes = {"data": {"eval_prompts": None}, "eval": {"source": None, "every": 1}, "schedule": {"steps": 2}}
    run, _ = finished(offline_tree(tmp_path, "kto", checkpoint={"best": {}, "every": 0}, **changes))
    state, rows = run.session.state, run.session.recorder.folder.read_metrics()
    assert state.best is not None
    values = [value for value in state.best.values if value is not None]
    assert sum(values) / len(values) == pytest.approx(rows[state.best.step]["eval/preference_accuracy"])
    assert "eval/preference_loss" not in rows[state.best.step]


def test_what_is_not_measured_cannot_choose(tmp_path: Path) -> None:
    run = run_of(tree_of(tmp_path, checkpoint={"best": {"by": "loss"}}))
    with pytest.raises(ConfigError, match=r"checkpoint.best.by is loss, but this run measures score"):
        run.train()
    run.session.recorder.close()


def test_a_state_of_before_has_no_best_and_the_whole_learning_rate(tmp_path: Path) -> None:
    old = {"state": {"step": 3, "kl_coef": 0.1}, "positions": {"metrics": 1, "samples": 2}}
    (tmp_path / "state.json").write_text(json.dumps(old))
    state, positions = TrainState.read(tmp_path)
    assert (state.step, state.lr_scale, state.best) == (3, 1.0, None)
    assert "alarms" not in positions
