from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from made_tokenizers import byte_tokenizer
from transformers import PreTrainedTokenizerBase

from rlhf.config.data import PromptsConfig
from rlhf.data.prompts import PromptSet, PromptStream, prompt_pipeline
from rlhf.data.rows import place_of
from rlhf.errors import DataError
from rlhf.references import own_prompt
from rlhf.types import Prompts

Write = Callable[..., str]


def load(path: str, tokenizer: PreTrainedTokenizerBase, *, chat_template: str = "auto", **options: Any) -> PromptSet:
    context, new = options.pop("context", None), options.pop("max_new_tokens", 0)
    config = PromptsConfig(path=path, **options)
    return prompt_pipeline(config, tokenizer, chat_template=chat_template, context=context, max_new_tokens=new).load()


def same(a: Prompts, b: Prompts) -> bool:
    return (
        torch.equal(a.prompt_ids, b.prompt_ids)
        and torch.equal(a.prompt_mask, b.prompt_mask)
        and torch.equal(a.row_ids, b.row_ids)
        and a.references == b.references
    )


@pytest.fixture
def seven(write: Write, plain: PreTrainedTokenizerBase) -> PromptSet:
    return load(write([{"prompt": "p" * i, "answer": i} for i in range(1, 8)]), plain)


def test_prompts_are_left_padded_and_keep_their_columns(write: Write, plain: PreTrainedTokenizerBase) -> None:
    prompts = load(write([{"prompt": "abc", "answer": 7}, {"prompt": "d", "answer": 8}]), plain).all()
    bos, pad = plain.bos_token_id, plain.pad_token_id
    a, b, c, d = plain("abcd", add_special_tokens=False)["input_ids"]
    assert prompts.prompt_ids.tolist() == [[bos, a, b, c], [pad, pad, bos, d]]
    assert prompts.prompt_mask.tolist() == [[True] * 4, [False, False, True, True]]
    assert prompts.references == ({"prompt": "abc", "answer": 7}, {"prompt": "d", "answer": 8})
    assert prompts.row_ids.tolist() == [0, 1]


def test_the_own_prompt_of_a_reference_is_the_value_of_its_row(
    write: Write, plain: PreTrainedTokenizerBase, chatml: PreTrainedTokenizerBase
) -> None:
    values = ["abc", [{"role": "user", "content": "abc"}]]
    templated = load(write([{"prompt": value} for value in values]), chatml)
    assert [own_prompt(reference) for reference in templated.references] == values
    assert all(reference["prompt"] != "abc" for reference in templated.references)
    assert own_prompt(load(write([{"prompt": "abc"}]), plain).references[0]) == "abc"
    taken = {"prompt": "abc", "prompt_messages": [], "prompt_is_conversation": True}  # columns of ours in a file
    assert own_prompt(load(write([taken]), chatml).references[0]) == "abc"
    assert load(write([taken]), plain).references[0] == {"prompt": "abc"}


def test_a_fresh_stream_gives_the_same_batch(seven: PromptSet) -> None:
    first = [PromptStream(seven, 3, seed=5).batch(step) for step in range(1, 12)]
    for step in (11, 2, 7):
        assert same(PromptStream(seven, 3, seed=5).batch(step), first[step - 1])
    assert not same(PromptStream(seven, 3, seed=6).batch(2), first[1])


def test_every_prompt_comes_once_an_epoch_across_batches(seven: PromptSet) -> None:
    stream = PromptStream(seven, 3, seed=0)
    answers = [r["answer"] for step in range(1, 8) for r in stream.batch(step).references]
    for epoch in range(3):
        assert sorted(answers[7 * epoch : 7 * epoch + 7]) == list(range(1, 8))
    assert stream.batch(4).row_ids.tolist() == [0, 1, 2]
    assert stream.steps_per_epoch == pytest.approx(7 / 3)


def test_evaluation_reads_all_in_order_with_numbers_of_the_set(seven: PromptSet) -> None:
    batches = list(seven.batches(3))
    assert [len(b) for b in batches] == [3, 3, 1]
    assert [n for b in batches for n in b.row_ids.tolist()] == list(range(7))
    assert [r["answer"] for b in batches for r in b.references] == list(range(1, 8))


