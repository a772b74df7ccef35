"""An environment of one turn is a reward function: the same weights and metrics, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
import word_games
from quick import quick

CLOCK = ("time", "second", "env/", "eval/turns", "duplicates", "memory", "tokens_per")


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [
        {name: value for name, value in json.loads(line).items() if not any(part in name for part in CLOCK)}
        for line in lines
    ]


PRESETS = ("ppo", "grpo", "rloo", "reinforce_pp", "gspo", "online_dpo")


@pytest.mark.parametrize("preset", quick(PRESETS, ["ppo", "grpo", "online_dpo"]))
def test_same_bits_as_a_reward_function(preset: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"algorithm": {"preset": preset}, "schedule": {"steps": 3}, "checkpoint": {"every": 0}}
    if preset != "ppo":  # which has one completion of a prompt
        changes["batch"] = {"prompts_per_step": 4}
    if preset == "online_dpo":
        changes["batch"] |= {"epochs": 1, "minibatches": 1}
    function = runs.ppo_tree(tmp_path, **changes)
    environment = {k: v for k, v in function.items() if k != "reward"}
    environment["environment"] = {"target": f"{word_games.__file__}:CountGood", "max_turns": 1}
    first = runs.trained(function, f"run.out_dir={tmp_path / 'function'}")
    second = runs.trained(environment, f"run.out_dir={tmp_path / 'environment'}")
    assert runs.largest_difference(runs.weights(first.models.policy), runs.weights(second.models.policy)) == 0.0
    if first.models.critic is not None:
        assert second.models.critic is not None
        assert runs.largest_difference(runs.weights(first.models.critic), runs.weights(second.models.critic)) == 0.0
    assert metrics_of(tmp_path / "function") == metrics_of(tmp_path / "environment")
    assert not torch.equal(next(first.models.policy.parameters()), torch.zeros(()))
