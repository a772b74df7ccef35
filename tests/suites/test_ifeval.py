"""ifeval: answers whose verdicts are known, the four accuracies, kinds, best-of-n."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bigram import EOS
from pydantic import ValidationError
from runs import write_rows
from suite_cases import evaluate, figures, subject, values

from rlhf.errors import ConfigError, DataError
from rlhf.rewards.function import FunctionReward
from rlhf.suites.ifeval import IfevalSuite
from rlhf.suites.suite import find_suite

WORDS = ("q", "yes,", "*no*", "maybe", "loud")
ANSWERS = {"q": {"yes,": 1.0}, "yes,": {"*no*": 1.0}, "*no*": {EOS: 1.0}, "maybe": {EOS: 1.0}, "loud": {EOS: 1.0}}
HIGHLIGHTS = "detectable_format:number_highlighted_sections"
COIN = {"q": {"maybe": 0.5, "loud": 0.5}, "maybe": {EOS: 1.0}, "loud": {EOS: 1.0}}


def row(*kinds: str, **arguments: Any) -> dict[str, Any]:
    return {
        "prompt": "q",
        "instruction_id_list": list(kinds),
        "kwargs": [arguments if arguments else {} for _ in kinds],
    }


def settings(path: Path, **more: object) -> IfevalSuite:
    return IfevalSuite.model_validate({"dataset": {"path": str(path)}, "sampling": {"max_new_tokens": 4}, **more})


def test_only_one_most_likely_answer_is_the_same_under_every_seed(tmp_path: Path) -> None:
    """The best of several is sampled, even if greedy is set; a comparison took one seed's figures for all seeds."""
    path = write_rows(tmp_path / "rows.jsonl", [row("punctuation:no_comma")])
    source = {"type": "function", "target": "rewards.py:score"}
    assert settings(path).without_effect == ("source", "seed")
    assert not settings(path, best_of=2, source=source).without_effect
    assert settings(path, greedy=False).without_effect == ("source",)


def test_a_missing_package_is_named_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"rlhf-trainer\[ifeval\]"):
        find_suite("ifeval")[0].check_installed()


def test_accuracies_by_hand(tmp_path: Path) -> None:
    rows = [
        row("punctuation:no_comma"),  # the answer is "yes, *no*": never met
        row("keywords:existence", keywords=["yes"]),
        {**row("punctuation:no_comma", HIGHLIGHTS), "kwargs": [{}, {"num_highlights": 1}]},  # one of two is met
        row("startend:end_checker", end_phrase="no"),  # met once the asterisks are taken away
        row("no:such_kind"),
    ]
    result = evaluate(settings(write_rows(tmp_path / "i.jsonl", rows)), subject(tmp_path / "m", WORDS, ANSWERS))
    got = figures(result)
    assert (got["prompt_strict"].value, got["instruction_strict"].value) == (1 / 4, 2 / 5)
    assert (got["prompt_loose"].value, got["instruction_loose"].value) == (2 / 4, 3 / 5)
    assert (got["prompt_strict"].low, got["prompt_strict"].high) == pytest.approx((0.0456, 0.6994), abs=1e-4)  # Wilson
    assert got["instruction_strict"].n == 4  # prompts, over which the interval is
    assert (got["length"].value, got["truncated"].value) == (3.0, 0.0)
    assert result.skipped == {"no constraints that can be checked": 1}
    assert [group[0].value for group in result.groups.values()] == [0.0, 1.0, 1.0, 0.0]
    assert next(iter(result.groups)) == "punctuation:no_comma"  # the most frequent first
    assert result.examples[3]["strict"] == [False]
    assert result.examples[3]["loose"] == [True]
    for name, numbers in result.rows.items():
        assert sum(numbers) / len(numbers) == pytest.approx(got[name].value), name


def test_answers_that_are_cut_off(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "i.jsonl", [row("punctuation:no_comma")])
    model = subject(tmp_path / "m", WORDS, ANSWERS, max_new_tokens=2)
    got = values(evaluate(settings(rows, sampling={"max_new_tokens": 2}), model))
    assert (got["truncated"], got["length"]) == (1.0, 2.0)


def pick_loud(prompts: list[str], completions: list[str], references: list[dict[str, Any]]) -> list[float]:
    assert all(reference["instruction_id_list"] for reference in references)  # the rows' own columns
    return [float("loud" in completion) for completion in completions]


def test_the_best_of_several(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "i.jsonl", [row("keywords:existence", keywords=["loud"])] * 6)
    model = subject(tmp_path / "m", WORDS, COIN)
    target = f"{__file__}:pick_loud"
    source = {"type": "function", "target": target}
    reward = FunctionReward(target, {}, model.encoder.tokenizer)
    one = values(evaluate(settings(rows, greedy=False), model))["prompt_strict"]
    best = values(evaluate(settings(rows, best_of=8, source=source), model, source=reward))["prompt_strict"]
    assert one < best == 1.0  # eight fair coins, six times


def test_what_picks_must_be_named(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="best_of is 2, but nothing picks"):
        settings(tmp_path, best_of=2)


def test_other_rows_are_refused(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "i.jsonl", [{"prompt": "q"}])
    with pytest.raises(DataError, match="these are no prompts with constraints: there is no column"):
        evaluate(settings(path), subject(tmp_path / "m", WORDS, ANSWERS))
