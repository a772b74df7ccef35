"""A subject's completions: in the prompts' order and from their own random numbers, in any batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from suite_cases import subject

WORDS = ["a", "b", "c"]
TABLE = {word: {"a": 0.4, "b": 0.3, "c": 0.3} for word in WORDS}


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("count", [1, 3])
def test_batches_by_length_answer_in_the_order_of_the_prompts(tmp_path: Path, count: int, greedy: bool) -> None:
    whole = subject(tmp_path, WORDS, TABLE, batch_size=64)
    parts = subject(tmp_path, WORDS, TABLE, batch_size=2 * count, like=whole)
    ids = [whole.encoder.tokenizer(" ".join(["a"] * size))["input_ids"] for size in (3, 1, 7, 2, 5)]
    texts = [str(number) for number in range(len(ids))]
    expected = [
        whole.sample([row], [text], key=7, count=count, greedy=greedy).references[0]["prompt"]
        for row, text in zip(ids, texts, strict=True)
    ]
    together, apart = (each.sample(ids, texts, key=7, count=count, greedy=greedy) for each in (whole, parts))
    assert together.prompt_mask.sum(dim=1).tolist() == [len(row) for row in ids for _ in range(count)]
    assert [row["prompt"] for row in together.references] == [text for text in expected for _ in range(count)]
    assert whole.texts(together) == parts.texts(apart)
    assert torch.equal(together.row_ids, apart.row_ids)
    assert len(set(whole.texts(together))) > 1 or greedy
