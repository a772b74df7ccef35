"""Pad lists of token ids to rectangular tensors.

Masks are computed from lengths, never from ids: the pad token may be a real token of a text.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor


def left_pad(rows: Sequence[Sequence[int]], pad_id: int) -> tuple[Int[Tensor, "B P"], Bool[Tensor, "B P"]]:
    """Pad rows on the left, so that all end in the last column; return `(ids, mask)`."""
    return _pad(rows, pad_id, left=True)


def right_pad(rows: Sequence[Sequence[int]], pad_id: int) -> tuple[Int[Tensor, "B T"], Bool[Tensor, "B T"]]:
    """Pad rows on the right, so that all start in the first column; return `(ids, mask)`."""
    return _pad(rows, pad_id, left=False)


def right_pad_flags(rows: Sequence[Sequence[bool]]) -> Bool[Tensor, "B T"]:
    """Pad rows of flags on the right with False."""
    flags, live = _pad([[int(flag) for flag in row] for row in rows], 0, left=False)
    return flags.bool() & live


def _pad(rows: Sequence[Sequence[int]], pad_id: int, *, left: bool) -> tuple[Tensor, Tensor]:
    width = max((len(row) for row in rows), default=0)
    ids = torch.full((len(rows), width), pad_id, dtype=torch.long)
    mask = torch.zeros((len(rows), width), dtype=torch.bool)
    for i, row in enumerate(rows):
        live = slice(width - len(row), width) if left else slice(0, len(row))
        ids[i, live] = torch.tensor(row, dtype=torch.long)
        mask[i, live] = True
    return ids, mask
