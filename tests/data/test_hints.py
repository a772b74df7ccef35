"""Hints in prompts: texts, conversations and transcripts; rows that cannot have one."""

from __future__ import annotations

from pathlib import Path

from runs import write_rows
from tiny_models import tokenizer

from rlhf.algorithms.rescue import Hint
from rlhf.config.data import PromptsConfig
from rlhf.data.prompts import hint_text, prompt_pipeline, with_hint

HINT = Hint(column="hint")


def test_a_hint_goes_behind_a_text_and_before_its_last_line_break() -> None:
    assert with_hint("2 + 2?\n", HINT, "count") == "2 + 2?\n\nHint: count\n"


def test_a_hint_goes_into_the_last_turn_of_the_user() -> None:
    talk = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "?"},
    ]
    hinted = with_hint(talk, HINT, "count")
    assert isinstance(hinted, list)
    assert [message["content"] for message in hinted] == ["Hi", "Yes?", "?\n\nHint: count"]
    assert talk[2]["content"] == "?"
    assert with_hint([{"role": "system", "content": "Hi"}], HINT, "count") is None


def test_a_hint_goes_before_a_transcript_s_last_speaker() -> None:
    hinted = with_hint("\n\nHuman: 2 + 2?\n\nAssistant:", HINT, "count")
    assert hinted == "\n\nHuman: 2 + 2?\n\nHint: count\n\nAssistant:"


def test_numbers_are_hints_and_blanks_are_none() -> None:
    row = {"answer": 4, "hint": "  ", "flag": True, "list": [1]}
    assert hint_text(row, "answer") == "4"
    assert [hint_text(row, name) for name in ("hint", "flag", "list", "missing")] == [None] * 4


def test_prompts_are_encoded_with_each_hint_where_they_have_one(tmp_path: Path) -> None:
    rows = [{"prompt": "t3 t4", "hint": "t5 t6"}, {"prompt": "t7"}, {"prompt": "t8", "hint": "t9 " * 9}]
    hints = [
        Hint(column="hint", share=0.5, template="{prompt} {hint}"),
        Hint(column="hint", template="{prompt} {hint}"),
    ]
    prompts = prompt_pipeline(
        PromptsConfig(path=str(write_rows(tmp_path / "rows.jsonl", rows)), max_prompt_tokens=6),
        tokenizer(),
        chat_template="none",
        hints=hints,
    ).load()
    assert prompts.ids == ([3, 4], [7], [8])
    assert prompts.hinted == (([3, 4, 5], [3, 4, 5, 6]), ([], []), ([8, 9, 9, 9, 9], []))
    batch, has_hint = prompts.collate_hinted([2, 1, 0], 2)
    assert has_hint.tolist() == [False, False, True]
    assert batch.prompt_mask.sum(1).tolist() == [1, 1, 4]
    assert "2 prompts that cannot be given the hint 'hint'" in prompts.skips.summary()
    assert "1 prompts that are too long with the hint 'hint'" in prompts.skips.summary()


def test_a_prompt_whose_turns_are_written_out_takes_no_hint(tmp_path: Path) -> None:
    """The hint stood behind the header of the assistant's turn, as the policy's own words."""
    words = tokenizer()
    words.chat_template = "{% for m in messages %}<s> t20 {{ m.content }} </s> {% endfor %}"
    words.chat_template += "{% if add_generation_prompt %}<s> t21 {% endif %}"
    rows = [{"prompt": "<s> t20 t3 </s> <s> t21", "hint": "t5"}, {"prompt": "t3", "hint": "t5"}]
    prompts = prompt_pipeline(
        PromptsConfig(path=str(write_rows(tmp_path / "rows.jsonl", rows))),
        words,
        chat_template="auto",
        hints=[Hint(column="hint", template="{prompt} {hint}")],
    ).load()
    assert prompts.ids[0] == prompts.ids[1]
    assert prompts.hinted == (([],), ([1, 20, 3, 5, 2, 1, 21],))
    assert "1 prompts that cannot be given the hint 'hint'" in prompts.skips.summary()
