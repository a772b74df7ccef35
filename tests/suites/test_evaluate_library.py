"""The metrics as the evaluate library loads them: from a path, with no network."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import evaluate
import pytest

from rlhf.suites.metrics import metric_names, metric_path

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """evaluate.load of one of our metrics, with no way to the network and its copies in a folder of the test's own."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a metric went to the network")

    monkeypatch.setattr("socket.create_connection", refuse)
    monkeypatch.setattr("socket.socket.connect", refuse)

    def loaded(name: str) -> Any:
        return evaluate.load(metric_path(name), cache_dir=str(tmp_path / "cache"), keep_in_memory=True)

    return loaded


def test_gsm8k_exact(load: Any) -> None:
    metric = load("gsm8k_exact")
    values = metric.compute(
        predictions=["The answer is $72.00.", "so 5", "none", r"\boxed{1{,}234}"],
        references=["work\n#### 72", "#### 5", "#### 1", "1234"],
    )
    assert values == {
        **{"exact_match": 0.75, "no_answer": 0.25, "n": 4, "right": [True, True, False, True]},
        **{"announced": [True, False, False, True], "answers": ["72", "5", None, "1234"]},
    }
    strict = metric.compute(predictions=["so 5"], references=["#### 5"], announced_only=True)
    assert strict["exact_match"] == 0.0
    with pytest.raises(ValueError, match="has no number"):
        metric.compute(predictions=["5"], references=["five"])


def test_pass_at_k(load: Any) -> None:
    rows = [[True, False, False, False], [True, True, False, False]]
    values = load("pass_at_k").compute(predictions=rows, k=[1, 2])
    assert (values["pass@1"], values["pass@2"]) == pytest.approx(((0.25 + 0.5) / 2, (0.5 + 5 / 6) / 2))
    assert values["problems@2"] == pytest.approx([0.5, 5 / 6])


def test_distinct_n(load: Any) -> None:
    metric = load("distinct_n")
    values = metric.compute(predictions=["a b a b", "a b"], n=[1, 2, 3])
    assert values == pytest.approx({"distinct_1": 2 / 6, "distinct_2": 2 / 4, "distinct_3": 1.0})
    assert math.isnan(metric.compute(predictions=["a"], n=[2])["distinct_2"])


def test_accuracy(load: Any) -> None:
    values = load("accuracy").compute(predictions=[1.0, 0.0, 0.5, 1.0])
    assert values["accuracy"] == 0.625  # two right, one tie
    assert 0 < values["low"] < 0.625 < values["high"] < 1


def test_pairwise_accuracy(load: Any) -> None:
    values = load("pairwise_accuracy").compute(predictions=[1.0, 2.0, 3.0, 0.0], references=[0.0, 2.0, 1.0, 5.0])
    assert values["outcomes"] == [1.0, 0.5, 1.0, 0.0]
    assert {name: values[name] for name in ("accuracy", "low", "high")} == load("accuracy").compute(
        predictions=values["outcomes"]
    )


def test_win_rate(load: Any) -> None:
    metric = load("win_rate")
    values = metric.compute(predictions=[1.0, 2.0, 3.0, 0.0], references=[0.0, 2.0, 1.0, 5.0])
    assert (values["win_rate"], values["ties"]) == (0.625, 0.25)
    assert values == metric.compute(predictions=[1.0, 2.0, 3.0, 0.0], references=[0.0, 2.0, 1.0, 5.0], bootstrap_seed=0)
    sure = metric.compute(predictions=[1.0] * 5, references=[0.0] * 5)
    assert (sure["low"], sure["high"]) == (pytest.approx(0.5655, abs=1e-4), 1.0)  # five wins of five are no certainty


def test_every_metric_is_a_script_that_evaluate_takes_and_is_documented() -> None:
    page = (ROOT / "docs" / "evaluation_suites.md").read_text(encoding="utf-8")
    for name in metric_names():
        assert Path(metric_path(name)).is_file()
        assert f"`{name}`" in page
    assert len(metric_names()) == 6
    with pytest.raises(ValueError, match="no metric 'bleu'"):
        metric_path("bleu")
