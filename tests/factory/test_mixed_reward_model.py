"""A reward model on mixed and streamed pairs: trained, calibrated, and judged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from runs import make_model, pairs_file, quiet

from rlhf.config.load import validate
from rlhf.config.sections import RewardModelConfig
from rlhf.factory.reward_model import build_reward_model, compute_report_card, finish_reward_model
from rlhf.training.offline import train_offline


def test_a_reward_model_learns_from_a_stream_and_its_card_is_computed_again(tmp_path: Path) -> None:
    sources = {name: {"path": str(pairs_file(tmp_path, count=30, seed=seed))} for seed, name in enumerate("ab")}
    tree = {
        "run": {"out_dir": str(tmp_path / "run"), "device": "cpu"},
        "data": {
            "preferences": {"sources": sources, "stream": True, "shuffle_buffer": 8},
            "eval_preferences": {"path": str(pairs_file(tmp_path, count=20, seed=5))},
        },
        "model": {"model": str(make_model(tmp_path / "model")), "lr": 1e-2},
        "batch": {"prompts_per_step": 8, "micro_batch_size": 4},
        "schedule": {"steps": 4, "epochs": None},
        "eval": {"every": 0},
    }
    config = validate(RewardModelConfig, tree)
    built = build_reward_model(config, quiet())
    train_offline(built.run)
    card = finish_reward_model(built)
    built.run.session.recorder.close()
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    assert (last["source/rows/a"], last["source/rows/b"]) == (16.0, 16.0)
    assert (last["source/loss/a"] + last["source/loss/b"]) / 2 == pytest.approx(last["loss/rm"], rel=1e-5)
    assert compute_report_card(config, str(tmp_path / "run"))["baselines"] == card["baselines"]
