"""The benchmark of verifiers on a few rows: its comparisons and its counts."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from extras import import_extra

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def test_verifiers_are_tallied(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("if_verifiable")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    agreement = importlib.import_module("verifier_agreement")
    counts = agreement.tally([(1.0, 1.0), (0.5, 1.0), (1.0, 0.0), (None, 0.0)])
    assert counts == {
        "graded": 4, "right by the other grader": 2, "agree": 1, "agreement": 0.25, "higher": 1, "lower": 2
    }  # fmt: skip
    rows = [
        {"ground_truth": "x\nA: 18", **{m: {"solution": "A: 18", "is_correct": m[0] == "6"} for m in agreement.MODELS}}
    ]
    assert list(agreement.graded_solutions(rows)) == [(1.0, 1.0), (1.0, 1.0), (1.0, 0.0), (1.0, 0.0)]
    assert list(agreement.references([{"answer": "#### 1"}, {"answer": "#### 2"}])) == [(1.0, 1.0), (0.0, 0.0)] * 2
    row = {"prompt": "p", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    strict, loose = agreement.instructions([row], ["one, two"])
    assert len(strict) == len(loose) == 10
    assert all(ours == theirs for ours, theirs in strict + loose)
    assert {ours for ours, _ in strict} == {0.0, 1.0}


def test_a_program_and_an_empty_one_are_graded(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("if_verifiable")
    import_extra("pydantic_monty")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    agreement = importlib.import_module("verifier_agreement")
    body, test = "    return 1\n", "def check(candidate):\n    assert candidate() == 1\n"
    row = {"prompt": "def f():\n", "entry_point": "f", "canonical_solution": body, "test": test}
    assert list(agreement.programs([row], "monty")) == [(1.0, 1.0), (0.0, 0.0)]
    assert agreement.timed([(1.0, 1.0)])["per second"] > 0
