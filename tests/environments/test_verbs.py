"""rlhf eval, chat and report of a run with an environment, by the commands."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from statistics import fmean

import pytest
import runs
import word_rewards
import yaml
from rich.console import Console
from test_episodes import tree

from rlhf.cli import main
from rlhf.commands.episodes import run_episodes
from rlhf.errors import ConfigError


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("agent")
    settings = tree(folder)
    settings["data"]["eval_prompts"] = {"path": str(runs.prompts_file(folder)), "limit": 6}
    settings["eval"] = {"every": 2}
    settings["schedule"] = {"steps": 2}
    (folder / "agent.yaml").write_text(yaml.safe_dump(settings))
    assert main(["train", str(folder / "agent.yaml")]) == 0
    return folder / "run"


def test_evaluation_during_the_run_plays_episodes(run_folder: Path) -> None:
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    evaluated = [line for line in lines if "eval/turns" in line]
    assert [line["step"] for line in evaluated] == [0, 2]
    assert all(1 < line["eval/turns"] <= 3 for line in evaluated)
    samples = [json.loads(line) for line in (run_folder / "samples.jsonl").read_text().splitlines()]
    held_out = [sample for sample in samples if sample["split"] == "eval"]
    assert len(held_out) == 12
    for sample in held_out:
        assert sample["score"] == pytest.approx(sum(part.get("reward", 0.0) for part in sample["turns"]))


def test_eval_compares_episodes(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(run_folder)]) == 0
    printed = capsys.readouterr().out
    assert "eval/turns" in printed
    assert "win rate over the reference" in printed
    result = json.loads((run_folder / "eval.json").read_text())
    assert result["prompts"] == 6
    assert 1 < result["run"]["eval/turns"] <= 3


def test_chat_shows_episodes(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(file=io.StringIO(), width=200)
    run_episodes(str(run_folder), 2, seed=1, greedy=False, console=console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.count("= return") == 2
    assert "environment │" in text
    assert "policy │" in text
    assert main(["chat", str(run_folder), "--episodes", "1"]) == 0
    capsys.readouterr()
    plain = tmp_path / "plain"
    shutil.copytree(run_folder, plain)
    settings = yaml.safe_load((plain / "config.yaml").read_text())
    settings["environment"] = None
    settings["reward"] = {"source": {"type": "function", "target": f"{word_rewards.__file__}:count_good"}}
    (plain / "config.yaml").write_text(yaml.safe_dump(settings))
    with pytest.raises(ConfigError, match="without an environment"):
        run_episodes(str(plain), 1, seed=1, greedy=False, console=console)


def test_an_episode_that_failed_counts_in_no_mean_and_is_shown_as_it_was(tmp_path: Path) -> None:
    settings = tree(tmp_path, "Broken", kwargs={"how": "raise"})
    settings["data"]["eval_prompts"] = {"path": str(runs.prompts_file(tmp_path)), "limit": 16}
    settings |= {"eval": {"every": 1, "samples": 16}, "schedule": {"steps": 1}}
    settings["batch"] |= {"prompts_per_step": 16}
    (tmp_path / "agent.yaml").write_text(yaml.safe_dump(settings))
    assert main(["train", str(tmp_path / "agent.yaml"), "logging.samples=16"]) == 0
    run = tmp_path / "run"
    start, step = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()[:2])
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    for split, at, prefix in (("train", 1, ""), ("eval", 0, "eval/")):
        rows = [sample for sample in samples if sample["split"] == split and sample["step"] == at]
        failed = [row for row in rows if row["stop"] == "error"]
        live = [row for row in rows if row["stop"] != "error"]
        assert len(rows) == 16
        assert len(failed) == 1
        assert failed[0]["score"] is None
        assert failed[0]["length"] > 0
        assert failed[0]["turns"][0]["by"] == "policy"
        metrics = start if prefix else step
        length, score = ("eval/length", "eval/score") if prefix else ("completion/length", "score/mean")
        assert metrics[length] == pytest.approx(fmean(row["length"] for row in live))
        assert metrics[score] == pytest.approx(fmean(row["score"] for row in live))
    assert start["eval/unjudged"] == 1
    assert start["eval/turns"] == pytest.approx(fmean(len([p for p in row["turns"] if "turn" in p]) for row in live))
    assert step["score/mean"] == pytest.approx(step["env/return"])
    assert step["reward/kl_penalty"] == pytest.approx(0, abs=1e-6)
