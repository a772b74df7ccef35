"""Comparisons whose reward and judge are verifiers that do not apply to some completions."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from cases import GROUPS, compare_tree, compared

from rlhf.comparison.results import ComparisonResults
from rlhf.comparison.summary import notes
from rlhf.comparison.trial import read_suites

ABSTAINS = """
def grade(completion, row):
    return None if "blue" in row["prompt"] else float(len(completion.split()) + {bonus})
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("abstaining")
    sources = []
    for name, bonus in (("reward", 0), ("judge", 1)):
        (folder / f"{name}.py").write_text(ABSTAINS.format(bonus=bonus))
        sources.append({"type": "verifier", "name": f"{folder / name}.py:grade", "workers": 1})
    tree: dict[str, Any] = compare_tree(
        folder, reward_source=sources[0], judge=sources[1], budget={"completions": 32}, evaluations=1
    )
    best = {"type": "best_of_n", "n": 2, "samples": 4}
    tree |= {"seeds": [0], "arms": {"grpo": {"algorithm": {"preset": "grpo"}, **GROUPS}, "best_of_n": best}}
    hh = {"dataset": {"path": str(folder / "pairs.jsonl")}, "sampling": {"max_new_tokens": 4}, "source": sources[0]}
    tree["suites"] = {"hh": hh}
    tree["pairs"] = {"judge": {"type": "scores", "source": sources[1]}}
    assert compared(tree)
    return Path(tree["out_dir"])


def rows_of(folder: Path, arm: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((folder / arm / "seed-0" / "judged.json").read_text())["rows"]
    return rows


@pytest.mark.parametrize("arm", ["start", "grpo", "best_of_n"])
def test_a_completion_that_no_verifier_applies_to_has_no_score(folder: Path, arm: str) -> None:
    rows = rows_of(folder, arm)
    for row in rows:
        assert ("blue" in row["prompt"]) == (row["score"] is None) == (row["proxy"] is None)
    judged = json.loads((folder / arm / "seed-0" / "judged.json").read_text())["metrics"]
    known = [row["score"] for row in rows if row["score"] is not None]
    mean = math.fsum(known) / len(known)
    assert judged["eval/score"] == pytest.approx(mean)
    assert judged["eval/score_std"] == pytest.approx(math.sqrt(math.fsum((x - mean) ** 2 for x in known) / len(known)))
    assert judged["eval/proxy"] == pytest.approx(mean - 1)
    assert judged["eval/unjudged"] == len(rows) - len(known) > 0


def test_gains_and_win_rates_leave_such_prompts_out(folder: Path) -> None:
    results = ComparisonResults.read(folder)
    start = [row["score"] for row in rows_of(folder, "start")]
    for name in ("grpo", "best_of_n"):
        scores = [row["score"] for row in rows_of(folder, name)]
        pairs = [(a, b) for a, b in zip(scores, start, strict=True) if a is not None]
        final = results.finals[name]
        assert final.gain.value == pytest.approx(sum(a - b for a, b in pairs) / len(pairs))
        wins = [float(a > b) + 0.5 * (a == b) for a, b in pairs]
        assert final.win_rate_over_start.value == pytest.approx(sum(wins) / len(wins))
        assert final.measures.unjudged == len(scores) - len(pairs)
    assert len(results.win_rates) == 2
    assert all(math.isfinite(point.score) for point in results.best_of_n["best_of_n"])
    (note,) = [note for note in notes(results) if "no verifier applies" in note]
    assert f"up to {len(start) - len(pairs)} of the {results.prompts} completions" in note


def test_suites_and_judges_of_pairs_leave_such_prompts_out(folder: Path) -> None:
    suites = read_suites(folder / "grpo" / "seed-0")
    rows = suites["hh"].rows["score"]
    assert sum(map(math.isnan, rows)) == len(rows) // 2 == 8  # every other pair is blue
    assert suites["hh"].figures["score"].value == pytest.approx(math.fsum(x for x in rows if x == x) / 8)
    unjudged = [row["score"] is None for row in rows_of(folder, "grpo")]
    outcomes = suites["pairs"].rows["over_start"]
    same = [
        a["completion"] == b["completion"]
        for a, b in zip(rows_of(folder, "grpo"), rows_of(folder, "start"), strict=True)
    ]
    assert [math.isnan(x) for x in outcomes] == [no and not tie for no, tie in zip(unjudged, same, strict=True)]
    gain = ComparisonResults.read(folder).arms["grpo"].suites["hh"]["score"].gain
    assert gain is not None
    assert math.isfinite(gain.value)


def test_the_page_is_written(folder: Path) -> None:
    assert "no verifier applies" in (folder / "report.html").read_text(encoding="utf-8")
