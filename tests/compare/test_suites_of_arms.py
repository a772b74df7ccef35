"""Suites as judges of a comparison: every final model is measured, gains are paired, best-of-n keeps the best."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cases import compare_tree, compared, plan_of
from runs import write_rows

from rlhf.cli import main
from rlhf.compare.summary import suite_tables
from rlhf.compare.trial import read_suites, summarize_suites
from rlhf.errors import ConfigError

INSTRUCTIONS = [
    {"prompt": prompt, "instruction_id_list": ["keywords:existence", "punctuation:no_comma"], "kwargs": kwargs}
    for prompt in ("red one", "blue two", "red two")
    for kwargs in ([{"keywords": ["good"]}, {}], [{"keywords": ["one", "two"]}, {}])
]


def with_suites(folder: Path, **changes: Any) -> dict[str, Any]:
    rows = write_rows(folder / "instructions.jsonl", INSTRUCTIONS)
    safe = write_rows(folder / "safe.jsonl", [{"prompt": "red one", "label": label} for label in ("safe", "unsafe")])
    suites = {
        "ifeval": {"dataset": {"path": str(rows)}, "sampling": {"max_new_tokens": 6}},
        "xstest": {"dataset": {"path": str(safe)}, "sampling": {"max_new_tokens": 6}},
    }
    return compare_tree(folder, suites=suites, **changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("s")
    tree = with_suites(path, seeds=[0, 1])
    tree["arms"] = {name: tree["arms"][name] for name in ("grpo", "best_of_n")}
    assert compared(tree)
    return path / "compare"


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    return loaded


def test_every_final_model_is_measured(folder: Path, results: dict[str, Any]) -> None:
    assert set(read_suites(folder / "grpo" / "seed-1")) == {"ifeval", "xstest"}
    assert set(read_suites(folder / "best_of_n" / "seed-0")) == {"ifeval"}  # a refusal has no reward to pick by
    found = read_suites(folder / "start" / "seed-0")["ifeval"]
    assert found["n"] == len(INSTRUCTIONS)
    assert len(found["examples"]) == len(INSTRUCTIONS)
    assert set(results["arms"]["grpo"]["suites"]) == {"ifeval", "xstest"}
    assert {"prompt_strict", "instruction_strict"} <= set(results["start_model"]["suites"]["ifeval"])
    assert results["start_model"]["suites"]["ifeval"]["prompt_strict"]["gain"]["value"] == 0


def test_greedy_answers_of_the_start_model_are_taken_once(folder: Path) -> None:
    first, second = (read_suites(folder / "start" / f"seed-{seed}")["ifeval"] for seed in (0, 1))
    assert second["config"]["seed"] == first["config"]["seed"] == 0
    assert read_suites(folder / "grpo" / "seed-1")["ifeval"]["config"]["seed"] == 1


def test_gains_are_paired_over_seeds(folder: Path, results: dict[str, Any]) -> None:
    gains = []
    for seed in (0, 1):
        after, before = (read_suites(folder / arm / f"seed-{seed}")["ifeval"] for arm in ("grpo", "start"))
        gains.append(after["figures"]["instruction_strict"]["value"] - before["figures"]["instruction_strict"]["value"])
    found = results["arms"]["grpo"]["suites"]["ifeval"]["instruction_strict"]["gain"]
    assert found["value"] == pytest.approx(sum(gains) / 2)
    assert found["low"] <= found["value"] <= found["high"]


def test_tables_and_page(folder: Path, results: dict[str, Any]) -> None:
    ifeval, xstest = suite_tables(results)
    assert ifeval.rows[0][0] == "start model"
    assert {row[0] for row in ifeval.rows[1:]} == {"grpo", "best_of_n, n = 2"}
    assert "prompt strict" in ifeval.columns
    assert [row[0] for row in xstest.rows] == ["start model", "grpo"]
    assert results["arms"]["grpo"]["peak_memory_mb"] > 0
    assert results["arms"]["best_of_n"]["peak_memory_mb"] is None
    assert 'id="suites"' in (folder / "report.html").read_text(encoding="utf-8")


def test_a_finished_comparison_measures_nothing_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*/*/evals/*.json")}
    assert main(["report", str(folder)]) == 0
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*/*/evals/*.json")} == before
    assert "ifeval" in capsys.readouterr().out


def test_a_wrong_suite_is_told_before_anything_runs(tmp_path: Path) -> None:
    tree = with_suites(tmp_path)
    with pytest.raises(ConfigError, match="did you mean ifeval"):
        plan_of({**tree, "suites": {"ifevl": {}}})
    with pytest.raises(ConfigError, match=r"suites\.ifeval: .*nonsense"):
        plan_of({**tree, "suites": {"ifeval": {**tree["suites"]["ifeval"], "nonsense": 1}}})


def test_by_hand() -> None:
    def of(rows: list[float]) -> dict[str, Any]:
        return {"s": {"figures": {"f": {"value": sum(rows) / len(rows)}}, "rows": {"f": rows}}}

    found = summarize_suites([of([1.0, 0.0, 1.0, 1.0])], [of([0.0, 0.0, 1.0, 1.0])])["s"]["f"]
    assert (found["value"], found["gain"]["value"]) == (0.75, 0.25)
    missing = summarize_suites([of([1.0])], [of([1.0, 0.0])])["s"]["f"]
    assert missing["gain"] is None
