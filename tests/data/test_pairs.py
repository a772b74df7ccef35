from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from made_tokenizers import byte_tokenizer
from transformers import PreTrainedTokenizerBase

from rlhf.config.data import PreferencesConfig, SftConfig
from rlhf.data.datasets import BatchStream
from rlhf.data.formats import DemoText, PairText
from rlhf.data.pairs import demonstration_pipeline, labelled_pipeline, pair_pipeline
from rlhf.errors import DataError
from rlhf.types import Demonstrations, PreferencePairs

Write = Callable[..., str]
ROWS = [
    {"prompt": "ab", "chosen": "c", "rejected": "def", "margin": 0.5},
    {"prompt": "a", "chosen": "ghi", "rejected": "j"},
]


def pairs_of(path: str, tokenizer: PreTrainedTokenizerBase, context: int | None = None, **options: Any) -> Any:
    return pair_pipeline(
        PreferencesConfig(path=path, **options), tokenizer, chat_template="auto", context=context
    ).load()


def demos_of(path: str, tokenizer: PreTrainedTokenizerBase, context: int | None = None, **options: Any) -> Any:
    return demonstration_pipeline(
        SftConfig(path=path, **options), tokenizer, chat_template="auto", context=context
    ).load()


def test_pairs_by_hand(write: Write, plain: PreTrainedTokenizerBase) -> None:
    pairs = pairs_of(write(ROWS), plain)
    batch = pairs.collate([1, 0])
    assert isinstance(batch, PreferencePairs)
    s, e, p = plain.bos_token_id, plain.eos_token_id, plain.pad_token_id
    a, b, c, d, ee, f, g, h, i, j = plain("abcdefghij", add_special_tokens=False)["input_ids"]
    assert batch.prompt_ids.tolist() == [[p, s, a], [s, a, b]]
    assert batch.prompt_mask.tolist() == [[False, True, True], [True, True, True]]
    assert batch.chosen_ids.tolist() == [[g, h, i, e], [c, e, p, p]]
    assert batch.chosen_mask.tolist() == [[True] * 4, [True, True, False, False]]
    assert batch.rejected_ids.tolist() == [[j, e, p, p], [d, ee, f, e]]
    assert batch.margins.tolist() == [0.0, 0.5]
    assert pairs.texts == (PairText("ab", "c", "def", 0.5), PairText("a", "ghi", "j", 0.0))


def test_longer_pairs_are_skipped_cut_at_the_prompt_or_fatal(write: Write, plain: PreTrainedTokenizerBase) -> None:
    path = write(
        [
            *ROWS,
            {"prompt": "wxyz", "chosen": "c", "rejected": "defg"},
            {"prompt": "a", "chosen": "c" * 9, "rejected": "d"},
        ]
    )
    skipped = pairs_of(path, plain, max_tokens=8)
    assert len(skipped) == 2
    assert "2 longer than max_tokens of 8 tokens [rows.jsonl:3 (10), rows.jsonl:4 (12)]" in skipped.skips.summary()
    cut = pairs_of(path, plain, max_tokens=8, too_long="truncate")
    assert [plain.decode(ids) for ids in cut.prompts] == ["<s>ab", "<s>a", "<s>yz"]
    assert [plain.decode(ids) for ids in cut.rejected] == ["def</s>", "j</s>", "defg</s>"]
    assert (cut.skips.cut, cut.skips.skipped) == (1, 1)
    with pytest.raises(DataError, match=r"rows.jsonl:3: 10 tokens, which is longer than the model's context of 8"):
        pairs_of(path, plain, context=8, too_long="error")


def test_demonstrations_by_hand(write: Write, plain: PreTrainedTokenizerBase) -> None:
    demos = demos_of(write([{"prompt": "ab", "completion": " c"}, {"prompt": "a", "completion": "d"}]), plain)
    batch = demos.collate([0, 1])
    assert isinstance(batch, Demonstrations)
    s, e, p = plain.bos_token_id, plain.eos_token_id, plain.pad_token_id
    a, b, c, d, space = plain("abcd ", add_special_tokens=False)["input_ids"]
    assert batch.prompt_ids.tolist() == [[s, a, b], [p, s, a]]
    assert batch.completion_ids.tolist() == [[space, c, e], [d, e, p]]
    assert batch.completion_mask.tolist() == [[True, True, True], [True, True, False]]
    assert torch.equal(batch.loss_mask, batch.completion_mask)


def test_plain_texts_are_learned_from_their_first_token(write: Write, plain: PreTrainedTokenizerBase) -> None:
    path = write([{"text": "abc"}])
    demos = demos_of(path, plain)
    assert (plain.decode(demos.prompts[0]), plain.decode(demos.completions[0])) == ("<s>", "abc</s>")
    assert demos.texts == (DemoText("", "abc"),)
    without = byte_tokenizer(pad="<pad>")
    demos = demos_of(path, without)
    assert (without.decode(demos.prompts[0]), without.decode(demos.completions[0])) == ("a", "bc</s>")
    bos_written = demos_of(write([{"text": "<s>abc"}]), plain)
    assert (bos_written.prompts[0], plain.decode(bos_written.completions[0])) == ([plain.bos_token_id], "abc</s>")


