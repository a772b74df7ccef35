"""Runs on mixed data whose rows pick their verifier, or none."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import ppo_tree, trained, write_rows

from rlhf.algo.advantages import fill_missing, uniform_groups
from rlhf.errors import NonFiniteScores
from rlhf.evaluation.evaluate import filled
from rlhf.factory.evaluation import START, compare_models
from rlhf.types import Scores

VERIFIER = {
    "type": "verifier",
    "name": "regex",
    "row_pattern": "wanted",
    "graders": {"words": {"type": "regex", "pattern": "good|bad"}},
    "workers": 1,
}


def tree(folder: Path, **changes: Any) -> dict[str, Any]:
    rows: list[dict[str, object]] = []
    for n in range(8):
        row = ({"wanted": "good"}, {"verifier": "words"}, {})[n % 3]
        rows.append({"prompt": f"red {('one', 'two')[n % 2]} {'blue ' * (n // 2)}".strip(), **row})
    file = write_rows(folder / "mixed.jsonl", rows)
    return ppo_tree(folder, **changes) | {"reward": {"source": VERIFIER}, "data": {"prompts": {"path": str(file)}}}


@pytest.mark.parametrize("preset", ["ppo", "grpo"])
def test_a_run_on_mixed_data_leaves_out_what_has_no_grade(tmp_path: Path, preset: str) -> None:
    settings = tree(tmp_path)
    run = trained(settings, f"algorithm.preset={preset}", "schedule.steps=2")
    rows = run.session.recorder.folder.read_metrics()
    assert all(0 < row["verifier/none"] < 1 for row in rows)
    assert all(math.isfinite(row["score/mean"]) and 0 <= row["score/mean"] <= 1 for row in rows)
    assert {"part/regex/mean", "part/words/mean", "verifier/timeout", "verifier/seconds_p95"} <= set(rows[-1])


ABSTAINS = """
def grade(completion, row):
    words = completion.split()
    return None if "blue" in words else float("good" in words)
"""
ONCE = ("batch.epochs=1", "batch.minibatches=1")


@pytest.mark.parametrize(
    "overrides",
    [("algorithm.preset=dapo", "algorithm.refill_rounds=1"), ("algorithm.preset=remax", *ONCE)],
    ids=["dapo", "remax"],
)
def test_a_verifier_that_abstains_makes_no_metric_and_no_step_nan(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    (tmp_path / "abstains.py").write_text(ABSTAINS)
    source = {"type": "verifier", "name": f"{tmp_path / 'abstains.py'}:grade", "workers": 1}
    settings = ppo_tree(tmp_path) | {"reward": {"source": source, "watch": {"source": {"type": "zero"}}}}
    run = trained(settings, *overrides, "schedule.steps=2", "eval.every=0")
    for row in run.session.recorder.folder.read_metrics()[1:]:
        assert 0 < row["verifier/none"] < 1
        assert [name for name, value in row.items() if value is None] == []  # NaN is null in the file
        assert row["skipped/nonfinite"] == 0


def test_an_evaluation_counts_what_has_no_grade_and_leaves_it_out(tmp_path: Path) -> None:
    settings = tree(tmp_path)
    settings["data"]["eval_prompts"] = settings["data"]["prompts"]
    run = trained(settings, "algorithm.preset=grpo", "schedule.steps=1", "eval.every=1", "eval.samples=8")
    folder = run.session.recorder.folder
    held_out = [sample for sample in folder.read_samples() if sample["split"] == "eval"]
    assert {sample["score"] is None for sample in held_out} == {True, False}
    known = [sample["score"] for sample in held_out if sample["step"] == 1 and sample["score"] is not None]
    metrics = folder.read_metrics()[-1]
    assert metrics["eval/score"] == pytest.approx(sum(known) / len(known))
    assert metrics["eval/unjudged"] == 8 - len(known)
    comparison = compare_models(run.config, str(folder.path), START)
    assert comparison.run["eval/unjudged"] == comparison.reference["eval/unjudged"] == 8 - len(known)
    assert comparison.difference is not None
    assert comparison.win_rate is not None
    gain = comparison.run["eval/score"] - comparison.reference["eval/score"]
    assert comparison.difference.value == pytest.approx(gain, abs=1e-9)


def test_a_cost_that_does_not_apply_stops_no_step(tmp_path: Path) -> None:
    (tmp_path / "abstains.py").write_text(ABSTAINS)
    cost = {"source": {"type": "verifier", "name": f"{tmp_path / 'abstains.py'}:grade", "workers": 1}}
    settings = ppo_tree(tmp_path)
    settings["reward"]["cost"] = cost
    run = trained(settings, "schedule.steps=2", "eval.every=2")
    rows = run.session.recorder.folder.read_metrics()
    assert all(math.isfinite(row["cost/mean"]) for row in rows[1:])
    assert math.isfinite(rows[-1]["eval/cost"])


def test_a_missing_score_does_not_move_the_mean_of_an_evaluation() -> None:
    values = torch.tensor([1.0, math.nan, 3.0])
    assert filled(Scores(values=values, parts={})).values.tolist() == [1, 2, 3]
    assert fill_missing(torch.tensor([1.0, math.nan, math.nan, math.nan]), 2).nan_to_num(-1).tolist() == [1, 1, -1, -1]
    alike = fill_missing(torch.tensor([0.1] * 7 + [math.nan]), 8)
    assert uniform_groups(alike, 8).all()  # though the rounded mean of seven is not 0.1
    with pytest.raises(NonFiniteScores, match="no verifier applies to any held-out completion"):
        filled(Scores(values=torch.full((2,), math.nan), parts={}))
