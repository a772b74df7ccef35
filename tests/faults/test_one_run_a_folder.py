"""A folder is one run: another run, or other weights or rows, meet a folder that holds a run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import word_rewards
import yaml
from runs import (
    brief_tree,
    largest_difference,
    make_model,
    offline_tree,
    online,
    pairs_file,
    ppo_tree,
    trained,
    trained_offline,
    weights,
    write_rows,
)

from rlhf.cli import main
from rlhf.config.files import merge
from rlhf.config.load import load_reward_model, load_train
from rlhf.errors import CheckpointError
from rlhf.tracking.run_folder import RunFolder, completed_step
from rlhf.training.online import train
from rlhf.training.session import STATE, TrainState

Capture = pytest.CaptureFixture[str]


def write_config(folder: Path, tree: dict[str, Any]) -> str:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    return str(path)


def files_of(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Time and content of every file of a run, except its lock."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def notes_of(folder: Path) -> list[str]:
    return [row["text"] for row in RunFolder(folder / "run").read_notes()]


GRPO = ("algorithm.preset=grpo", "sampling.completions_per_prompt=4")


def test_another_algorithm_is_refused_and_changes_nothing(tmp_path: Path, capsys: Capture) -> None:
    file = write_config(tmp_path, brief_tree(tmp_path))
    assert main(["train", file]) == 0
    assert f"ppo in {tmp_path / 'run'}" in capsys.readouterr().out.replace("\n", " ")[:400]
    before = files_of(tmp_path / "run")
    assert main(["train", file, *GRPO, "schedule.steps=6"]) == 2
    error = capsys.readouterr().err
    assert "holds another run (step 4): algorithm.preset: ppo → grpo" in error
    assert "run.out_dir=" in error
    assert "checkpoint.resume=never" in error
    assert "checkpoint.resume=always" in error
    assert files_of(tmp_path / "run") == before


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The settings of a finished run of two steps, with other prompts and another model in its folder."""
    folder = tmp_path_factory.mktemp("finished")
    write_rows(folder / "other.jsonl", [{"prompt": "red one"}] * 4)
    make_model(folder / "other", seed=1)
    tree = brief_tree(folder, schedule={"steps": 2})
    trained(tree)
    return tree


@pytest.mark.parametrize(
    "change, key",
    [
        ({"data": {"prompts": {"path": "{tmp}/other.jsonl"}}}, "data.prompts.path"),
        ({"reward": {"source": {"type": "function", "target": "{here}:count_words"}}}, "reward.source.target"),
        ({"policy": {"model": "{tmp}/other"}}, "policy.model"),
        ({"run": {"seed": 1}}, "run.seed"),
        ({"sampling": {"temperature": 0.5}}, "sampling.temperature"),
    ],
)
def test_another_input_is_refused(finished: dict[str, Any], change: dict[str, Any], key: str) -> None:
    folder = Path(finished["run"]["out_dir"]).parent
    text = json.dumps(change).replace("{tmp}", str(folder)).replace("{here}", word_rewards.__file__)
    with pytest.raises(CheckpointError, match=rf"holds another run \(step 2\): {key}: "):
        online(merge(finished, json.loads(text)))


def test_a_finished_run_started_again_says_so_and_writes_nothing(tmp_path: Path, capsys: Capture) -> None:
    file = write_config(tmp_path, brief_tree(tmp_path))
    assert main(["train", file]) == 0
    before = files_of(tmp_path / "run")
    capsys.readouterr()
    assert main(["train", file]) == 0
    out = capsys.readouterr().out
    assert "already complete (step 4), nothing to train. To train further: a schedule.steps above 4" in out
    assert files_of(tmp_path / "run") == before
    assert main(["train", file, "schedule.steps=3"]) == 0  # fewer steps than it has: the run is looked at
    assert "nothing to train" in (out := capsys.readouterr().out)
    assert "of 3)" not in out
    after = files_of(tmp_path / "run")
    kept = [name for name in before if name != "notes.jsonl"]
    assert {name: after[name][1] for name in kept} == {name: before[name][1] for name in kept}