def test_a_cut_text_gets_no_eos(write: Write, plain: PreTrainedTokenizerBase) -> None:
    path = write([{"text": "abc"}, {"text": "abcd"}, {"text": "abcde"}])
    demos = demos_of(path, plain, max_tokens=5, too_long="truncate")
    assert [plain.decode(ids) for ids in demos.completions] == ["abc</s>", "abcd", "abcd"]
    assert demos.skips.cut == 2
    assert len(demos_of(path, plain, context=5)) == 1
    with pytest.raises(DataError, match="longer than max_tokens of 5"):
        demos_of(path, plain, max_tokens=5, too_long="error")
    with pytest.raises(DataError, match="its prompt alone"):
        demos_of(write([{"prompt": "abcde", "completion": "f"}]), plain, max_tokens=5, too_long="truncate")


def test_labelled_by_hand(write: Write, plain: PreTrainedTokenizerBase) -> None:
    rows = [{"prompt": "ab", "completion": "c", "label": True}, {"prompt": "a", "completion": "de", "label": False}]
    labelled = labelled_pipeline(PreferencesConfig(path=write(rows)), plain, chat_template="auto").load()
    batch = labelled.collate([1, 0])
    assert batch.desirable.tolist() == [False, True]
    assert [plain.decode(r[m]) for r, m in zip(batch.completion_ids, batch.completion_mask, strict=True)] == [
        "de</s>",
        "c</s>",
    ]
    assert len(batch.rows(torch.tensor([1]))) == 1


def test_every_batch_comes_from_its_step_alone(write: Write, plain: PreTrainedTokenizerBase) -> None:
    path = write([{"prompt": "a", "completion": "b" * i} for i in range(1, 6)])
    stream = BatchStream(demos_of(path, plain), 2, seed=3)
    again = BatchStream(demos_of(path, plain), 2, seed=3)
    lengths = [int(n) for step in range(1, 6) for n in stream.batch(step).completion_mask.sum(1)]
    assert sorted(lengths[:5]) == sorted(lengths[5:]) == [2, 3, 4, 5, 6]
    assert torch.equal(again.batch(4).completion_ids, stream.batch(4).completion_ids)
    assert stream.steps_per_epoch == 2.5


def test_conversations_with_bos_in_the_template(write: Write, llama_like: PreTrainedTokenizerBase) -> None:
    row = {
        "conversations": [{"from": "human", "value": "Hi"}],
        "chosen": {"from": "gpt", "value": "Yes"},
        "rejected": {"from": "gpt", "value": "No"},
    }
    pairs = pairs_of(write([row]), llama_like)
    assert llama_like.decode(pairs.prompts[0]) == "<s>[user] Hi</s>\n[assistant] "
    assert llama_like.decode(pairs.chosen[0]) == "Yes</s>"
    assert pairs.texts[0].prompt == "<s>[user] Hi</s>\n[assistant] "


def test_conversations_for_a_tokenizer_without_template(write: Write, plain: PreTrainedTokenizerBase) -> None:
    row = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]}
    with pytest.raises(DataError, match="the tokenizer has no chat template"):
        demos_of(write([row]), plain)


def test_data_without_usable_rows_say_why(write: Write, plain: PreTrainedTokenizerBase) -> None:
    with pytest.raises(DataError, match=r"no usable rows; 2 skipped: 1 chosen and rejected are the same .*; 1 empty"):
        pairs_of(write([ROWS[0] | {"rejected": "c"}, ROWS[0] | {"chosen": ""}]), plain)
    with pytest.raises(DataError, match="no rows at all"):
        pairs_of(write(""), plain)


def test_a_prompt_that_tokenizes_to_nothing_is_a_bad_row(write: Write) -> None:
    pairs = pairs_of(write([ROWS[0], ROWS[1] | {"prompt": ""}]), byte_tokenizer(pad="<pad>"))
    assert len(pairs) == 1
    assert pairs.skips.counts["empty prompt, and the tokenizer puts no token before a text"] == 1


def test_real_data_in_the_real_tokenizer(shared: Path, stories: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    harmless = pairs_of(str(shared / "data/hh_rlhf_harmless"), stories, split="test", max_tokens=512)
    assert len(harmless) == 221
    assert harmless.skips.counts["longer than max_tokens of 512 tokens"] == 92
    assert not harmless.skips.notes
    for i, text in enumerate(harmless.texts):
        assert stories.decode(harmless.prompts[i][1:] + harmless.chosen[i][:-1]) == f"{text.prompt}{text.chosen}"
    assert len(pairs_of(str(shared / "data/human_pairs"), stories, split="test", max_tokens=100_000)) == 207
    assert len(demos_of(str(shared / "data/tinystories"), stories, split="test", max_tokens=100_000)) == 213
    fixtures = shared / "data/format_fixtures"
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    config = PreferencesConfig(path=str(fixtures / "dpo_en_demo.json"), max_tokens=100_000)
    pairs = pair_pipeline(config, stories, chat_template=str(tmp_path / "t.jinja")).load()
    assert len(pairs) == 300
    assert all(str(text.prompt).startswith(("user: ", "system: ")) for text in pairs.texts)
    config = PreferencesConfig(path=str(fixtures / "kto_en_demo.json"), max_tokens=100_000)
    labelled = labelled_pipeline(config, stories, chat_template=str(tmp_path / "t.jinja")).load()
    assert int(labelled.collate(range(300)).desirable.sum()) == 150
    assert len(demos_of(str(fixtures / "alpaca_en_demo.json"), stories, max_tokens=100_000)) == 999
