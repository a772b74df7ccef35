"""Degraded copies keep their ending."""

from __future__ import annotations

import pytest
import torch
from tiny_models import EOS, padded

from reward_model.evaluate import degrade, halved, repeated

ROWS = [[5, 6, 7, EOS], [8, 9], [EOS], [4, EOS]]


@pytest.mark.parametrize(
    "how, expected",
    [
        (repeated, [[5, 6, 7, 5, 6, 7, EOS], [8, 9, 8, 9], [EOS], [4, 4, EOS]]),
        (halved, [[5, 6, EOS], [8], [EOS], [4, EOS]]),
    ],
)
@pytest.mark.parametrize("left", [True, False])
def test_by_hand(how, expected: list[list[int]], left: bool) -> None:
    ids, mask = degrade(*padded(ROWS, left=left, fill=3), how, eos_ids=(EOS,))
    assert [row[live].tolist() for row, live in zip(ids, mask, strict=True)] == expected


def test_another_ending_is_part_of_the_text() -> None:
    ids, _ = degrade(torch.tensor([[5, EOS]]), torch.ones(1, 2, dtype=torch.bool), repeated, eos_ids=(9,))
    assert ids.tolist() == [[5, EOS, 5, EOS]]
