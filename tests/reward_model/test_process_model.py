"""A process reward model from step labels: its rows, its loss by hand, its export, and whether it learns."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from rm_cases import made_model
from runs import make_model, ppo_tree, quiet, trained, write_rows
from tiny_models import tokenizer
from transformers import AutoModelForTokenClassification, AutoTokenizer

from reward_model.steps import StepLoss
from rlhf.api.training import run_reward_model
from rlhf.config.data import PreferencesConfig
from rlhf.config.load import reward_model_config, unread_warnings, validate
from rlhf.data.rows import BadRow, DataRow, is_in_part
from rlhf.data.steps import StepEncoder, check_kinds, load_steps, read_steps
from rlhf.errors import ConfigError, DataError, ModelError, UserError
from rlhf.factory.reward_card import compute_report_card
from rlhf.models.logprobs import Sequences
from rlhf.models.scalar_head import load_scalar_head
from rlhf.models.step_model import load_step_model, save_step_model
from rlhf.rewards.process import ModelProcess

CPU = torch.device("cpu")


def solutions(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """A step is wrong if it has the word bad; a later step does not mend it."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        steps = [" ".join(draw.choice(["good", "one", "two"]) for _ in range(3)) for _ in range(draw.randint(1, 4))]
        first_error = draw.randint(0, 2 * len(steps))
        if first_error < len(steps):
            steps[first_error] = "one bad two"
        labels = [number < first_error for number in range(len(steps))]
        rows.append({"prompt": draw.choice(["red one", "red two"]), "completions": steps, "labels": labels})
    return rows


def test_a_step_may_spell_the_pad_token_that_the_model_has_no_embedding_for() -> None:
    padded = tokenizer()
    size = len(padded)
    padded.add_special_tokens({"pad_token": "<papad>"})
    encoded = StepEncoder(padded, " t9").encode("one <papad>", ["two <papad>", "<papad>"])
    assert max([*encoded.prompt, *encoded.completion]) < size == padded.pad_token_id


def test_rows_are_read_and_refused() -> None:
    def read(**values: Any) -> Any:
        return read_steps(
            DataRow({"prompt": "p", "completions": ["a ", "b"], "labels": [True, 0.25], **values}, "f", 1), " t9"
        )

    assert (read().steps, read().labels) == (("a", "b"), (1.0, 0.25))
    for values, reason in [
        ({"prompt": ""}, "text in the column prompt"),
        ({"prompt": [{"role": "user", "content": "p"}]}, "text in the column prompt"),
        ({"completions": "a b"}, "list of steps"),
        ({"completions": ["a", " "]}, "list of steps"),
        ({"labels": [True]}, "one label for each step"),
        ({"labels": [True, 2]}, "neither true, false nor from 0 to 1"),
        ({"labels": [True, 10**400]}, "neither true, false nor from 0 to 1"),
        ({"labels": [True, "yes"]}, "neither true, false nor from 0 to 1"),
    ]:
        with pytest.raises(BadRow, match=reason):
            read(**values)


def test_labels_stand_at_the_last_token_behind_each_step(tmp_path: Path) -> None:
    rows = [
        {"prompt": "t7", "completions": ["t3 t4", "t5"], "labels": [True, False]},
        {"prompt": "t7 t8", "completions": ["t6"], "labels": [0.5]},
    ]
    config = PreferencesConfig(path=str(write_rows(tmp_path / "rows.jsonl", rows)))
    batch = load_steps(config, tokenizer(), separator=" t9 t10").collate([0, 1])
    assert batch.completion_ids[0].tolist() == [3, 4, 9, 10, 5, 9, 10]
    assert batch.loss_mask.long().tolist() == [[0, 0, 0, 1, 0, 0, 1], [0, 0, 1, 0, 0, 0, 0]]
    assert batch.labels.tolist() == [[0, 0, 0, 1, 0, 0, 0], [0, 0, 0.5, 0, 0, 0, 0]]
    cut = config.model_copy(update={"max_tokens": 7, "too_long": "truncate"})
    assert load_steps(cut, tokenizer(), separator=" t9 t10").texts[0].steps == ("t3 t4",)
    left_out = load_steps(config.model_copy(update={"max_tokens": 6}), tokenizer(), separator=" t9 t10")
    assert (len(left_out), left_out.skips.too_long) == (1, 1)
    with pytest.raises(DataError, match="all steps have the same label"):
        check_kinds(left_out)
    with pytest.raises(DataError, match="has no token"):
        StepEncoder(tokenizer(), " ")


