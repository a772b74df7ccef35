"""Preference pairs: the implicit reward, scores and win rates, by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bigram import EOS
from runs import count_good, write_rows
from suite_cases import evaluate, figures, gains, subject, values

from rlhf.data.tokenizer import make_encoder
from rlhf.errors import DataError
from rlhf.evaluation.win_rate import Interval
from rlhf.rewards.function import FunctionReward
from rlhf.suites.hh import NO_REFERENCE, NO_SCORE, NO_SOURCE, HhSuite
from rlhf.suites.subject import Subject
from rlhf.types import Completions, Scores

WORDS = ("Human:", "Assistant:", "hi", "good", "bad")
ENDS = {"good": {EOS: 1.0}, "bad": {EOS: 1.0}}
POLICY = {**ENDS, "Assistant:": {"good": 0.6, "bad": 0.1}}
START = {**ENDS, "Assistant:": {"good": 0.3, "bad": 0.3}}


def pair(chosen: str, rejected: str, asked: str = "hi") -> dict[str, str]:
    head = f"\n\nHuman: {asked}\n\nAssistant:"
    return {"chosen": f"{head} {chosen}", "rejected": f"{head} {rejected}"}


TEMPLATE = (
    "{% for m in messages %}{{ '\\n\\nHuman: ' + m.content if m.role == 'user' else "
    "'\\n\\nAssistant: ' + m.content + eos_token }}{% endfor %}"
    "{{ '\\n\\nAssistant:' if add_generation_prompt else '' }}"
)
PAIRS = [pair("good", "bad")] * 3 + [pair("bad", "good")]


def settings(path: Path, **more: object) -> HhSuite:
    return HhSuite.model_validate(
        {"dataset": {"path": str(path)}, "sampling": {"max_new_tokens": 8}, "stop": ["Human:"], **more}
    )


def source(model: Subject) -> FunctionReward:
    return FunctionReward(f"{count_good.__module__}:{count_good.__name__}", {}, model.encoder.tokenizer)


def test_the_implicit_reward_by_hand(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "h.jsonl", PAIRS)
    model = subject(tmp_path / "m", WORDS, POLICY)
    start = subject(tmp_path / "s", WORDS, START, like=model)
    result = evaluate(settings(rows, beta=0.5), model, reference=start)
    got = figures(result)
    # beta (log .6/.3 - log .1/.3) = beta log 6 for good over bad, and less than nothing for the fourth pair
    assert got["implicit_accuracy"].value == 0.75
    assert (got["implicit_accuracy"].low, got["implicit_accuracy"].high) == pytest.approx((0.3006, 0.9544), abs=1e-4)
    assert got["implicit_margin"].value == pytest.approx(0.5 * math.log(6) * (3 - 1) / 4, abs=1e-5)
    assert got["logprob_accuracy"].value == 0.75
    assert [part.why for part in result.left_out] == [NO_SOURCE]
    itself = evaluate(settings(rows), model, reference=model)
    assert values(itself)["implicit_accuracy"] == 0.5  # a policy is no better than itself: all ties


def test_the_sampling_temperature_changes_no_log_probability(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "h.jsonl", PAIRS[:1])
    model = subject(tmp_path / "m", WORDS, {**ENDS, "Assistant:": {"good": 0.8, "bad": 0.2}})
    start = subject(tmp_path / "s", WORDS, {**ENDS, "Assistant:": {"good": 0.5, "bad": 0.5}}, like=model)
    cool = settings(rows, beta=1.0, sampling={"temperature": 0.5})
    figure_values = values(evaluate(cool, model, reference=start))
    assert figure_values["implicit_margin"] == pytest.approx(math.log(4), abs=1e-4)  # as eval/preference_margin


def test_of_a_side_with_several_turns_the_assistants_words_alone_count(tmp_path: Path) -> None:
    def side(answer: str, question: str) -> list[dict[str, str]]:
        turns = [("user", "hi"), ("assistant", answer), ("user", question), ("assistant", answer)]
        return [{"role": role, "content": content} for role, content in turns]

    # The user's words are many on the chosen side, and the two models differ in their probabilities.
    row = {"chosen": side("bad", "hi " * 20), "rejected": side("good", "hi")}
    talks = {**ENDS, "Human:": {"hi": 0.9}, "hi": {"hi": 0.5}, "Assistant:": {"good": 0.3, "bad": 0.2}}
    model = subject(tmp_path / "m", WORDS, talks)
    model.encoder.tokenizer.chat_template = TEMPLATE
    model = replace(model, encoder=make_encoder(model.encoder.tokenizer, "auto"))
    silent = {**ENDS, "Human:": {"hi": 0.1}, "hi": {"hi": 0.1}, "Assistant:": {"good": 0.2, "bad": 0.4}}
    start = subject(tmp_path / "s", WORDS, silent, like=model)
    result = evaluate(settings(write_rows(tmp_path / "h.jsonl", [row]), beta=0.5), model, reference=start)
    got = values(result)
    # beta 2 (log .2/.4 - log .3/.2): each side has two answers of a word and its end
    assert got["implicit_margin"] == pytest.approx(-0.5 * 2 * math.log(3), abs=1e-5)
    assert got["implicit_accuracy"] == got["logprob_accuracy"] == got["logprob_accuracy_per_token"] == 0.0


def test_scores_and_win_rates_by_hand(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "h.jsonl", PAIRS)
    always_good = {**ENDS, "Assistant:": {"good": 1.0}}
    always_bad = {**ENDS, "Assistant:": {"bad": 1.0}}
    model = subject(tmp_path / "m", WORDS, always_good)
    start = subject(tmp_path / "s", WORDS, always_bad, like=model)
    result = evaluate(settings(rows), model, reference=start, source=source(model))
    got = values(result)
    assert (got["score"], got["score_start"]) == (1.0, -1.0)
    assert (got["score_chosen"], got["score_rejected"]) == (0.5, -0.5)
    assert got["win_rate_start"] == 1.0
    assert got["win_rate_chosen"] == (3 * 0.5 + 1) / 4  # three ties
    assert got["source_accuracy"] == 0.75
    assert result.left_out == ()
    assert result.examples[0] == {
        "prompt": "\n\nHuman: hi\n\nAssistant:",
        "completion": " good",
        "score": 1.0,
        "score_chosen": 1.0,
    }


def test_a_pair_that_the_source_does_not_apply_to_is_left_out_of_the_scores(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "h.jsonl", PAIRS)
    model = subject(tmp_path / "m", WORDS, {**ENDS, "Assistant:": {"good": 1.0}})
    full = source(model)

    def abstains(completions: Completions) -> Scores:
        scores = full(completions)
        return replace(scores, values=torch.where(completions.row_ids == 0, math.nan, scores.values))

    result = evaluate(settings(rows), model, source=abstains)
    got = figures(result)
    assert got["score"].n == got["source_accuracy"].n == 3
    assert (got["score_chosen"].value, got["source_accuracy"].value) == (pytest.approx(1 / 3), pytest.approx(2 / 3))
    assert math.isnan(got["win_rate_chosen"].values[0])
    assert any("an answer of 1 pairs" in note for note in result.notes)
    nothing = evaluate(settings(rows), model, source=lambda c: replace(full(c), values=torch.full((len(c),), math.nan)))
    assert not {"score", "source_accuracy"} & set(values(nothing))
    assert NO_SCORE in [part.why for part in nothing.left_out]


def test_gains_are_paired_by_pair(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "h.jsonl", PAIRS)
    model = subject(tmp_path / "m", WORDS, {**ENDS, "Assistant:": {"good": 1.0}})
    start = subject(tmp_path / "s", WORDS, {**ENDS, "Assistant:": {"bad": 1.0}}, like=model)
    before, after = (
        evaluate(settings(rows), policy, reference=start, source=source(model)) for policy in (start, model)
    )
    paired = gains(before, after)
    assert set(paired) == set(values(after))
    assert paired["score"] == Interval(2.0, 2.0, 2.0)
    won, judged = paired["win_rate_start"], paired["source_accuracy"]
    assert won is not None
    assert won.low < won.value == won.high == 0.5
    assert judged is not None
    assert judged.value == 0.0  # of the judge, not of the model


def test_without_a_reference_the_start_model_is_left_out(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "h.jsonl", PAIRS)
    model = subject(tmp_path / "m", WORDS, POLICY)
    result = evaluate(settings(rows), model, source=source(model))
    assert {"win_rate_chosen", "score"} <= set(values(result))
    assert not {"win_rate_start", "implicit_accuracy"} & set(values(result))
    assert [part.why for part in result.left_out] == [NO_REFERENCE, NO_REFERENCE]


def test_an_answer_that_goes_on_with_another_turn_is_cut(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "h.jsonl", PAIRS[:2])
    goes_on = {"Assistant:": {"good": 1.0}, "good": {"Human:": 1.0}, "Human:": {"bad": 1.0}, "bad": {"bad": 1.0}}
    model = subject(tmp_path / "m", WORDS, goes_on)
    result = evaluate(settings(rows), model, source=source(model))
    assert values(result)["score"] == 1.0  # the bad words came after the stop
    assert "2 of the model's answers were cut" in result.notes[-1]
    uncut = evaluate(settings(rows, stop=[]), model, source=source(model))
    assert values(uncut)["score"] < 0


def test_a_prompt_without_room_counts_in_the_log_probabilities_only(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "h.jsonl", [*PAIRS, pair("good", "bad", "hi " * 55)])
    model = subject(tmp_path / "m", WORDS, POLICY)
    result = evaluate(settings(rows), model, source=source(model))
    got = figures(result)
    assert (got["logprob_accuracy"].n, got["score"].n) == (5, 4)
    assert "1 prompts leave no room for 8 more tokens" in result.notes[0]


def test_bad_pairs_are_counted_and_none_is_an_error(tmp_path: Path) -> None:
    model = subject(tmp_path / "m", WORDS, POLICY)
    rows = write_rows(tmp_path / "h.jsonl", [PAIRS[0], pair("good", "good"), {"chosen": "x", "rejected": "y"}])
    result = evaluate(settings(rows), model)
    assert result.n == 1
    assert result.skipped["chosen and rejected are the same"] == 1
    assert sum(result.skipped.values()) == 2
    same = write_rows(tmp_path / "same.jsonl", [pair("good", "good")])
    with pytest.raises(DataError, match="no usable rows"):
        evaluate(settings(same), model)


def test_the_real_pairs_are_read(shared: Path, tmp_path: Path) -> None:
    model = subject(tmp_path / "m", WORDS, POLICY)
    config = settings(
        shared / "data" / "hh_rlhf_harmless",
        dataset={"path": str(shared / "data" / "hh_rlhf_harmless"), "limit": 5, "max_tokens": 64},
    )
    result = evaluate(config, model)
    assert result.n == 5
