"""A reward model on mixed and streamed pairs: trained, calibrated, and judged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from runs import make_model, pairs_file, quiet

from rlhf.config.load import validate
from rlhf.config.sections import RewardModelConfig
from rlhf.factory import reward_card as factory
from rlhf.factory.reward_card import compute_report_card, finish_reward_model
from rlhf.factory.reward_model import build_reward_model
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


@pytest.mark.parametrize("trusts", [False, True])
def test_a_trained_model_is_read_back_with_its_own_code_where_the_run_trusts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trusts: bool
) -> None:
    """Its export has that code too: without it the report card fails once everything is trained."""
    asked: list[bool] = []
    load = factory.load_reward_heads

    def note(path: str, tokenizer: Any, **settings: Any) -> Any:
        asked.append(settings.get("trust_remote_code", False))
        return load(path, tokenizer, **settings)

    tree = {
        "run": {"out_dir": str(tmp_path / "run"), "device": "cpu"},
        "data": {name: {"path": str(pairs_file(tmp_path, count=20))} for name in ("preferences", "eval_preferences")},
        "model": {"model": str(make_model(tmp_path / "model")), "lr": 1e-2, "trust_remote_code": trusts},
        "batch": {"prompts_per_step": 8, "micro_batch_size": 4},
        "schedule": {"steps": 1, "epochs": None},
    }
    built = build_reward_model(validate(RewardModelConfig, tree), quiet())
    train_offline(built.run)
    monkeypatch.setattr(factory, "load_reward_heads", note)
    finish_reward_model(built)
    built.run.session.recorder.close()
    compute_report_card(built.config, str(tmp_path / "run"))
    assert asked == [trusts] * len(asked)
    assert asked