def test_first_tokens_are_of_texts_and_not_of_conversations(write: Write, llama_like: PreTrainedTokenizerBase) -> None:
    """The first tokens of a conversation were its template's headers."""
    rows = [{"messages": [{"role": "user", "content": "Once upon a time"}]}]
    with pytest.raises(DataError, match="first_tokens cuts texts, and this prompt is a conversation"):
        load(write(rows), llama_like, first_tokens=4)


def test_first_tokens_do_not_count_bos(write: Write, plain: PreTrainedTokenizerBase) -> None:
    prompts = load(write([{"text": "Once upon"}, {"text": "On"}]), plain, first_tokens=4)
    assert prompts.texts == ("Once", "On")
    assert [len(ids) for ids in prompts.ids] == [5, 3]
    assert prompts.references[0] == {"text": "Once upon", "prompt": "Once"}
    without = load(write([{"text": "Once upon"}]), byte_tokenizer(pad="<pad>"), first_tokens=4)
    assert [len(ids) for ids in without.ids] == [4]


def test_longer_prompts_are_skipped_cut_or_fatal(write: Write, plain: PreTrainedTokenizerBase) -> None:
    path = write([{"prompt": "abc"}, {"prompt": "abcdef"}])
    skipped = load(path, plain, max_prompt_tokens=4)
    assert skipped.texts == ("abc",)
    assert "1 skipped: 1 longer than max_prompt_tokens of 4 tokens [rows.jsonl:2 (7)]" in skipped.skips.summary()
    assert skipped.skips.summary().endswith(
        "Warning: 1 of 2 rows are too long: raise the limit, or cut them with too_long=truncate"
    )
    cut = load(path, plain, max_prompt_tokens=4, too_long="truncate")
    assert cut.texts == ("abc", "def")
    assert plain.decode(cut.ids[1]) == "<s>def"
    assert cut.skips.cut == 1
    with pytest.raises(DataError, match=r"rows.jsonl:2: 7 tokens, which is longer than max_prompt_tokens of 4"):
        load(path, plain, max_prompt_tokens=4, too_long="error")
    with pytest.raises(DataError, match="no usable rows"):
        load(path, plain, max_prompt_tokens=1, too_long="truncate")


def test_a_prompt_that_leaves_no_room_in_the_context_is_too_long(write: Write, plain: PreTrainedTokenizerBase) -> None:
    path = write([{"prompt": "abc"}, {"prompt": "abcdef"}])
    assert len(load(path, plain, context=15, max_new_tokens=8)) == 2
    short = load(path, plain, context=14, max_new_tokens=8)
    assert short.texts == ("abc",)
    assert "1 longer than what sampling.max_new_tokens=8 leaves of the model's context of 14" in short.skips.summary()
    assert load(path, plain, context=14, max_new_tokens=8, too_long="truncate").texts == ("abc", "bcdef")
    with pytest.raises(DataError, match=r"max_new_tokens of 14 leaves no room for a prompt: the model's context is 14"):
        load(path, plain, context=14, max_new_tokens=14)
    assert len(load(path, plain, context=14, max_new_tokens=8, max_prompt_tokens=6)) == 1


def test_limit_counts_usable_rows_and_reads_none_beyond(write: Write, plain: PreTrainedTokenizerBase) -> None:
    rows = [{"prompt": "a"}, {"prompt": None}, {"prompt": "b"}, {"prompt": "c"}, {"prompt": 3}]
    prompts = load(write(rows), plain, limit=2)
    assert prompts.texts == ("a", "b")
    assert dict(prompts.skips.counts) == {"no prompt": 1}
    assert len(load(write(rows), plain)) == 3


def test_an_empty_prompt_needs_a_bos(write: Write, plain: PreTrainedTokenizerBase) -> None:
    path = write([{"prompt": ""}, {"prompt": "a"}])
    assert load(path, plain).ids[0] == [plain.bos_token_id]
    prompts = load(path, byte_tokenizer(pad="<pad>"))
    assert prompts.texts == ("a",)
    assert dict(prompts.skips.counts) == {"empty prompt, and the tokenizer puts no token before a text": 1}


