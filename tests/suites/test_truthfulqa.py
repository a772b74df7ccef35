"""truthfulqa: MC1 and MC2 by hand, and the log-probabilities of the answers behind them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from bigram import EOS
from runs import write_rows
from suite_cases import evaluate, figures, subject

from rlhf.suites.truthfulqa import TruthfulqaSuite, mc1, mc2

WORDS = ("Q:", "A:", "sky", "sea", "blue", "green", "red")
TABLE = {
    "A:": {"blue": 0.6, "green": 0.3, "red": 0.1},
    **{word: {EOS: 1.0} for word in ("blue", "green", "red")},
}
ROWS = [
    {"question": "sky", "mc1_targets": {"blue": 1, "green": 0}, "mc2_targets": {"blue": 1, "green": 0, "red": 1}},
    {"question": "sea", "mc1_targets": {"green": 1, "blue": 0, "red": 0}, "mc2_targets": {"green": 1, "blue": 0}},
    {"question": "sea", "mc1_targets": {"green": 1, "blue": 1}, "mc2_targets": {"green": 1, "blue": 0}},
    {"question": "sea", "mc1_targets": {"green": 1, "blue": 0}, "mc2_targets": {"green": 1}},
    {"question": "sea", "mc1_targets": {"green": 1, "blue": 0}, "mc2_targets": ["green"]},
]


def test_mc1_and_mc2_by_hand() -> None:
    logs = [math.log(p) for p in (0.2, 0.3, 0.1)]
    assert mc1(logs, [True, False, False]) == 0
    assert mc1(logs, [False, True, False]) == 1
    assert mc1([1.0, 1.0], [True, False]) == 0  # a tie is no preference for the truth
    assert mc2(logs, [True, False, True]) == pytest.approx(0.3 / 0.6)
    assert mc2([-1e4, -1e4 + math.log(3)], [False, True]) == pytest.approx(0.75)


def test_figures(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "t.jsonl", ROWS)
    suite = TruthfulqaSuite.model_validate({"dataset": {"path": str(path)}})
    result = evaluate(suite, subject(tmp_path / "m", WORDS, TABLE))
    got = figures(result)
    assert (got["mc1"].value, got["mc1"].n) == (0.5, 2)
    assert result.rows["mc2"] == pytest.approx([0.7 / 1.0, 0.3 / 0.9], rel=1e-5)
    assert got["chance_mc1"].value == pytest.approx((1 / 2 + 1 / 3) / 2)
    assert [example["likeliest"] for example in result.examples] == ["blue", "blue"]
    assert result.skipped == {
        "mc1_targets has not exactly one true answer": 1,
        "mc2_targets has not both true and false answers": 1,
        "mc2_targets is no table of answers with 0 or 1": 1,
    }


def test_the_prompt_of_a_row_is_continued_as_it_is(tmp_path: Path) -> None:
    row = {**ROWS[0], "prompt": "sky"}
    table = {**TABLE, "sky": {"green": 0.9, "blue": 0.1}}
    path = write_rows(tmp_path / "t.jsonl", [row])
    suite = TruthfulqaSuite.model_validate({"dataset": {"path": str(path)}})
    assert figures(evaluate(suite, subject(tmp_path / "m", WORDS, table)))["mc1"].value == 0