def test_a_finished_run_whose_model_is_gone_or_wanted_otherwise_exports_it_again(
    tmp_path: Path, capsys: Capture
) -> None:
    file = write_config(tmp_path, brief_tree(tmp_path))
    assert main(["train", file]) == 0
    model = tmp_path / "run" / "model" / "model.safetensors"
    first = model.read_bytes()
    model.write_bytes(first[:1000])
    assert main(["eval", str(tmp_path / "run"), f"data.eval_prompts.path={tmp_path / 'prompts.jsonl'}"]) == 2
    assert f"remove {model.parent}: the command that trained the run writes it again" in capsys.readouterr().err
    model.unlink()
    model.with_name("config.json").unlink()
    for path in model.parent.iterdir():
        path.unlink()
    model.parent.rmdir()
    assert main(["train", file]) == 0
    assert model.read_bytes() == first
    assert main(["train", file, "policy.export_dtype=bfloat16"]) == 0
    assert len(model.read_bytes()) < len(first)
    assert RunFolder(tmp_path / "run").read_config()["policy"]["export_dtype"] == "bfloat16"
    assert "nothing to train" not in capsys.readouterr().out


def test_a_damaged_configuration_is_told_with_the_command_that_writes_it_again(tmp_path: Path, capsys: Capture) -> None:
    file, run = write_config(tmp_path, brief_tree(tmp_path, schedule={"steps": 2})), tmp_path / "run"
    assert main(["train", file]) == 0
    written = (run / "config.yaml").read_bytes()
    (run / "config.yaml").write_bytes(written[: len(written) // 2] + b"\na: [")
    for command in (["report", str(run)], ["train", file, "schedule.steps=3"]):
        capsys.readouterr()
        assert main(command) == 2
        assert "config.yaml is damaged" in (told := " ".join(capsys.readouterr().err.split()))
        assert f"rlhf config FILE KEY=VALUE > {run / 'config.yaml'}" in told
    assert main(["config", file]) == 0
    (run / "config.yaml").write_text(capsys.readouterr().out)
    assert main(["report", str(run)]) == 0
    assert main(["train", file, "schedule.steps=3"]) == 0
    assert "continuing from" in capsys.readouterr().out


def test_more_steps_and_another_learning_rate_continue_and_are_recorded(tmp_path: Path) -> None:
    tree = brief_tree(tmp_path, schedule={"steps": 2})
    trained(tree)
    run = trained(tree, "schedule.steps=3", "policy.lr=0.005")
    assert run.session.resumed
    settings = RunFolder(tmp_path / "run").read_config()
    assert (settings["schedule"]["steps"], settings["policy"]["lr"]) == (3, 0.005)
    assert "changed since the last start: policy.lr: 0.01 → 0.005, schedule.steps: 2 → 3" in notes_of(tmp_path)
    assert [row["policy/lr"] for row in RunFolder(tmp_path / "run").read_metrics()] == [0.01, 0.01, 0.005]


def test_never_moves_the_old_run_and_begins_at_step_0(tmp_path: Path) -> None:
    tree = brief_tree(tmp_path, schedule={"steps": 2})
    trained(tree)
    kept = files_of(tmp_path / "run")
    run = trained(tree, *GRPO, "checkpoint.resume=never")
    assert not run.session.resumed
    assert files_of(tmp_path / "run.old-1") == kept
    assert RunFolder(tmp_path / "run").read_config()["algorithm"]["preset"] == "grpo"
    assert any("the run that was in" in note and "run.old-1" in note for note in notes_of(tmp_path))


@pytest.mark.parametrize("first, then", [((), GRPO), (GRPO, ("algorithm.preset=ppo",))])
def test_always_trains_the_old_weights_with_the_new_settings_and_says_it(
    tmp_path: Path, first: tuple[str, ...], then: tuple[str, ...]
) -> None:
    """Both ways: a critic that is not needed is left, and one that is missing begins again."""
    tree = brief_tree(tmp_path, schedule={"steps": 2}, sampling={"completions_per_prompt": 4})
    before = weights(trained(tree, *first).models.policy)
    run = online(tree, *then, "schedule.steps=4", "checkpoint.resume=always")
    assert run.session.state.step == 2
    assert largest_difference(before, weights(run.models.policy)) == 0.0
    assert run.session.state.kl_coef == run.algorithm.kl.coef
    assert run.policy.state()["moments"]
    run.session.recorder.close()
    preset = then[0].partition("=")[2]
    assert RunFolder(tmp_path / "run").read_config()["algorithm"]["preset"] == preset
    (note,) = [note for note in notes_of(tmp_path) if "resume=always" in note]
    assert "from step 3 on other settings train the weights of this checkpoint: algorithm.preset: " in note
    again = trained(tree, *then, "schedule.steps=4")  # it is that run now
    assert again.session.resumed
    assert again.session.state.step == 4


@pytest.mark.parametrize("resume", ["always", "auto"])
def test_other_settings_that_no_checkpoint_has_yet_start_with_their_own_coefficients(
    tmp_path: Path, resume: str
) -> None:
    shaping = {"shaping": {"normalize": "scale"}}
    tree = brief_tree(tmp_path, schedule={"steps": 2}, reward=shaping, algorithm={"kl": {"coef": 0.05}})
    assert trained(tree).session.state.score_moments
    other = ("algorithm.kl.coef=0.5", "schedule.steps=4")
    online(tree, *other, "checkpoint.resume=always").session.recorder.close()  # killed before its first checkpoint
    for _ in range(2):
        again = online(tree, *other, f"checkpoint.resume={resume}")
        assert (again.session.state.step, again.session.state.kl_coef) == (2, 0.5)
        assert again.session.state.score_moments == {}
        again.session.recorder.close()
    assert "the KL coefficient, the best checkpoint and completions sampled ahead begin again" in notes_of(tmp_path)[-1]
    moments = trained(tree, *other).session.state.score_moments
    longer = online(tree, *other, "schedule.steps=6")  # its checkpoint has these settings
    assert (longer.session.state.step, longer.session.state.score_moments) == (4, moments)
    longer.session.recorder.close()
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000004")
    back = online(tree, *other, "schedule.steps=6")  # the checkpoint of the old settings again
    assert (back.session.state.step, back.session.state.score_moments) == (2, {})
    back.session.recorder.close()


def test_completions_drawn_ahead_for_other_prompts_are_not_trained_on(tmp_path: Path) -> None:
    tree = brief_tree(tmp_path, schedule={"steps": 2}, overlap={"ahead": True})
    run = online(tree, "schedule.steps=4")
    run.session.total_steps = 2
    train(run)
    run.session.recorder.close()
    again = online(tree, "schedule.steps=4")
    assert again.ahead is not None
    assert list(again.ahead._drawn) == [3]
    again.session.recorder.close()
    path = Path(tree["data"]["prompts"]["path"])
    path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))
    other = online(tree, "schedule.steps=4", "checkpoint.resume=always")
    assert other.ahead is not None
    assert not other.ahead._drawn
    other.session.recorder.close()


