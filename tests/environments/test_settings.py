"""The section environment: its sources, and the settings that it cannot be combined with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import runs
import word_games
import word_rewards
from test_episodes import tree

import rlhf
from rlhf.config.load import train_config
from rlhf.errors import ConfigError
from rlhf.guard.lint import lint
from rlhf.user_code import target_of


def config(folder: Path, **changes: Any) -> Any:
    return train_config(runs.merge(tree(folder), changes))


def test_the_environment_gives_the_reward(tmp_path: Path) -> None:
    made = config(tmp_path)
    assert made.reward.source.type == "environment"
    assert made.longest_completion == 18


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward": {"source": {"type": "function", "target": "a:b"}}}, "the environment gives the rewards"),
        ({"algorithm": {"preset": "remax"}, "batch": {"epochs": 1, "minibatches": 1}}, "another instance of the task"),
        ({"overlap": {"ahead": True}}, "overlap.ahead=false"),
        ({"overlap": {"reward_parts": 2}}, "overlap.reward_parts=1"),
        ({"reward": {"shaping": {"overlong_buffer": 2}}}, "overlong_buffer"),
        ({"reward": {"shaping": {"clip": 5.0}}}, r"reward\.shaping\.clip: .*clip the rewards in step"),
        ({"reward": {"shaping": {"normalize": "standardize"}}}, r"set reward\.shaping\.normalize=scale"),
        (
            {
                "algorithm": {"preset": "grpo"},
                "sampling": {"completions_per_prompt": 2},
                "environment": {"truncation": "bootstrap"},
            },
            "without a critic",
        ),
        (
            {
                "algorithm": {"preset": "online_dpo"},
                "sampling": {"completions_per_prompt": 2},
                "environment": {"truncation": "drop"},
            },
            r"environment\.truncation=drop with a loss of pairs: .*set environment\.truncation=zero",
        ),
        ({"environment": {"max_tokens": 3}}, "less than one action"),
        ({"environment": {"target": "no_such_module:Game"}}, "no_such_module"),
        ({"environment": {"target": f"{word_games.__file__}:Colour"}}, "has no 'Colour'"),
        ({"environment": {"kwargs": {"turn": 3}}}, "did you mean turns"),
        ({"environment": {"target": f"{word_rewards.__file__}:count_good"}}, "count_good"),
        ({"environment": {"max_turn": 3}}, "max_turns"),
    ],
)
def test_what_is_refused_and_how(tmp_path: Path, changes: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        runs.online(runs.merge(tree(tmp_path), changes))


def test_drop_stays_a_setting_of_the_environment(tmp_path: Path) -> None:
    """A run that starts from the stored settings and sets another truncation learns from every episode."""
    dropping = config(tmp_path, environment={"truncation": "drop"})
    stored = dropping.model_dump(mode="json")
    assert stored["algorithm"]["mask_truncated"] is False
    assert [made.algorithm.leaves_out_cut for made in (dropping, train_config(stored))] == [True, True]
    assert not train_config(runs.merge(stored, {"environment": {"truncation": "zero"}})).algorithm.leaves_out_cut


WHOLE_RETURNS = {"algorithm": {"preset": "grpo"}, "sampling": {"completions_per_prompt": 2}}


@pytest.mark.parametrize("changes", [{"environment": {"max_turns": 1}}, WHOLE_RETURNS])
def test_one_turn_and_whole_returns_may_be_clipped_and_standardized(tmp_path: Path, changes: Mapping[str, Any]) -> None:
    made = config(tmp_path, **changes, reward={"shaping": {"clip": 5.0, "normalize": "standardize"}})
    assert made.reward.shaping.clip == 5.0


def test_a_source_without_an_environment_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"set environment\.target"):
        train_config(runs.ppo_tree(tmp_path, reward={"source": {"type": "environment"}}))
    with pytest.raises(ConfigError, match="turn_lambda"):
        train_config(runs.ppo_tree(tmp_path, algorithm={"advantage": {"type": "gae", "turn_lambda": 0.9}}))


def test_lint_of_budgets_and_deadlines(tmp_path: Path) -> None:
    def broken(**changes: Any) -> dict[str, str]:
        findings = {finding.rule.name: finding for finding in lint(config(tmp_path, **changes))}
        return {name: finding.setting for name, finding in findings.items() if name.startswith("agent-")}

    short = {"agent-short-actions": "sampling.max_new_tokens is 6"}
    assert broken() == short
    assert broken(environment={"step_timeout_s": None}) == {
        **short, "agent-no-deadline": "environment.step_timeout_s is null",
    }  # fmt: skip
    roomy = {"max_new_tokens": 32}
    assert broken(sampling=roomy) == {}
    assert broken(sampling=roomy, environment={"max_tokens": 60}) == {
        "agent-token-budget": "environment.max_tokens is 60"
    }


class Echo:
    """An environment of a notebook: it has no file."""

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "red", float("good" in action), False, False, {}


def test_from_python(tmp_path: Path) -> None:
    model = runs.make_model(tmp_path / "model")
    result = rlhf.train(
        str(model),
        "ppo",
        environment=Echo,
        prompts=runs.colored_prompts(),
        folder=tmp_path / "run",
        steps=2,
        max_new_tokens=4,
        quiet=True,
        batch={"prompts_per_step": 8},
        **{"run.device": "cpu", "eval.every": 0},
    )
    assert result.complete
    assert result.metrics["env/turns"].iloc[-1] == 8
    assert result.metrics["env/stop/max_turns"].iloc[-1] + result.metrics["env/stop/context"].iloc[-1] == 1
    page = result.report.read_text()
    assert page.count("by-environment") > 8
    assert "turn 2, reward" in page
    samples = [json.loads(line) for line in (result.folder / "samples.jsonl").read_text().splitlines()]
    assert [part["by"] for part in samples[0]["turns"]][:3] == ["policy", "environment", "policy"]
    assert samples[0]["stop"] in ("max_turns", "context")
    with pytest.raises(ConfigError, match=r"put the class into a \.py file"):
        rlhf.train(
            str(model),
            "ppo",
            environment={"target": target_of(lambda: Echo()), "workers": 1},
            prompts=["red"],
            max_new_tokens=4,
            folder=tmp_path / "workers",
            quiet=True,
            batch={"prompts_per_step": 8},
        )
