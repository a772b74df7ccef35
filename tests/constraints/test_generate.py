"""Generated prompts: the same for the same seed, constraints that can be met, and none of IFEval's wording."""

from __future__ import annotations

import gzip
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rlhf.constraints.checks import CHECKS
from rlhf.constraints.reward import read_constraints

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from instructions import KINDS, LANGUAGES, generate_instructions

RUN = 8  # words


def runs_of_words(text: str) -> set[tuple[str, ...]]:
    tokens = re.findall(r"\w+", text.lower())
    return {tuple(tokens[i : i + RUN]) for i in range(len(tokens) - RUN + 1)}


def test_rows_depend_on_seed_and_number_alone() -> None:
    rows = list(generate_instructions(6, seed=4))
    assert rows[2:] == list(generate_instructions(4, seed=4, start=2))
    assert rows != list(generate_instructions(6, seed=5))
    assert [row["key"] for row in rows] == list(range(6))


def test_every_row_can_be_read_and_every_kind_occurs() -> None:
    rows = list(generate_instructions(1500, seed=0))
    kinds: Counter[str] = Counter()
    for row in rows:
        constraints = read_constraints(row)
        assert 1 <= len(constraints) <= 3
        assert len({constraint.kind for constraint in constraints}) == len(constraints)
        kinds.update(constraint.kind for constraint in constraints)
        for constraint in constraints:
            constraint.is_met("an answer")  # the arguments are of the right types
    assert set(kinds) == set(KINDS) == set(CHECKS)
    expected = {kind: KINDS[kind].weight for kind in KINDS}
    for kind in ("punctuation:no_comma", "startend:quotation", "detectable_format:title"):
        assert 0.7 < (kinds[kind] / kinds.total()) / (expected[kind] / sum(expected.values())) < 1.4, kind
    assert len({row["prompt"] for row in rows}) > 1450


def test_kinds_that_exclude_each_other_are_never_together() -> None:
    for row in generate_instructions(1500, seed=1):
        kinds = set(row["instruction_id_list"])
        assert not {"change_case:english_capital", "change_case:english_lowercase"} <= kinds
        assert "detectable_format:json_format" not in kinds or len(kinds) == 1
        assert not {"combination:repeat_prompt", "startend:quotation"} <= kinds


CASES = {"change_case:english_lowercase": str.islower, "change_case:english_capital": str.isupper}


@pytest.mark.parametrize("kind", CASES)
def test_two_of_three_requests_are_spelled_as_their_answer_has_to_be(kind: str) -> None:
    prompts = [row["prompt"] for row in generate_instructions(4000, seed=6) if kind in row["instruction_id_list"]]
    spelled = sum(map(CASES[kind], prompts))
    assert 0.55 < spelled / len(prompts) < 0.78
    for row in generate_instructions(1000, seed=6):
        if not set(row["instruction_id_list"]) & set(CASES):
            assert not CASES[kind](row["prompt"])


def test_languages_and_letters_are_not_asked_for_together() -> None:
    languages = set()
    for row in generate_instructions(2000, seed=7):
        kinds = set(row["instruction_id_list"])
        if "language:response_language" in kinds:
            languages.add(row["kwargs"][row["instruction_id_list"].index("language:response_language")]["language"])
            assert not kinds & set(CASES)
        if "detectable_format:multiple_sections" in kinds:
            assert not kinds & set(CASES)  # in capitals there is no "Section 1"
    assert languages == set(LANGUAGES.values())


def test_the_request_to_repeat_is_the_prompt_before_its_last_line() -> None:
    repeated = [
        row for row in generate_instructions(400, seed=2) if "combination:repeat_prompt" in row["instruction_id_list"]
    ]
    assert repeated
    for row in repeated:
        at = row["instruction_id_list"].index("combination:repeat_prompt")
        request = row["kwargs"][at]["prompt_to_repeat"]
        assert row["prompt"].startswith(request + "\n")


def test_no_eight_words_of_ifeval(shared: Path) -> None:
    with gzip.open(shared / "data/ifeval/input_data.jsonl.gz", "rt", encoding="utf-8") as file:
        ifeval: set[tuple[str, ...]] = set().union(*(runs_of_words(json.loads(line)["prompt"]) for line in file))
    assert len(ifeval) > 10_000
    rows: list[dict[str, Any]] = list(generate_instructions(4000, seed=0))
    common = {run for row in rows for run in runs_of_words(row["prompt"])} & ifeval
    options = {
        run for run in common if Counter(run)["answer"] >= 2
    }  # "My answer is no." and its like, the checker's own
    assert common - options == set()