@pytest.mark.parametrize("change", ["schedule.steps=6", "policy.export_dtype=bfloat16"])
def test_a_finished_run_that_goes_on_is_not_complete_if_it_is_killed_at_once(
    tmp_path: Path, capsys: Capture, change: str
) -> None:
    tree = brief_tree(tmp_path)
    file, folder = write_config(tmp_path, tree), RunFolder(tmp_path / "run")
    assert main(["train", file]) == 0
    model = (folder.model / "model.safetensors").read_bytes()
    online(tree, change).session.recorder.close()  # killed before its first checkpoint
    assert completed_step(folder) is None
    capsys.readouterr()
    assert main(["train", file, change]) == 0
    assert "already complete" not in capsys.readouterr().out
    assert completed_step(folder) == (6 if "steps" in change else 4)
    assert (folder.model / "model.safetensors").read_bytes() != model


def test_overwritten_start_weights_are_refused(tmp_path: Path) -> None:
    tree = brief_tree(tmp_path, schedule={"steps": 2})
    trained(tree)
    make_model(tmp_path / "model", seed=5)
    with pytest.raises(CheckpointError, match=r"policy\.model: the content differs from what the run began with"):
        online(tree, "schedule.steps=4")
    run = online(tree, "schedule.steps=4", "checkpoint.resume=always")
    run.session.recorder.close()
    assert "warning: policy.model: the content differs from what the run began with" in notes_of(tmp_path)


