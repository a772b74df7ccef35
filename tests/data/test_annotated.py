"""The data of a label-wise loss, and pairs taken apart."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from rlhf.config.data import PreferencesConfig
from rlhf.data.pairs import (
    AnnotatedLabelledSet,
    AnnotatedPairSet,
    LabelledSet,
    PairSet,
    completion_labels,
    completion_rows,
    preference_pipeline,
)
from rlhf.errors import DataError

Write = Callable[..., str]
PAIRS = [{"prompt": "ab", "chosen": "c", "rejected": "def"}, {"prompt": "a", "chosen": "ghi", "rejected": "j"}]
LABELLED = [{"prompt": "ab", "completion": "c", "label": True}, {"prompt": "a", "completion": "de", "label": 0}]


def load(path: str, tokenizer: PreTrainedTokenizerBase, **options: object) -> PairSet | LabelledSet:
    config = PreferencesConfig.model_validate({"path": path, **options})
    return preference_pipeline(config, tokenizer, chat_template="auto").load()


def test_the_columns_say_which_it_is(write: Write, plain: PreTrainedTokenizerBase) -> None:
    assert isinstance(load(write(PAIRS), plain), PairSet)
    assert isinstance(load(write(LABELLED, "b.jsonl"), plain), LabelledSet)
    both = [{**row, "label": True} for row in PAIRS]
    assert isinstance(load(write(both, "c.jsonl"), plain), PairSet)


def test_renamed_columns_say_so_too(write: Write, plain: PreTrainedTokenizerBase) -> None:
    renamed = [{"q": row["prompt"], "a": row["completion"], "thumb": row["label"]} for row in LABELLED]
    columns = {"prompt": "q", "completion": "a", "label": "thumb"}
    labelled = load(write(renamed), plain, columns=columns)
    assert isinstance(labelled, LabelledSet)
    assert completion_labels(labelled) == (True, False)


def test_neither_is_an_error_that_names_the_columns(write: Write, plain: PreTrainedTokenizerBase) -> None:
    with pytest.raises(DataError, match="prompt"):
        load(write([{"prompt": "ab"}]), plain)


def test_pairs_taken_apart(write: Write, plain: PreTrainedTokenizerBase) -> None:
    pairs = load(write(PAIRS), plain)
    rows = completion_rows(pairs)
    assert [plain.decode(ids) for ids in rows.completions] == ["c</s>", "ghi</s>", "def</s>", "j</s>"]
    assert [plain.decode(ids) for ids in rows.prompts] == ["<s>ab", "<s>a"] * 2
    assert completion_labels(pairs) == (True, True, False, False)
    logprobs = torch.tensor([-1.0, -2.0, -3.0, -4.0], dtype=torch.float64)
    batch = AnnotatedLabelledSet(rows, completion_labels(pairs), logprobs).collate([2, 1])
    assert batch.desirable.tolist() == [False, True]
    assert batch.ref_logprobs.tolist() == [-3.0, -2.0]
    assert batch.completion_mask.sum(1).tolist() == [4, 4]
    assert torch.equal(batch.loss_mask, batch.completion_mask)


def test_annotated_pairs_keep_their_sides(write: Write, plain: PreTrainedTokenizerBase) -> None:
    pairs = load(write(PAIRS), plain)
    assert isinstance(pairs, PairSet)
    chosen, rejected = torch.tensor([-1.0, -2.0]), torch.tensor([-3.0, -4.0])
    batch = AnnotatedPairSet(pairs, chosen, rejected).collate([1, 0])
    assert batch.chosen_ref_logprobs.tolist() == [-2.0, -1.0]
    assert batch.rejected_ref_logprobs.tolist() == [-4.0, -3.0]
    assert batch.chosen_mask.sum(1).tolist() == [4, 2]