def test_a_row_whose_step_has_the_separator_is_skipped_and_told(tmp_path: Path) -> None:
    """A policy's text is split there, so that the model would be asked about other steps than it was trained on."""
    rows = [
        {"prompt": "t7", "completions": ["t3", "t4 t9 t5"], "labels": [True, False]},
        {"prompt": "t7 t9", "completions": [" t9 t3", "t5 "], "labels": [True, False]},
        {"prompt": "t7", "completions": ["t3", "t5"], "labels": [True, False]},
    ]
    config = PreferencesConfig(path=str(write_rows(tmp_path / "rows.jsonl", rows)))
    loaded = load_steps(config, tokenizer(), separator=" t9")
    assert len(loaded) == 2  # the separator before the first word of a step is cut off with its blank
    assert "2 rows used, 1 skipped: 1 with process.separator (' t9') within a step" in loaded.skips.summary()
    only = config.model_copy(update={"limit": None, "path": str(write_rows(tmp_path / "bad.jsonl", rows[:1]))})
    with pytest.raises(DataError, match=r"no usable rows; 1 skipped: 1 with process\.separator"):
        load_steps(only, tokenizer(), separator=" t9")


def test_the_loss_by_hand_and_the_exported_model_says_the_same(tmp_path: Path) -> None:
    model = made_model(tmp_path / "start")
    rows = [{"prompt": "t7", "completions": ["t3 t4", "t5"], "labels": [True, 0.25]}]
    data = load_steps(
        PreferencesConfig(path=str(write_rows(tmp_path / "rows.jsonl", rows))), tokenizer(), separator="t9"
    )
    batch, loss = data.collate([0]), StepLoss(model, dtype="float64")
    sequences = Sequences.join(batch.prompt_ids, batch.prompt_mask, batch.completion_ids, batch.completion_mask)
    scores = model(sequences)[0, -batch.completion_ids.shape[1] :][batch.loss_mask[0]].tolist()
    right = [1 / (1 + math.exp(-score)) for score in scores]
    expected = -math.log(right[0]) - 0.25 * math.log(right[1]) - 0.75 * math.log(1 - right[1])
    terms, metrics = loss.terms(batch)
    assert loss.denominators(batch) == {"rm": 2.0}
    assert terms["rm"].item() == pytest.approx(expected, rel=1e-5)
    assert metrics["loss/process"].value == pytest.approx(expected / 2, rel=1e-5)
    assert metrics["process/accuracy"].value == ((right[0] > 0.5) + (right[1] <= 0.5)) / 2
    assert metrics["process/errors_found"].value == float(right[1] <= 0.5)

    save_step_model(model, tokenizer(), tmp_path / "exported", separator="t9")
    exported = AutoModelForTokenClassification.from_pretrained(tmp_path / "exported")
    assert exported.config.id2label == {0: "wrong", 1: "right"}
    grade = load_step_model(validate(ModelProcess, {"type": "model", "path": str(tmp_path / "exported")}), device=CPU)
    assert grade("t7", ["t3 t4", "t5"], {}) == pytest.approx(right, abs=1e-6)  # its separator is in its config.json


def tree(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "run": {"out_dir": str(folder / "prm"), "device": "cpu"},
        "data": {
            "preferences": {"path": str(write_rows(folder / "steps.jsonl", solutions(200)))},
            "eval_preferences": {"path": str(write_rows(folder / "held_out.jsonl", solutions(40, seed=1)))},
        },
        "model": {"model": str(make_model(folder / "model")), "lr": 3e-3},
        "process": {"separator": " red"},
        "batch": {"prompts_per_step": 20, "micro_batch_size": 20},
        "schedule": {"epochs": 4},
        "eval": {"every": 20},
        "checkpoint": {"every": 10},
        **changes,
    }


def test_settings_without_effect_are_named(tmp_path: Path) -> None:
    config = reward_model_config(tree(tmp_path, calibration={"limit": 8}))
    assert [text.split(" is set", 1)[0] for text in unread_warnings(config)] == ["calibration"]
    changed = tree(tmp_path)
    changed["model"]["export_dtype"] = "bfloat16"
    assert [text.split(" is set", 1)[0] for text in unread_warnings(reward_model_config(changed))] == [
        "model.export_dtype"
    ]
    assert unread_warnings(reward_model_config(tree(tmp_path))) == []


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "prm" / "metrics.jsonl").read_text().splitlines()]


