"""PPO over three turns learns the actions that an environment pays for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import runs
from test_episodes import tree


@pytest.mark.parametrize("preset", ["ppo", pytest.param("grpo", marks=pytest.mark.slow)])
def test_the_return_rises(tmp_path: Path, preset: str) -> None:
    """The words that are paid for are told in turns 2 and 3, and `bad` ends an episode early."""
    settings = tree(tmp_path)
    settings["algorithm"] = {"preset": preset}
    settings["batch"] = {"prompts_per_step": 32, "epochs": 2, "minibatches": 1, "micro_batch_size": 64}
    if preset == "grpo":
        settings["batch"]["prompts_per_step"] = 8
        settings["sampling"] = {"max_new_tokens": 6, "completions_per_prompt": 4}
    settings["schedule"] = {"steps": 16}
    settings["checkpoint"] = {"every": 0}
    runs.trained(settings, "policy.lr=0.02")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    returns = [line["env/return"] for line in lines if "env/return" in line]
    first, last = sum(returns[:3]) / 3, sum(returns[-3:]) / 3
    assert last > first + 1.0, returns
    assert lines[-1]["env/turns"] > 2.5  # it has learned not to end the episode
