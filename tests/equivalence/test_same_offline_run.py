"""Preference runs that must be the same run: with any micro-batch, and interrupted or not."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from quick import quick
from runs import labelled_file, largest_difference, make_model, offline_tree, trained_offline, weights

from rlhf.models.backbone import load_causal_lm

PRESETS = ("dpo", "cdpo", "robust_dpo", "ipo", "ipo_per_token", "hinge", "slic", "simpo", "orpo", "kto")


UNJUDGED: dict[str, Any] = {"data": {"eval_prompts": None}, "eval": {"source": None}}
UNEVALUATED: dict[str, Any] = {
    "data": {"eval_prompts": None, "eval_preferences": None},
    "eval": {"source": None, "every": 0},
    "checkpoint": {"every": 0},
}
# Passes of unequal sizes. One row at a time is the same code, of pairs and of single completions.
SIZES = {preset: (5, 1) if preset in ("dpo", "kto") else (5,) for preset in PRESETS}


def after_two_steps(folder: Path, preset: str, micro_batch_size: int) -> dict[str, torch.Tensor]:
    tree = offline_tree(
        folder,
        preset,
        policy={"dtype": "float64", "optimizer": "sgd", "lr": 0.3},
        batch={"prompts_per_step": 13, "micro_batch_size": micro_batch_size},
        schedule={"steps": 2},
        **UNEVALUATED,
        run={"out_dir": str(folder / f"run-{micro_batch_size}")},
    )
    return weights(trained_offline(tree).trained.module)


@pytest.mark.parametrize("preset", quick(PRESETS, ["dpo", "ipo_per_token", "orpo", "kto"]))
def test_the_micro_batch_size_does_not_change_a_run(tmp_path: Path, preset: str) -> None:
    model = make_model(tmp_path / "model", dtype=torch.float64)
    whole = after_two_steps(tmp_path, preset, 64)
    assert largest_difference(weights(load_causal_lm(str(model))), whole) > 1e-4
    for size in SIZES[preset]:
        assert largest_difference(whole, after_two_steps(tmp_path, preset, size)) < 1e-10


RESUMABLE: dict[str, tuple[str, dict[str, Any]]] = {
    "dpo": ("dpo", {}),
    "dpo without a judge": ("dpo", UNJUDGED),
    "dpo, averaged, scheduled": (
        "dpo",
        {"policy": {"ema_decay": 0.5}, "schedule": {"warmup_steps": 2, "decay": "cosine"}},
    ),
    "dpo with adapters": ("dpo", {"policy": {"lora": {"r": 2}}, **UNJUDGED}),
    "kto": ("kto", {}),
    "kto with adapters": ("kto", {"policy": {"lora": {"r": 2}}, **UNJUDGED}),
    "simpo": ("simpo", UNJUDGED),
}
TAKEN_UP = ("dpo without a judge", "dpo, averaged, scheduled", "dpo with adapters", "kto")  # the others take up no more


@pytest.mark.parametrize("name", quick(RESUMABLE, TAKEN_UP))
def test_a_resumed_run_is_the_uninterrupted_run_bitwise(tmp_path: Path, name: str) -> None:
    preset, changes = RESUMABLE[name]

    def tree(folder: str) -> dict[str, Any]:
        return offline_tree(tmp_path, preset, **{**changes, "run": {"out_dir": str(tmp_path / folder)}})

    whole = trained_offline(tree("a"))
    shutil.copytree(tmp_path / "a", tmp_path / "b")  # as it was when killed after step 3, its checkpoint of step 2
    shutil.rmtree(tmp_path / "b" / "checkpoints" / "step-000004")
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)  # the reference is asked again, and must be the first one
    resumed = trained_offline(tree("b"))
    assert resumed.session.resumed
    assert largest_difference(weights(whole.trained.module), weights(resumed.trained.module)) == 0.0
    for file in ("metrics.jsonl", "samples.jsonl"):
        a, b = (tmp_path / folder / file for folder in "ab")
        assert a.exists() == b.exists()
        if a.exists():
            assert a.read_bytes() == b.read_bytes()


def test_a_resumed_run_on_labelled_completions_is_the_uninterrupted_run_bitwise(tmp_path: Path) -> None:
    path = str(labelled_file(tmp_path, count=64))

    def tree(folder: str) -> dict[str, Any]:
        data = {"preferences": {"path": path}, "eval_preferences": {"path": path}}
        return offline_tree(tmp_path, "kto", data=data, run={"out_dir": str(tmp_path / folder)})

    whole = trained_offline(tree("a"))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    shutil.rmtree(tmp_path / "b" / "checkpoints" / "step-000004")
    resumed = trained_offline(tree("b"))
    assert largest_difference(weights(whole.trained.module), weights(resumed.trained.module)) == 0.0
    a, b = ((tmp_path / folder / "metrics.jsonl").read_bytes() for folder in "ab")
    assert a == b
