"""blimp: the likelier sentence by hand, with means over pairs, paradigms and phenomena."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from bigram import EOS
from runs import write_rows
from suite_cases import evaluate, figures, subject

from rlhf.suites.blimp import BlimpSuite, sentence_logprobs

WORDS = ("she", "he", "sings", "sing")
TABLE = {
    EOS: {"she": 0.75, "he": 0.25},
    "she": {"sings": 0.8, "sing": 0.2},
    "he": {"sings": 0.4, "sing": 0.6},
    "sings": {EOS: 1.0},
    "sing": {EOS: 1.0},
}
ROWS = [
    {"good": "she sings", "bad": "she sing", "paradigm": "one", "phenomenon": "agreement"},
    {"good": "he sings", "bad": "he sing", "paradigm": "one", "phenomenon": "agreement"},
    {"good": "she sing", "bad": "he sing", "paradigm": "two", "phenomenon": "gender"},
    {"good": "she sing", "bad": "she sing", "paradigm": "two", "phenomenon": "gender"},
]


def test_the_first_token_counts_too(tmp_path: Path) -> None:
    model = subject(tmp_path / "m", WORDS, TABLE)
    values = sentence_logprobs(model, ["she sings", "he", "he sing"])
    assert [math.exp(value) for value in values] == pytest.approx([0.75 * 0.8, 0.25, 0.25 * 0.6], rel=1e-5)


def test_figures(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "b.jsonl", ROWS)
    suite = BlimpSuite.model_validate({"dataset": {"path": str(path)}})
    result = evaluate(suite, subject(tmp_path / "m", WORDS, TABLE))
    got = figures(result)
    margins = [math.log(4), math.log(0.4 / 0.6), math.log((0.75 * 0.2) / (0.25 * 0.6))]
    assert margins[2] == pytest.approx(0)
    assert result.rows["margin"] == pytest.approx(margins, abs=1e-5)
    assert (got["agreement"].value, got["agreement"].n) == (0.5, 2)
    assert got["paradigm_mean"].n == 2
    assert got["paradigm_mean"].value == pytest.approx((0.5 + got["gender"].value) / 2)
    assert [group[0].n for group in result.groups.values()] == [2, 1]
    assert result.skipped == {"both sentences are equal": 1}
    assert suite.without_effect == ("seed", "sampling")


def test_rows_without_a_paradigm(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "b.jsonl", [{"good": "she sings", "bad": "he sing"}])
    suite = BlimpSuite.model_validate({"dataset": {"path": str(path)}})
    result = evaluate(suite, subject(tmp_path / "m", WORDS, TABLE))
    assert set(figures(result)) == {"accuracy", "paradigm_mean", "margin"}
    assert figures(result)["accuracy"].value == 1
