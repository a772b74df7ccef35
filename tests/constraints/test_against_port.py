"""Our checks against if-verifiable, an independent port of IFEval's program, on texts that nearly meet each kind."""

from __future__ import annotations

import gzip
import importlib
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hand_made import CASES

from rlhf.constraints.checks import CHECKS
from rlhf.constraints.reward import Constraint, loose_variants, read_constraints

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from instructions import generate_instructions

NEEDS_PUNKT = {"length_constraints:number_sentences", "change_case:capital_word_frequency"}  # models to be downloaded
PIECES = (
    "The river was quiet", "A dog, a cat", "P.S. call me", "p. p. s later", "* one", "- two", "**bold**", "*soft*",
    "***", "******", "<<Title>>", "[name]", "[a] [b]", "Section 1", "SECTION 2", "My answer is no.", "THE END",
    "the end", "\"", "{}", "```", "\n", "\n\n", "\n", " ", ". ", ", ", "time", "light and warm", "always",
    "Thank you for reading.", "Stay curious.",
)  # fmt: skip


@pytest.fixture(scope="module")
def registry() -> dict[str, Any]:
    pytest.importorskip("if_verifiable", reason="the port to compare with is not installed")
    instructions: dict[str, Any] = importlib.import_module(
        "if_verifiable.ifeval.instructions_registry"
    ).INSTRUCTION_DICT
    return instructions


def texts(rng: random.Random, constraint: Constraint) -> Iterator[str]:
    """Texts of random pieces, and of the words in the constraint."""
    named = [
        str(part) for value in constraint.arguments.values() for part in (value if isinstance(value, list) else [value])
    ]
    yield from rng.sample([text for case in CASES for text in case[2:]], k=8)
    for _ in range(6):
        parts = rng.choices([*PIECES, *named, *named], k=rng.randint(1, 9))
        yield rng.choice(("", " ", "\n")).join(parts)


def port_says(registry: dict[str, Any], constraint: Constraint, text: str) -> bool:
    check = registry[constraint.kind](constraint.kind)
    check.build_description(**constraint.arguments)
    return bool(check.check_following(text))


def agree(registry: dict[str, Any], rows: Iterator[dict[str, Any]]) -> dict[str, set[bool]]:
    """Compare on every constraint of the rows; the verdicts that occurred, by kind."""
    rng = random.Random(5)
    verdicts: dict[str, set[bool]] = {}
    for row in rows:
        for constraint in read_constraints(row):
            letter = constraint.arguments.get("letter", "a")
            if constraint.kind in NEEDS_PUNKT or constraint.kind.startswith("language") or not letter.isalpha():
                continue
            for text in texts(rng, constraint):
                verdict = CHECKS[constraint.kind](text, **constraint.arguments)
                verdicts.setdefault(constraint.kind, set()).add(verdict)
                assert verdict == port_says(registry, constraint, text), (constraint, text)
    return verdicts


def test_generated_constraints(registry: dict[str, Any]) -> None:
    verdicts = agree(registry, generate_instructions(800, seed=3))
    assert len(verdicts) >= 20
    assert sum(len(both) == 2 for both in verdicts.values()) >= 18  # both verdicts occurred, so both were compared


def test_ifevals_own_constraints(registry: dict[str, Any], shared: Path) -> None:
    with gzip.open(shared / "data/ifeval/input_data.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    assert len(rows) == 541
    verdicts = agree(registry, iter(rows))
    assert set(verdicts) == set(CHECKS) - NEEDS_PUNKT - {"language:response_language"}


def test_cases_by_hand(registry: dict[str, Any]) -> None:
    for kind, arguments, good, bad in CASES:
        if kind in NEEDS_PUNKT or arguments.get("letter") == "#" or arguments.get("forbidden_words") == ["d.c"]:
            continue  # the port puts words into patterns as they are
        constraint = Constraint(kind, arguments)
        assert (port_says(registry, constraint, good), port_says(registry, constraint, bad)) == (True, False), kind


def test_loose_variants(registry: dict[str, Any]) -> None:
    common = importlib.import_module("if_verifiable.common")
    for text in ("a\n*b*\nc", "one line", "\n\nx\n", ""):
        assert set(loose_variants(text)) == set(common.get_loose_transformations(text))
