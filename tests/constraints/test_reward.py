"""The share of constraints met, and the worth of the language beside it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rlhf.constraints.reward import (
    Constraint,
    is_english_like,
    is_varied,
    loose_variants,
    read_constraints,
    score,
    verify,
)
from rlhf.errors import RewardError

PROSE = "the river was quiet this morning and we walked along it for an hour before we had our breakfast by the water"
ROW: dict[str, Any] = {
    "instruction_id_list": ["punctuation:no_comma", "startend:quotation"],
    "kwargs": [{"num_words": None}, {}],
}


def test_scores_by_hand() -> None:
    completions = [f'"{PROSE}"', PROSE, f"{PROSE}, yes", "", "blub blub " * 20]
    scores, parts = score([""] * 5, completions, [ROW] * 5)
    assert scores == pytest.approx([1.1, 0.6, 0.1, 0.0, 0.5])
    assert parts["met"] == [1.0, 0.5, 0.0, 0.0, 0.5]
    assert parts["all_met"] == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert parts["english"] == [1.0, 1.0, 1.0, 0.0, 0.0]
    assert parts["varied"] == [1.0, 1.0, 1.0, 0.0, 0.0]


def test_without_the_language() -> None:
    scores, _ = score([""], [PROSE], [ROW], fluency=0.0)
    assert scores == [0.5]


def test_another_language_counts_as_language_where_it_is_asked_for() -> None:
    german = "der fluss war heute morgen sehr ruhig und wir gingen lange an ihm entlang nach hause und dann wieder weg"
    asked = {"instruction_id_list": ["language:response_language"], "kwargs": [{"language": "de"}]}
    plain = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    scores, parts = score(["", ""], [german, german], [asked, plain])
    assert parts["met"] == [1.0, 1.0]
    assert parts["english"] == [1.0, 0.0]
    assert scores == pytest.approx([1.1, 1.05])


def test_language() -> None:
    assert is_english_like(PROSE.upper())
    assert not is_english_like("der fluss war heute morgen sehr ruhig und wir gingen lange an ihm entlang nach hause")
    assert is_english_like("YES")
    assert not is_english_like("42 !")
    assert not is_varied("the same again and " * 12)
    assert is_varied(PROSE)


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({}, "instruction_id_list is not a list"),
        ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": []}, "kwargs is not a list of 1 objects"),
        ({"instruction_id_list": ["no:such"], "kwargs": [{}]}, "'no:such' is not a kind"),
        ({"instruction_id_list": ["startend:quotation"], "kwargs": [3]}, "are not an object"),
        ({"instruction_id_list": ["startend:quotation"], "kwargs": [{"x": 1}]}, "do not fit"),
        ({"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": None}]}, "do not fit"),
        ({"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": "hello"}]}, "not a list of texts"),
        ({"instruction_id_list": ["keywords:forbidden_words"], "kwargs": [{"forbidden_words": []}]}, "a list of texts"),
        (
            {
                "instruction_id_list": ["keywords:letter_frequency"],
                "kwargs": [{"letter": "", "let_frequency": 3, "let_relation": "at least"}],
            },
            "letter of keywords:letter_frequency is '', and not a text",
        ),
        (
            {"instruction_id_list": ["length_constraints:number_paragraphs"], "kwargs": [{"num_paragraphs": "3"}]},
            "'3', and not a whole number",
        ),
        (
            {"instruction_id_list": ["length_constraints:number_paragraphs"], "kwargs": [{"num_paragraphs": math.inf}]},
            "inf, and not a whole number",
        ),
        (
            {
                "instruction_id_list": ["length_constraints:nth_paragraph_first_word"],
                "kwargs": [{"num_paragraphs": 2, "nth_paragraph": 0, "first_word": "a"}],
            },
            "nth_paragraph is 0; the first paragraph is 1",
        ),
    ],
)
def test_rows_without_constraints_are_refused(row: dict[str, Any], what: str) -> None:
    with pytest.raises(RewardError, match=f"no constraints to check: .*{what}"):
        score([""], ["text"], [row])


def test_strict_and_loose() -> None:
    constraints = read_constraints(
        {"instruction_id_list": ["startend:end_checker"], "kwargs": [{"end_phrase": "Bye."}]}
    )
    verdict = verify(constraints, "Here it is:\nGood *Bye.*\nAnything else?")
    assert (verdict.strict, verdict.loose) == ((False,), (True,))
    assert verify(constraints, " ").loose == (False,)
    assert len(set(loose_variants("a\n*b*\nc"))) == 8


def test_an_empty_response_meets_nothing() -> None:
    assert not Constraint("punctuation:no_comma", {}).is_met("\n ")
