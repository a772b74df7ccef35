"""Matrix products in 16 bits on a CPU: few different numbers of rows, and each weight cast once an optimizer step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor

MULTIPLE = 64
SHORT = (torch.bfloat16, torch.float16)


def low_rows(x: Float[Tensor, "N D"], dtype: torch.dtype) -> Float[Tensor, "M D"]:
    """`x` in `dtype`; on a CPU in 16 bits with rows of zeros below, up to a multiple of 64.

    oneDNN makes a program for each shape of a product in 16 bits, which takes about as long as the product, and keeps
    it: rows without padding would be another shape in every pass. What comes of the rows below is cut off by the
    caller; as part of a sum they are zero.
    """
    missing = -len(x) % MULTIPLE if x.device.type == "cpu" and dtype in SHORT else 0
    if not missing:
        return x.to(dtype)
    found = x.new_empty(len(x) + missing, x.shape[1], dtype=dtype)
    found[: len(x)] = x
    found[len(x) :] = 0
    return found


# Where a weight lies -> the weight, its version, its copy in 16 bits. By place: each pass views fused weights anew.
_CASTS: dict[tuple[int, torch.Size, tuple[int, ...]], tuple[Tensor, int, Tensor]] | None = None


@contextmanager
def weights_cast_once() -> Iterator[None]:
    """Keep the copies that `low_weight` makes until the outermost of these contexts ends.

    Open it around passes between which no weight changes: the micro-batches of one optimizer step, or a rollout's.
    """
    global _CASTS  # not a variable of the context: backward passes may run in a thread of autograd's
    if _CASTS is not None:
        yield
        return
    _CASTS = {}
    try:
        yield
    finally:
        _CASTS = None


def low_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `weight` in `dtype`: itself where it has it, on a CPU the copy that `weights_cast_once` keeps."""
    if weight.dtype == dtype:
        return weight
    if _CASTS is None or weight.device.type != "cpu":
        return weight.to(dtype)
    place = weight.data_ptr(), weight.shape, weight.stride()
    kept = _CASTS.get(place)
    if kept is None or kept[1] != weight._version or kept[2].dtype != dtype:
        alias = weight.detach()  # keeps the memory, so that nothing else can come to lie there
        kept = alias, weight._version, alias.to(dtype)
        _CASTS[place] = kept
    return kept[2]