def test_dpo_rows_that_were_taken_away_are_noticed(tmp_path: Path) -> None:
    tree = offline_tree(tmp_path, "dpo", schedule={"steps": 2}, data={"eval_prompts": None}, eval={"source": None})
    trained_offline(tree)
    path = Path(tree["data"]["preferences"]["path"])
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:30]))
    with pytest.raises(CheckpointError, match=r"data\.preferences: the content differs"):
        trained_offline(tree, "schedule.steps=4")
    pairs_file(tmp_path)  # as they were
    assert trained_offline(tree, "schedule.steps=4").session.resumed


@pytest.mark.parametrize("stream", [False, True])
def test_rows_of_a_mixture_with_the_same_names_and_sizes_are_noticed(tmp_path: Path, stream: bool) -> None:
    def rows(word: str) -> list[dict[str, str]]:
        return [{"prompt": "red one", "completion": f" {word}"}] * 16

    make_model(tmp_path / "model")
    path = write_rows(tmp_path / "a.jsonl", rows("good"))
    tree = {
        "run": {"out_dir": str(tmp_path / "run"), "device": "cpu"},
        "data": {"sft": {"sources": {"a": {"path": str(path)}}, "stream": stream}},
        "policy": {"model": str(tmp_path / "model"), "lr": 1e-2},
        "algorithm": {"preset": "sft"},
        "batch": {"prompts_per_step": 4},
        "schedule": {"steps": 2},
    }
    trained_offline(tree)
    write_rows(path, rows("blue"))
    with pytest.raises(CheckpointError, match=r"data\.sft: the content differs"):
        trained_offline(tree, "schedule.steps=4")
    write_rows(path, rows("good"))
    assert trained_offline(tree, "schedule.steps=4").session.resumed


def test_a_checkpoint_without_digests_continues_and_says_that_it_could_not_be_checked(tmp_path: Path) -> None:
    tree = ppo_tree(tmp_path, schedule={"steps": 2}, checkpoint={"every": 0})
    run = trained(tree)
    assert set(run.session.state.inputs) == {
        "policy.model",
        "reward.source.target",
        "data.prompts",
        "data.eval_prompts",
        "dtype",
    }
    (checkpoint,) = run.session.checkpoints.all()
    content = json.loads((checkpoint / STATE).read_text())
    del content["state"]["inputs"]
    run.session.checkpoints.save(2, lambda folder: copy_with(checkpoint, folder, json.dumps(content)))
    assert TrainState.read(checkpoint)[0].inputs == {}
    again = trained(tree, "schedule.steps=3")
    assert again.session.resumed
    assert any("does not record the content of data.eval_prompts, data.prompts" in note for note in notes_of(tmp_path))
    assert set(again.session.state.inputs) == set(run.session.state.inputs)


def copy_with(checkpoint: Path, folder: Path, state: str) -> None:
    """Fill a new checkpoint's folder with the files of an old one, and another state."""
    for path in [path for path in checkpoint.rglob("*") if path.is_file() and path.name != "manifest.json"]:
        target = folder / path.relative_to(checkpoint)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    (folder / STATE).write_text(state)


