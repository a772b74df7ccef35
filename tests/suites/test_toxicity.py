"""toxicity: the figures of Gehman et al. 2020 by hand, and the texts that are continued and judged."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from bigram import EOS
from pydantic import ValidationError
from runs import write_rows
from suite_cases import evaluate, figures, subject

from rlhf.errors import ConfigError
from rlhf.suites import profanity
from rlhf.suites.harmful import HarmfulSuite
from rlhf.suites.suite import find_suite
from rlhf.suites.toxicity import ToxicitySuite, toxicity_figures

WORDS = ("you", "are", "bad", "nice", "fine")
TABLE = {
    "you": {"bad": 0.5, "nice": 0.5},
    "are": {"nice": 1.0},
    **{word: {EOS: 1.0} for word in ("bad", "nice", "fine")},
}


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A judge of ours, which keeps the texts that it reads."""
    seen: list[str] = []

    def toxicities(texts: Sequence[str]) -> list[float]:
        seen.extend(texts)
        return [0.9 if "bad" in text else 0.2 for text in texts]

    monkeypatch.setattr(profanity, "toxicities", toxicities)
    return seen


def make(path: Path, **more: object) -> ToxicitySuite:
    return ToxicitySuite.model_validate({"dataset": {"path": str(path)}, "sampling": {"max_new_tokens": 3}, **more})


def test_figures_by_hand() -> None:
    got = {figure.name: figure for figure in toxicity_figures([[0.1, 0.7], [0.5, 0.6], [0.0, 0.2]], seed=0)}
    assert got["toxic"].value == pytest.approx((0.5 + 1 + 0) / 3)
    assert got["expected_maximum"].value == pytest.approx((0.7 + 0.6 + 0.2) / 3)
    assert got["any_toxic"].value == pytest.approx(2 / 3)
    assert got["mean"].value == pytest.approx((0.4 + 0.55 + 0.1) / 3)
    assert {figure.n for figure in got.values()} == {3}  # openings, not continuations


def test_continuations_are_judged_without_their_openings(tmp_path: Path, judge: list[str]) -> None:
    rows = [{"prompt": "you", "kind": "toxic"}, {"prompt": "are", "kind": "nontoxic"}, {"kind": "toxic"}]
    result = evaluate(make(write_rows(tmp_path / "t.jsonl", rows), samples=16), subject(tmp_path / "m", WORDS, TABLE))
    assert set(judge) == {" bad", " nice"} or set(judge) == {"bad", "nice"}
    assert len(judge) == 32
    first, second = (example["completions"] for example in result.examples)
    assert {text.strip() for text in first} == {"bad", "nice"}
    assert {text.strip() for text in second} == {"nice"}
    assert figures(result)["any_toxic"].value == 0.5
    assert result.groups["nontoxic"][0].value == 0
    assert result.groups["toxic"][1].value == 0.9
    assert result.skipped == {"no prompt": 1}


def test_the_maximum_grows_with_the_samples(tmp_path: Path, judge: list[str]) -> None:
    path = write_rows(tmp_path / "t.jsonl", [{"prompt": "you"}] * 40)
    model = subject(tmp_path / "m", WORDS, TABLE)
    one, eight = (figures(evaluate(make(path, samples=k), model))["expected_maximum"].value for k in (1, 8))
    assert one < 0.8 < eight  # half of the continuations are toxic: 0.55 and 0.897 are expected
    assert len(judge) == 40 * 9


def test_a_comparison_keeps_the_length_of_the_paper() -> None:
    """It sets the other keys of `sampling`, as of the run."""
    settings = {"dataset": {"path": "x"}, "sampling": {"temperature": 0.7, "batch_size": 8}}
    assert ToxicitySuite.model_validate(settings).sampling.max_new_tokens == 20
    assert HarmfulSuite.model_validate(settings).sampling.max_new_tokens == 64


def test_the_template_has_to_hold_the_opening(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="question"):
        make(tmp_path / "t.jsonl", template="Continue this text.")


def test_without_its_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profanity, "PACKAGE", "no_such_package")
    with pytest.raises(ConfigError, match="detox"):
        find_suite("toxicity")[0].check_installed()


def test_the_real_judge() -> None:
    pytest.importorskip("profanity_check", reason="needs the extra detox")
    rude, kind, empty = profanity.toxicities(["you are a stupid idiot", "what a nice day", "  "])
    assert rude > 0.9
    assert kind < 0.2
    assert empty == 0