def test_it_learns_which_steps_are_wrong_and_reward_process_reads_it(tmp_path: Path) -> None:
    config = reward_model_config(tree(tmp_path))
    assert run_reward_model(config, quiet())
    before, after = lines(tmp_path)[0], lines(tmp_path)[-1]
    assert before["eval/process_accuracy"] < 0.8
    assert after["eval/process_accuracy"] > 0.95
    assert after["eval/process_errors_found"] > 0.9
    assert after["eval/process_loss"] < 0.2 < before["eval/process_loss"]
    run = str(tmp_path / "prm")
    grade = load_step_model(validate(ModelProcess, {"type": "model", "path": run}), device=CPU)
    right, wrong, after_wrong = grade("red one", ["good one two", "one bad two", "good two one"], {})
    assert right > 0.8
    assert max(wrong, after_wrong) < 0.2
    with pytest.raises(ConfigError, match="a process reward model has no report card"):
        compute_report_card(config, run)

    (tmp_path / "ppo").mkdir()
    process = {"type": "model", "path": run, "separator": " red"}
    ppo = trained(ppo_tree(tmp_path / "ppo", reward={"process": process}), "schedule.steps=1", "eval.every=0")
    assert ppo.session.recorder.folder.read_metrics()[-1]["process/reward"] > 0


def test_the_model_exported_from_a_calibrated_reward_model_has_the_loss_that_was_measured(tmp_path: Path) -> None:
    settings = tree(tmp_path, schedule={"steps": 2}, eval={"every": 1})
    text = AutoTokenizer.from_pretrained(tmp_path / "model")
    model = load_scalar_head(str(tmp_path / "model"), text, new_head="normal")
    model.calibrate(0.5, 0.05)
    model.save(text, tmp_path / "rm")
    settings["model"]["model"] = str(tmp_path / "rm")
    assert run_reward_model(reward_model_config(settings), quiet())

    grade = load_step_model(validate(ModelProcess, {"type": "model", "path": str(tmp_path / "prm")}), device=CPU)
    losses = [
        -math.log(right if label else 1 - right)
        for row in solutions(40, seed=1)
        for right, label in zip(grade(row["prompt"], row["completions"], {}), row["labels"], strict=True)
    ]
    assert lines(tmp_path)[-1]["eval/process_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-4)


def test_a_stopped_run_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    whole = tree(tmp_path / "whole", schedule={"steps": 4, "epochs": None}, checkpoint={"every": 2}, eval={"every": 0})
    assert run_reward_model(reward_model_config(whole), quiet())
    parts = tree(tmp_path / "parts", schedule={"steps": 4, "epochs": None}, checkpoint={"every": 2}, eval={"every": 0})

    def die(step: int, metrics: Any) -> None:
        if step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_reward_model(reward_model_config(parts), quiet(), on_step=die)
    assert run_reward_model(reward_model_config(parts), quiet())
    a, b = ((tmp_path / name / "prm" / "model" / "model.safetensors").read_bytes() for name in ("whole", "parts"))
    assert a == b


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ensemble": 4}, "ensemble is for reward models of pairs"),
        ({"loss": {"centering": 0.01}}, "loss is for reward models of pairs"),
        ({"checkpoint": {"best": {}}}, "checkpoint.best is for reward models of pairs"),
    ],
)
def test_what_is_for_pairs_alone_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        reward_model_config(tree(tmp_path, **changes))


def test_a_model_without_a_separator_of_its_own_takes_a_line_break(tmp_path: Path) -> None:
    save_step_model(made_model(tmp_path / "start"), tokenizer(), tmp_path / "exported", separator=" ")
    with pytest.raises(ModelError, match="model_separator has no token"):
        load_step_model(validate(ModelProcess, {"type": "model", "path": str(tmp_path / "exported")}), device=CPU)


def test_half_a_surrogate_pair_is_refused_in_a_prompt_and_in_a_step() -> None:
    row = {"prompt": "p", "completions": ["a", "b"], "labels": [True, False]}
    for change in ({"prompt": "p \ud83d"}, {"completions": ["a", "\ud83d"]}):
        with pytest.raises(BadRow, match="not valid Unicode"):
            read_steps(DataRow({**row, **change}, "f", 1), " t9")


def test_a_small_file_without_held_out_rows_says_what_to_set(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": "t7", "completions": ["t3"], "labels": [True]}])
    parts = [(0.0, 0.1), (0.1, 1.0)]
    (without,) = [part for part in parts if not is_in_part("t7", part)]
    with pytest.raises(DataError, match=r"no usable row is in part .* of data\.holdout: the file is small"):
        load_steps(PreferencesConfig(path=str(path), part=without), tokenizer(), separator=" t9")
