from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf.data.tokenizer import left_pad, right_pad

ROWS = st.lists(st.lists(st.integers(0, 9), max_size=6), min_size=1, max_size=5)


def test_padding_by_hand() -> None:
    ids, mask = left_pad([[1, 2, 3], [4]], 9)
    assert ids.tolist() == [[1, 2, 3], [9, 9, 4]]
    assert mask.tolist() == [[True, True, True], [False, False, True]]
    ids, mask = right_pad([[1, 2, 3], [4]], 9)
    assert ids.tolist() == [[1, 2, 3], [4, 9, 9]]
    assert mask.tolist() == [[True, True, True], [True, False, False]]


@given(ROWS, st.integers(0, 9))
def test_masks_give_the_rows_back_even_where_pad_is_a_token_of_theirs(rows: list[list[int]], pad: int) -> None:
    for padded in (left_pad, right_pad):
        ids, mask = padded(rows, pad)
        assert [row[live].tolist() for row, live in zip(ids, mask, strict=True)] == rows
        assert bool((ids[~mask] == pad).all())
        assert ids.dtype == torch.long
