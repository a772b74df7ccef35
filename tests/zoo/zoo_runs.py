"""One-step runs of a family through the doors of the program: data, configuration, reward."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from families import Family
from runs import quiet, write_rows
from torch import nn

from rlhf.config.files import merge
from rlhf.config.load import train_config, validate
from rlhf.config.sections import RewardModelConfig
from rlhf.factory.reward_card import finish_reward_model
from rlhf.factory.reward_model import build_reward_model
from rlhf.factory.run import TrainingRun, build_run
from rlhf.training.offline import train_offline

QUESTIONS = ("red one", "blue", "good two red", "one")
ANSWERS = (("good", "bad red"), ("blue two", "bad"), ("good good", "one"), ("two", "bad bad one"))


def count_letters(
    *, prompts: Sequence[str], completions: Sequence[str], references: Sequence[Mapping[str, Any]]
) -> list[float]:
    """Score completions by their characters, so that random ones hardly tie."""
    return [(sum(map(ord, completion)) % 97) / 97 for completion in completions]


@dataclass(frozen=True)
class Trained:
    """The results of a run: its module, its metrics, the folder of its model."""

    module: nn.Module
    before: dict[str, torch.Tensor]
    metrics: list[dict[str, float]]
    folder: Path
    notes: str


def train_one_step(family: Family, model: Path, out: Path, algorithm: str, **changes: Any) -> Trained:
    """Run one optimizer step of `algorithm` (sft, ppo, grpo or dpo) and export."""
    built = build_run(train_config(merge(_tree(family, model, out, algorithm), changes)), quiet())
    module = _policy(built)
    before = _copy(module)
    assert built.train()
    built.session.recorder.close()
    return Trained(module, before, *_left(out))


def train_reward_model(family: Family, model: Path, out: Path) -> Trained:
    """Run one optimizer step of a reward model, calibrate and export."""
    tree = {
        "run": {"out_dir": str(out), "device": "cpu"},
        "data": {"preferences": {"path": str(_write_pairs(family, out))}},
        "model": {"model": str(model), "lr": 1e-3},
        "batch": {"prompts_per_step": 4, "micro_batch_size": 4},
        "schedule": {"steps": 1},
        "checkpoint": {"every": 1000},
    }
    built = build_reward_model(validate(RewardModelConfig, tree), quiet())
    before = _copy(built.model.classifier)
    train_offline(built.run)
    finish_reward_model(built)
    built.run.session.recorder.close()
    return Trained(built.model.classifier, before, *_left(out))


def question(family: Family, text: str) -> str | list[dict[str, str]]:
    """Ask as people ask the model: in a turn if it has a template, otherwise as plain text."""
    return [{"role": "user", "content": text}] if family.template is not None else text


def answer(family: Family, text: str) -> str | list[dict[str, str]]:
    """Answer in the form of `question`."""
    return [{"role": "assistant", "content": text}] if family.template is not None else " " + text


def _tree(family: Family, model: Path, out: Path, algorithm: str) -> dict[str, Any]:
    tree: dict[str, Any] = {
        "run": {"out_dir": str(out), "device": "cpu", "cache_dir": str(out / "cache")},
        "policy": {"model": str(model), "lr": 1e-3},
        "algorithm": {"preset": algorithm},
        "batch": {"prompts_per_step": 4, "micro_batch_size": 4},
        "schedule": {"steps": 1},
        "checkpoint": {"every": 1000},
    }
    if algorithm == "sft":
        return merge(tree, {"data": {"sft": {"path": str(_write_demonstrations(family, out))}}})
    if algorithm == "dpo":
        return merge(tree, {"data": {"preferences": {"path": str(_write_pairs(family, out))}}})
    online = {
        "data": {"prompts": {"path": str(_write_prompts(family, out))}},
        "reward": {"source": {"type": "function", "target": f"{__file__}:count_letters"}},
        "sampling": {"max_new_tokens": 6, "completions_per_prompt": 2},
        "batch": {"epochs": 1, "minibatches": 1},
    }
    critic = {"critic": {"lr": 1e-3, "init": "policy"}} if algorithm == "ppo" else {}
    return merge(merge(tree, online), critic)


def _write_prompts(family: Family, out: Path) -> Path:
    return _write(out, "prompts", [{"prompt": question(family, text)} for text in QUESTIONS])


def _write_pairs(family: Family, out: Path) -> Path:
    rows = [
        {"prompt": question(family, text), "chosen": answer(family, good), "rejected": answer(family, bad)}
        for text, (good, bad) in zip(QUESTIONS, ANSWERS, strict=True)
    ]
    return _write(out, "pairs", rows)


def _write_demonstrations(family: Family, out: Path) -> Path:
    rows: list[dict[str, object]] = []
    for text, (good, _) in zip(QUESTIONS, ANSWERS, strict=True):
        asked, answered = question(family, text), answer(family, good)
        if isinstance(asked, list) and isinstance(answered, list):
            rows.append({"messages": [*asked, *answered]})
        else:
            rows.append({"prompt": asked, "completion": answered})
    return _write(out, "demonstrations", rows)


def _write(out: Path, name: str, rows: Sequence[Mapping[str, object]]) -> Path:
    out.parent.mkdir(parents=True, exist_ok=True)
    return write_rows(out.parent / f"{out.name}-{name}.jsonl", rows)


def _policy(built: TrainingRun) -> nn.Module:
    run = built.run
    return run.models.policy if hasattr(run, "models") else run.trained.module


def _copy(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def _left(out: Path) -> tuple[list[dict[str, float]], Path, str]:
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return metrics, out / "model", (out / "notes.jsonl").read_text()
