"""The benchmark of simple judges on a few pairs: its figures, by hand."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from runs import write_rows

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_the_agreement_of_the_shorter_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    benchmark = importlib.import_module("label_agreement")
    asked = [{"role": "user", "content": "Why?"}]
    sides = [("no", "because"), ("maybe", "yes"), ("up", "down"), ("in", "at")]
    pairs = [
        {"prompt": asked, **{side: [{"role": "assistant", "content": text}] for side, text in both.items()}}
        for both in (dict(zip(("chosen", "rejected"), pair, strict=True)) for pair in sides)
    ]
    write_rows(tmp_path / "pairs.jsonl", pairs)
    measured = benchmark.measure(tmp_path / "pairs.jsonl", "shorter")
    assert (measured["pairs"], measured["ties"]) == (4, 1)
    assert measured["accuracy"]["value"] == 0.625
    assert measured["kappa"]["value"] == 0.2, "(1/2 - 3/8) / (1 - 3/8)"