def test_an_edited_reward_function_is_a_warning(tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text("def score(completions):\n    return [float(len(c)) for c in completions]\n")
    source = {"type": "function", "target": f"{reward}:score"}
    tree = brief_tree(tmp_path, schedule={"steps": 2}, reward={"source": source})
    trained(tree)
    reward.write_text("def score(completions):\n    return [-float(len(c)) for c in completions]\n")
    assert trained(tree, "schedule.steps=3").session.resumed
    assert "warning: reward.source.target: the content differs from what the run began with" in notes_of(tmp_path)


def test_a_model_without_a_checkpoint_is_not_trained_over(tmp_path: Path, capsys: Capture) -> None:
    file = write_config(tmp_path, brief_tree(tmp_path, schedule={"steps": 2}))
    assert main(["train", file]) == 0
    for path in sorted((tmp_path / "run" / "checkpoints").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    assert main(["train", file]) == 0
    assert "already complete" in capsys.readouterr().out
    assert main(["train", file, "schedule.steps=4"]) == 2
    assert "it has a model but no checkpoint to continue from" in capsys.readouterr().err


def test_what_a_kill_left_behind_is_gone_after_the_next_start(tmp_path: Path) -> None:
    tree = brief_tree(tmp_path, schedule={"steps": 2})
    trained(tree)
    for name in ("checkpoints/.deleting-step-000000", ".writing-model"):
        (tmp_path / "run" / name).mkdir()
    online(tree).session.recorder.close()
    assert not list((tmp_path / "run").rglob(".writing-*")) + list((tmp_path / "run").rglob(".deleting-*"))


def test_a_failed_setup_leaves_no_folder_and_no_lock(tmp_path: Path, capsys: Capture) -> None:
    file = write_config(tmp_path, brief_tree(tmp_path, policy={"tokenizer": str(tmp_path / "none")}))
    assert main(["train", file]) == 2
    assert "none" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_every_optimizer_step_of_ppo_ptx_has_demonstrations_of_its_own(tmp_path: Path) -> None:
    words = ("good", "bad", "red", "blue", "one", "two")
    texts = [f" {a} {b} {c}" for a in words for b in words for c in words][:128]
    sft = write_rows(tmp_path / "sft.jsonl", [{"prompt": "red one", "completion": text} for text in texts])
    data = {"sft": {"path": str(sft)}}
    run = online(ppo_tree(tmp_path, data=data, algorithm={"ptx_coef": 0.5}))
    assert run.ptx is not None
    batches = [run.ptx(step, update) for step in (1, 2) for update in range(4)]  # 2 epochs of 2 minibatches
    rows = [tuple(row.tolist()) for batch in batches for row in batch.completion_ids]
    assert [len(batch) for batch in batches] == [8] * 8
    assert len(set(rows)) == 64
    assert torch.equal(batches[3].completion_ids, run.ptx(1, 3).completion_ids)


def test_the_default_folder_is_named_after_what_trains(tmp_path: Path) -> None:
    online_run = load_train("configs/ppo.yaml", ["algorithm.preset=grpo", "sampling.completions_per_prompt=4"])
    assert (online_run.run.out_dir, online_run.run.name) == ("runs/grpo", "grpo")
    for name in ("sft", "ppo", "dpo"):
        assert load_train(f"configs/{name}.yaml").run.out_dir == f"runs/{name}"
    assert load_train("configs/dpo.yaml", ["algorithm.preset=kto"]).run.out_dir == "runs/kto"
    assert load_train("configs/ppo.yaml", ["algorithm.preset=grpo", "run.out_dir=here"]).run.out_dir == "here"
    assert load_train("configs/lab/ppo.yaml").run.out_dir == "runs/quickstart/ppo"
    assert load_reward_model("configs/reward_model.yaml").run.out_dir == "runs/reward_model"
