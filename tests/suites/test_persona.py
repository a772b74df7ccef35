"""Yes/no items by log-probability, with the two answers in both orders."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from bigram import EOS
from runs import write_rows
from suite_cases import evaluate, figures, gains, item, loaded, subject, values

from rlhf.data.rows import BadRow
from rlhf.errors import DataError
from rlhf.evaluation.win_rate import Interval, wilson
from rlhf.suites.persona import COLUMNS, ItemLogOdds, PersonaSuite, read_question
from rlhf.suites.questions import read_items
from rlhf.suites.suite import fill

WORDS = ("Yes", "No", "q", "Answer:")
# After the answer that is offered last, the other one is the likelier: odds 3 and 1/7 of Yes.
SWAYED = {"No": {"Yes": 0.6, "No": 0.2}, "Yes": {"Yes": 0.1, "No": 0.7}}
# How readily the model stops after an answer is no part of the verdict.
STEADY = {"Answer:": {"Yes": 0.8, "No": 0.1}, "Yes": {EOS: 0.01}, "No": {EOS: 0.9}}
OFFERED = "{question} {first} {second}"


def settings(path: Path, **more: object) -> PersonaSuite:
    return PersonaSuite.model_validate({"dataset": {"path": str(path)}, **more})


def test_the_likelier_answer_by_hand(tmp_path: Path) -> None:
    rows = [item("q q", " Yes"), item("q", " Yes"), item("q", " No")]
    model = subject(tmp_path / "m", WORDS, STEADY)
    result = evaluate(settings(write_rows(tmp_path / "p.jsonl", rows)), model)
    got = values(result)
    assert got["matching_rate"] == pytest.approx(2 / 3)
    assert got["matching_probability"] == pytest.approx((8 / 9 + 8 / 9 + 1 / 9) / 3, abs=1e-5)
    assert (got["yes_rate"], got["flip_rate"], got["first_rate"]) == (1.0, 0.0, 0.5)
    assert result.n == 3
    assert result.examples[0]["log_odds_of_yes"] == pytest.approx([math.log(8), math.log(8)], abs=1e-4)
    assert result.left_out == ()


def test_a_model_swayed_by_the_order_is_shown_to_be(tmp_path: Path) -> None:
    rows = [item("q", " Yes"), item("q", " No"), item("q", " No"), item("q", " No")]
    model = subject(tmp_path / "m", WORDS, SWAYED)
    result = evaluate(settings(write_rows(tmp_path / "p.jsonl", rows), template=OFFERED), model)
    got = values(result)
    assert got["flip_rate"] == 1.0
    assert got["matching_rate_yes_first"] == 0.25  # always Yes then
    assert got["matching_rate_no_first"] == 0.75  # always No
    assert got["matching_rate"] == 0.75  # log 3 - log 7 < 0: No, on balance
    assert got["first_rate"] == 1.0  # the answer offered first, each time
    assert figures(result)["matching_rate"].low == pytest.approx(0.3006, abs=1e-4)  # Wilson, 3 of 4
    assert result.examples[0]["log_odds_of_yes"] == pytest.approx([math.log(3), -math.log(7)], abs=1e-4)


def test_gains_are_paired_by_item(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "p.jsonl", [item("q", " Yes"), item("q", " No"), item("q", " No"), item("q", " No")])
    start = subject(tmp_path / "s", WORDS, STEADY)
    model = subject(tmp_path / "m", WORDS, SWAYED, like=start)
    asked = settings(rows, template=OFFERED)
    paired = gains(evaluate(asked, start), evaluate(asked, model))
    assert len(paired) == 7
    assert None not in paired.values()
    low = 1 - math.hypot(1 - wilson(4, 4)[0], wilson(0, 4)[1])
    assert paired["flip_rate"] == Interval(1.0, pytest.approx(low), 1.0)  # type: ignore[arg-type]


def test_without_offered_answers_there_is_one_order_and_no_check(tmp_path: Path) -> None:
    model = subject(tmp_path / "m", WORDS, STEADY)
    asked = settings(write_rows(tmp_path / "p.jsonl", [item("q", " Yes")]), template="{question} Answer:")
    result = evaluate(asked, model)
    assert set(values(result)) == {"matching_rate", "matching_probability", "yes_rate"}
    assert [part.what for part in result.left_out] == ["position check"]


def test_malformed_items_are_counted_and_shown(tmp_path: Path) -> None:
    rows = [
        item("q", "YES."),  # spelt in its own way, and usable
        item("q", " Maybe"),
        item("q", " Yes", answer_not_matching_behavior=" Yes"),
        item("", " Yes"),
        item("q", " No", label_confidence=0.4),
        item("q", " No", label_confidence="high"),
        item("q " * 60, " No"),
        {"question": "q"},
    ]
    model = subject(tmp_path / "m", WORDS, STEADY)
    result = evaluate(settings(write_rows(tmp_path / "p.jsonl", rows), min_confidence=0.5), model)
    assert result.n == 1
    assert result.skipped == {
        "answer_matching_behavior is neither Yes nor No": 1,
        "both answers are the same": 1,
        "empty question": 1,
        "label_confidence below 0.5": 1,
        "label_confidence is not a number from 0 to 1": 1,
        "longer than the model's context of 64 tokens": 1,
        "no answer_matching_behavior": 1,
    }
    assert "p.jsonl:2 (' Maybe')" in result.notes[0]
    assert values(result)["matching_rate"] == 1.0


def test_a_folder_of_behaviours_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write_rows(tmp_path / "data" / "brave.jsonl", [item("q", " Yes")] * 2)
    write_rows(tmp_path / "data" / "timid.jsonl", [item("q", " No")])
    result = evaluate(settings(tmp_path / "data"), subject(tmp_path / "m", WORDS, STEADY))
    assert {name: group[0].value for name, group in result.groups.items()} == {"brave": 1.0, "timid": 0.0}
    assert result.n == 3


def test_no_usable_item_and_a_tokenizer_that_cannot_tell(tmp_path: Path) -> None:
    model = subject(tmp_path / "m", WORDS, STEADY)
    bad = write_rows(tmp_path / "bad.jsonl", [item("q", " Yes", answer_not_matching_behavior="yes")])
    with pytest.raises(DataError, match="no usable rows; 1 skipped: 1 both answers are the same"):
        evaluate(settings(bad), model)
    good, mute = write_rows(tmp_path / "good.jsonl", [item("q", " Yes")]), subject(tmp_path / "mute", ("q",), {})
    with pytest.raises(DataError, match="cannot tell Yes from No"):
        evaluate(settings(good), mute)


def test_a_chat_template_makes_the_question_a_turn(tmp_path: Path) -> None:
    # The template ends in "Answer:", which decides the next token; the question's own end does not.
    table = {"Answer:": {"Yes": 0.8, "No": 0.1}, "q": {"Yes": 0.1, "No": 0.8}}
    model = subject(tmp_path / "m", WORDS, table)
    path = write_rows(tmp_path / "p.jsonl", [item("q", " Yes")])
    assert values(evaluate(settings(path, template="{question}"), model))["yes_rate"] == 0.0
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}Answer: {% endif %}"
    )
    model.encoder.tokenizer.chat_template = (tmp_path / "t.jinja").read_text()
    model.encoder.tokenizer.save_pretrained(tmp_path / "m")
    chatty = loaded(tmp_path / "m")
    assert values(evaluate(settings(path, template="{question}"), chatty))["yes_rate"] == 1.0


def test_a_tie_is_half_a_match_and_no_flip() -> None:
    verdicts = ItemLogOdds(yes_matches=True, log_odds=(0.0, 0.0))
    assert verdicts.matches(verdicts.balanced) == 0.5
    assert not verdicts.flips
    assert ItemLogOdds(yes_matches=False, log_odds=(1.0, -2.0)).matches(-0.5) == 1.0


def test_braces_in_a_question_stay() -> None:
    assert fill("{question} {first} {other}", question="a {first} {b}", first="Yes") == "a {first} {b} Yes {other}"


def test_a_bad_row_names_its_answer() -> None:
    with pytest.raises(BadRow, match="answer_matching_behavior is neither Yes nor No: 'A'"):
        read_question(item("q", "A"))


def test_the_real_items_are_all_read(shared: Path) -> None:
    folder = shared / "data" / "anthropic_persona_evals"
    items, skips = read_items(settings(folder).dataset, read_question, columns=COLUMNS, what="yes/no items")
    assert (len(items), skips.skipped) == (8000, 0)
    assert sum(entry.value.yes_matches for entry in items) == 4000
    assert len({entry.file for entry in items}) == 8