def test_bad_rows_can_be_fatal(write: Write, plain: PreTrainedTokenizerBase) -> None:
    with pytest.raises(DataError, match=r"rows.jsonl:2: no prompt. Fix the row"):
        load(write([{"prompt": "a"}, {"prompt": None}, {"prompt": "b"}]), plain, bad_rows="error")


def test_plain_prompts_beside_a_template_are_remarked_upon(
    write: Write, chatml: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    path = write([{"prompt": "Hi"}])
    turned = load(path, chatml)
    assert turned.texts == ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",)
    assert "Text prompts become user turns" in turned.skips.summary()
    (tmp_path / "t.jinja").write_text(str(chatml.chat_template))
    wrapped = load(path, chatml, chat_template=str(tmp_path / "t.jinja"))
    assert wrapped.texts == ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",)
    assert not wrapped.skips.notes
    assert not load(path, chatml, chat_template="none").skips.notes


def test_conversations_are_written_by_the_template(write: Write, chatml: PreTrainedTokenizerBase) -> None:
    row = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]}
    prompts = load(write([row]), chatml)
    assert prompts.texts == ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",)
    assert chatml.decode(prompts.ids[0]) == prompts.texts[0]
    assert prompts.references[0]["messages"] == row["messages"]


def test_real_stories(shared: Path, stories: PreTrainedTokenizerBase) -> None:
    prompts = load(
        str(shared / "data/tinystories"), stories, split="test", first_tokens=12, context=512, max_new_tokens=48
    )
    assert len(prompts) == 213
    assert Counter(map(len, prompts.ids)) == {13: 213}
    assert all(str(r["text"]).startswith(text) for r, text in zip(prompts.references, prompts.texts, strict=True))
    gsm = load(str(shared / "data/gsm8k"), stories, split="test", max_prompt_tokens=512, limit=50)
    assert all("####" in str(r["answer"]) for r in gsm.references)


def test_each_malformed_row_is_counted_in_one_part(write: Write, plain: PreTrainedTokenizerBase) -> None:
    path = write([{"prompt": f"number {i}"} for i in range(40)])
    with open(path, "a", encoding="utf-8") as file:
        file.writelines("{broken\n" if i % 2 else '{"prompt": 5}\n' for i in range(20))
    whole = load(path, plain).skips
    parts = [load(path, plain, part=part).skips for part in ([0, 0.3], [0.3, 1])]
    assert whole.skipped == 20
    assert sum(part.used for part in parts) == 40
    assert all(part.skipped for part in parts)
    for reason, count in whole.counts.items():
        assert sum(part.counts[reason] for part in parts) == count
    with pytest.raises(DataError, match="not JSON"):
        load(path, plain, part=[0, 0.3], bad_rows="error")


def test_a_file_of_malformed_rows_is_told_with_the_reasons_of_all_of_them(
    write: Write, plain: PreTrainedTokenizerBase
) -> None:
    path = write([{"prompt": 5}] * 3)
    for part in ([0.0, 0.001], [0.001, 1.0]):
        with pytest.raises(DataError, match=r"no usable rows; 3 skipped: 3 "):
            load(path, plain, part=part)


def test_parts_have_no_prompt_in_common_and_miss_none(write: Write, plain: PreTrainedTokenizerBase) -> None:
    path = write([{"prompt": f"number {i % 40}", "answer": i} for i in range(80)])  # every prompt twice
    first, second = (load(path, plain, part=part).texts for part in ([0, 0.5], [0.5, 1]))
    assert len(first) + len(second) == 80
    assert not set(first) & set(second)
    assert 20 <= len(first) <= 60
    assert load(path, plain, part=[0, 0.5], limit=5).texts == first[:5]  # rows of the part are counted
    assert load(path, plain, part=[0, 1]).texts == load(path, plain).texts
    assert place_of("number 1") == pytest.approx(0.2779, abs=1e-4)  # of its text alone
    with pytest.raises(ValueError, match="its first number has to be the smaller"):
        PromptsConfig(path=path, part=(0.5, 0.5))
