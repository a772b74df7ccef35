"""Rules for texts: how much each is broken, by hand, and the effect on a score."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import pytest
import torch
from pydantic import TypeAdapter
from tiny_models import completions_of, tokenizer

from rlhf.config.load import validate
from rlhf.config.reward import RewardConfig
from rlhf.errors import ConfigError, RewardError
from rlhf.rewards.rules import (
    LANGUAGES,
    RulesReward,
    RulesSource,
    TextRule,
    apply_rules,
    foreign_share,
    repeated_share,
)
from rlhf.section import OneOf
from rlhf.types import Completions, Scores


def rule(**settings: object) -> TextRule:
    made: TextRule = TypeAdapter(Annotated[TextRule, OneOf()]).validate_python(settings)
    return made


@pytest.mark.parametrize(
    "settings, text, broken",
    [
        ({"type": "length", "min": 2, "max": 3}, "one", 1.0),
        ({"type": "length", "min": 2, "max": 3}, "one two", 0.0),
        ({"type": "length", "min": 2, "max": 3}, "one two three", 0.0),
        ({"type": "length", "min": 2, "max": 3}, "one two three four", 1.0),
        ({"type": "length", "max": 5, "unit": "characters"}, "fünf5", 0.0),
        ({"type": "length", "max": 5, "unit": "characters"}, "sechs6", 1.0),
        ({"type": "length", "max": 6, "unit": "tokens"}, "a", 1.0),
        ({"type": "length", "max": 7, "unit": "tokens"}, "a", 0.0),
        ({"type": "repetition", "n": 2}, "a b A B a b", 3 / 5),  # ab ba ab ba ab
        ({"type": "repetition", "n": 2, "max": 0.6}, "a b a b a b", 0.0),
        ({"type": "repetition", "n": 3}, "a b", 0.0),
        ({"type": "script", "allowed": ["latin"]}, "naïve Жук 42!", 3 / 8),
        ({"type": "script", "allowed": ["latin", "cyrillic"]}, "naïve Жук", 0.0),
        ({"type": "script", "allowed": ["latin"], "max": 0.4}, "naïve Жук", 0.0),
        ({"type": "script", "allowed": ["cjk"]}, "漢字", 0.0),
        ({"type": "script", "allowed": ["latin"]}, "42", 0.0),
        ({"type": "format", "must": ["^<a>", "</a>$"], "must_not": ["x"]}, "<a> x", 2 / 3),
        ({"type": "format", "must": ["<a>.*</a>"]}, "<a>1\n2</a>", 0.0),
        ({"type": "forbidden", "phrases": ["As an AI"]}, "Well, as an ai!", 1.0),
        ({"type": "forbidden", "phrases": ["As an AI"], "ignore_case": False}, "as an ai", 0.0),
        ({"type": "forbidden", "phrases": ["art"]}, "start", 0.0),
        ({"type": "forbidden", "phrases": ["C++"]}, "in C++.", 1.0),
        ({"type": "forbidden", "phrases": ["a.c"]}, "abc", 0.0),
    ],
)
def test_how_much_of_a_rule_is_broken(settings: dict[str, object], text: str, broken: float) -> None:
    assert rule(**settings).violation(text, 7) == pytest.approx(broken, abs=1e-12)


@pytest.mark.parametrize("name", ["latn", "chinese", ""])
def test_what_is_no_script_is_refused(name: str) -> None:
    """Every letter would be foreign to it."""
    with pytest.raises(ValueError, match=f"no letter's name in Unicode begins with '{name}'"):
        rule(type="script", allowed=["latin", name])


@pytest.mark.parametrize("code", ["EN", "zh", "english"])
def test_a_language_that_is_never_detected_is_refused(code: str) -> None:
    with pytest.raises(ValueError, match=f"'{code}' is not a language code of langdetect; choose from af ar"):
        rule(type="language", allowed=["de", code])


def test_the_languages_are_those_of_langdetect() -> None:
    detector_factory = pytest.importorskip("langdetect.detector_factory")
    assert sorted(path.name for path in Path(detector_factory.PROFILES_DIRECTORY).iterdir()) == LANGUAGES.split()


@pytest.mark.parametrize(
    "text, broken",
    [
        ("The weather in this town is always better than people say it is.", 0.0),
        ("Das Wetter in dieser Stadt ist immer besser, als die Leute behaupten.", 1.0),
        ("", 0.0),
    ],
)
def test_a_language(text: str, broken: float) -> None:
    pytest.importorskip("langdetect")
    assert rule(type="language", allowed=["en", "fr"]).violation(text, 7) == broken


def test_empty_texts_break_no_share() -> None:
    assert repeated_share([], 1) == 0.0
    assert foreign_share("", frozenset({"LATIN"})) == 0.0


def test_penalties_add_up_and_the_lowest_broken_gate_decides() -> None:
    rules = [
        rule(type="length", max=1, weight=2.0),
        rule(type="repetition", weight=0.5),
        rule(type="forbidden", phrases=["x"], gate=-3.0),
        rule(type="format", must=["y"], gate=-5.0),
        rule(type="script", allowed=["latin"], gate=-4.0),
    ]
    violations = torch.tensor(
        [
            [1.0, 0.0, 1.0, 0.0],
            [0.5, 0.0, 0.0, 0.0],
            [0.0, 1.0, 1.0, 0.0],
            [0.0, 0.0, 1.0, 0.5],
            [0.0, 0.0, 0.2, 0.0],
        ]
    )
    base = torch.tensor([10.0, 10.0, 10.0, -100.0])
    assert apply_rules(base, violations, rules).tolist() == [10.0 - 2.0 - 0.25, -3.0, -5.0, -5.0]


def test_a_gate_scores_also_what_its_source_leaves_to_others() -> None:
    gate = [rule(type="length", max=1, gate=-1.0)]
    base = torch.tensor([math.nan, math.nan])
    ruled = apply_rules(base, torch.tensor([[1.0, 0.0]]), gate)
    assert ruled[0] == -1.0
    assert ruled[1].isnan()


class Constant:
    """Scores everything 4."""

    def __call__(self, completions: Completions) -> Scores:
        return Scores(values=torch.full((len(completions),), 4.0), parts={"fit": torch.zeros(len(completions))})


def test_rules_around_a_source_log_each_by_its_name() -> None:
    rules = [rule(type="length", max=1), rule(type="forbidden", phrases=["t9"], gate=-2.0, name="no nines")]
    batch = completions_of([[5], [5], [5]], [[3], [3, 4], [9]])
    scores = RulesReward(rules, tokenizer(), Constant())(batch)
    assert scores.values.tolist() == [4.0, 3.0, -2.0]
    assert {name: part.tolist() for name, part in scores.parts.items()} == {
        "fit": [0.0, 0.0, 0.0],
        "unruled": [4.0, 4.0, 4.0],
        "length": [0.0, 1.0, 0.0],
        "no nines": [0.0, 0.0, 1.0],
        "gated": [0.0, 0.0, 1.0],
    }
    assert RulesReward(rules[:1], tokenizer(), None)(batch).values.tolist() == [0.0, -1.0, 0.0]
    with pytest.raises(RewardError, match="'fit' is a rule's name and a part of the score that the rules change"):
        RulesReward([rule(type="length", max=1, name="fit")], tokenizer(), Constant())(batch)


@pytest.mark.parametrize(
    "rules, message",
    [
        ([], "at least 1 item"),
        ([{"type": "length"}], "every completion keeps this rule"),
        ([{"type": "length", "min": 5, "max": 4}], "below min"),
        ([{"type": "format", "must": ["("]}], "not a regular expression"),
        ([{"type": "format"}], "every completion keeps this rule"),
        ([{"type": "length", "max": 4}, {"type": "length", "min": 2}], "two rules are called length"),
        ([{"type": "length", "max": 4, "name": "gated"}], "no rule can be called gated or unruled"),
    ],
)
def test_rules_that_cannot_work_are_refused(rules: list[dict[str, object]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(RulesSource, {"type": "rules", "rules": rules})


@pytest.mark.parametrize(
    "source, message",
    [
        ({"names": ["a"]}, "names has 1 entries for 2 sources"),
        ({"names": ["a", "a"]}, "must differ"),
        ({"names": ["a", "disagreement"]}, "must differ"),
        ({"how": "weighted_mean", "weights": [1.0, 0.0]}, "must be above 0"),
    ],
)
def test_ensembles_that_cannot_work_are_refused(source: dict[str, object], message: str) -> None:
    members = [{"type": "function", "target": "m:f"}] * 2
    with pytest.raises(ConfigError, match=message):
        validate(RewardConfig, {"source": {"type": "ensemble", "sources": members, **source}})


def test_gdpo_belongs_outermost() -> None:
    inner = {"type": "ensemble", "how": "gdpo", "sources": [{"type": "function", "target": "m:f"}]}
    rules = [{"type": "length", "max": 3}]
    for outer in ({"type": "ensemble", "sources": [inner]}, {"type": "rules", "rules": rules, "source": inner}):
        with pytest.raises(ConfigError, match="only the outermost"):
            validate(RewardConfig, {"source": outer})
