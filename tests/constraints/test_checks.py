"""Each kind of instruction on answers made by hand: some meet it, and some only nearly."""

from __future__ import annotations

from typing import Any

import pytest
from hand_made import CASES

from rlhf.constraints.checks import CHECKS, count_capital_words, count_sentences


@pytest.mark.parametrize(
    ("kind", "arguments", "good", "bad"), CASES, ids=[f"{i}-{case[0]}" for i, case in enumerate(CASES)]
)
def test_each_kind_by_hand(kind: str, arguments: dict[str, Any], good: str, bad: str) -> None:
    assert CHECKS[kind](good, **arguments)
    assert not CHECKS[kind](bad, **arguments)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("* a\n* b", 2),
        ("*", 0),  # an asterisk needs a character after it, and a line break is one
        ("*\nred", 1),
        ("*\n* red", 1),
        ("* red\n*", 1),
        ("*\n\n* red", 2),
        ("\n\n  * red", 1),
        ("**red**\n*** \n*red*", 1),
        ("- a\n--\n -", 3),
        ("-\n* red", 2),
        ("* red\u2028* blue", 1),
    ],
)
def test_bullets_are_those_of_the_published_expressions(text: str, count: int) -> None:
    assert CHECKS["detectable_format:number_bullet_lists"](text, num_bullets=count)


def test_every_kind_has_a_case() -> None:
    assert {case[0] for case in CASES} == set(CHECKS)
    assert len(CHECKS) == 25


def test_another_relation_is_refused() -> None:
    with pytest.raises(ValueError, match="the relation is 'at most'"):
        CHECKS["length_constraints:number_words"]("a b", num_words=3, relation="at most")


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("  \n", 0),
        ("No mark at all", 1),
        ("One. Two! Three?", 3),
        ("Wait... what? Yes.", 3),
        ("Mr. Smith met Dr. J. Brown at 5 p.m. today.", 1),
        ("It costs 3.50 euros. Cheap!", 2),
        ('He said "Go." Then he left.', 2),
        ("So do I. You too.", 2),
        ("See example.com. it is small", 1),
        ("A first line\nand a second", 1),
    ],
)
def test_sentences(text: str, count: int) -> None:
    assert count_sentences(text) == count


@pytest.mark.parametrize(
    ("text", "count"),
    [("Nothing here", 0), ("I AM", 2), ("WELL-KNOWN fact", 1), ("DON'T", 2), ('"YES!" (NO)', 2), ("A1 3D 42", 2)],
)
def test_words_in_capitals(text: str, count: int) -> None:
    assert count_capital_words(text) == count
