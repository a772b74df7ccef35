"""Rows of matrix products in 16 bits on a CPU: rounded up, so that few different numbers of them occur."""

from __future__ import annotations

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
