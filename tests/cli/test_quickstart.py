"""The whole pipeline: in small that its stages fit together, in full (slow) that it has the results of the README."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from rlhf.api import lab
from rlhf.commands import quickstart
from rlhf.config.files import merge
from rlhf.config.load import read_yaml
from rlhf.errors import ConfigError

SMALL: dict[str, dict[str, Any]] = {
    "sft": {
        "schedule": {"steps": 3, "epochs": None, "warmup_steps": 1},
        "data": {"sft": {"limit": 96}, "eval_sft": {"limit": 16}, "eval_prompts": {"limit": 4}},
    },
    "reward_model": {"schedule": {"steps": 2, "epochs": None, "warmup_steps": 1}},
    "ppo": {
        "data": {"eval_prompts": {"limit": 8}},
        "batch": {"prompts_per_step": 8, "micro_batch_size": 8},
        "schedule": {"steps": 2, "warmup_steps": 1},
        "sampling": {"max_new_tokens": 8},
        "eval": {"every": 0},
    },
}


def run(out: Path, *overrides: str, seed: int = 0) -> str:
    stream = io.StringIO()
    quickstart.run_quickstart(
        str(out), seed=seed, overrides=overrides, console=Console(file=stream, width=120, force_terminal=False)
    )
    return stream.getvalue()


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The lab's own configurations, cut down, and few pairs."""
    whole = quickstart.lab_config

    def lab_config(name: str) -> Path:
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(merge(read_yaml(whole(name)), SMALL[name])), encoding="utf-8")
        return path

    for module in (lab, quickstart):
        monkeypatch.setattr(module, "lab_config", lab_config)
    monkeypatch.setattr(lab, "PAIRS", {"train": 48, "eval": 48})
    return tmp_path / "out"


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["algorithm.preset=grpo"], "ends with PPO, not grpo"),
        (["run.out_dir=elsewhere"], "leave run.out_dir"),
        (
            ["algorithm.kl.coef=0", "algorithm.kl.controller.type=fixed", "reference.measure=false"],
            "leave run.out_dir and reference.measure out",
        ),
    ],
)
def test_a_last_stage_that_cannot_be_summarized_is_refused_before_the_first(
    small: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run(small, *overrides)
    assert not small.exists()


@pytest.mark.beside
def test_the_stages_fit_together_overrides_reach_ppo_and_a_second_run_does_nothing_again(small: Path) -> None:
    override = "algorithm.kl.controller.target=1.5"
    printed = run(small, override)
    assert read_yaml(small / "ppo" / "config.yaml")["algorithm"]["kl"]["controller"]["target"] == 1.5
    result = json.loads((small / "result.json").read_text())
    assert result["prompts"] == 8
    assert 0.5 < result["rm_best_accuracy"] <= 1
    assert 1 - result["rm_best_accuracy"] <= result["rm_expected_accuracy"] <= result["rm_best_accuracy"]
    assert f"report: {small}/ppo/report.html" in printed
    assert printed.count("\n  SFT ") == printed.count("\n  PPO ") == quickstart.EXAMPLES
    made = {path: path.stat().st_mtime_ns for path in small.glob("*/model/model.safetensors")}
    assert {path.parent.parent.name for path in made} == {"sft", "rm", "ppo"}
    before = (small / "preferences" / "train.jsonl").stat().st_mtime_ns
    run(small, override)
    assert (small / "preferences" / "train.jsonl").stat().st_mtime_ns == before
    again = json.loads((small / "result.json").read_text())
    assert {k: v for k, v in again.items() if k != "seconds"} == {k: v for k, v in result.items() if k != "seconds"}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_shows_what_it_promises(tmp_path: Path, seed: int) -> None:
    run(tmp_path / "out", seed=seed)
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["gain_in_std"] >= 1.0
    assert result["win_rate"][0] >= 0.8
    assert result["prompts"] >= 256
    assert abs(result["kl_last_fifth"] - 4.0) <= 0.4
    assert result["rm_expected_accuracy"] >= 0.9 * result["rm_best_accuracy"]
    assert result["explained_variance"] > 0.3
