"""Spread weights over the numbers that bfloat16 rounds to them, so that small steps of training count.

Arithmetic in bfloat16 rounds float32 weights for every product. A model that was published in bfloat16 lies on the grid
of that rounding, and a step below half of its spacing (1/512 of a weight at most) is rounded back to the start: no
product changes, although the float32 weight did. If each weight has its own offset of less than half a spacing, the
start rounds to the same numbers, and a step of a tenth of the spacing takes a tenth of the weights to the next number:
the mean of the rounded steps is the step. This is dither (Roberts 1962, "Picture coding using pseudo-random noise").
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rlhf.runtime.engine import Engine

CHUNK = 2**18  # elements at a time, which stay in the cache
LARGEST = 2**15 - 1  # offset; half the spacing of bfloat16 is 2^15 spacings of float32
SMALLEST_NORMAL, INFINITE = 0x00800000, 0x7F800000  # bits of float32


@torch.no_grad()
def dither_matrices(module: nn.Module, engine: Engine, *, frozen: bool = False) -> None:
    """Add offsets to the trained float32 matrices of a module whose arithmetic is in bfloat16, in place.

    Vectors are not rounded by the arithmetic, and stay. So do weights that are not trained, unless `frozen`.
    """
    for parameter in module.parameters():
        is_matrix = len(getattr(parameter, "ds_shape", parameter.shape)) > 1  # of a shard, shape is the part's
        if (parameter.requires_grad or frozen) and parameter.dtype == torch.float32 and is_matrix:
            part, first = engine.part(parameter), engine.first_element(parameter)
            flat = part.reshape(-1)  # a copy of a transposed weight
            for start in range(0, len(flat), CHUNK):
                piece = flat[start : start + CHUNK]
                piece.copy_(dither(piece, first=first + start))
            if not part.is_contiguous():
                part.copy_(flat.view_as(part))


def dither(numbers: Float[Tensor, " N"], *, first: int = 0) -> Float[Tensor, " N"]:
    """Add to each number that bfloat16 has exactly an offset below half of its spacing there.

    Other numbers stay: they are spread already, and a second offset would take them to other numbers of bfloat16. So do
    zeros.

    Args:
        numbers: in float32.
        first: the index of the first number in its flattened weight. The offset is a hash of the index, so that it is
            the same on every device and for every sharding.
    """
    bits = numbers.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    is_exact = (bits & 0xFFFF == 0) & (magnitude >= SMALLEST_NORMAL) & (magnitude < INFINITE)
    return (bits + torch.where(is_exact, _offsets(first, len(bits), bits.device), 0)).view(torch.float32)


def _offsets(first: int, count: int, device: torch.device) -> Tensor:
    """Return evenly distributed integers from -LARGEST to LARGEST: a hash of the indices from `first` on.

    The upper half of the bits of x ^= x >> 16, x *= a, x ^= x >> 15, x *= b, in 32 bits without a sign.
    """
    x = torch.arange(first, first + count, device=device).to(torch.int32)
    x ^= (x >> 16) & 0xFFFF
    x *= 0x7FEB352D
    x ^= (x >> 15) & 0x1FFFF
    x *= 0x846CA68B - 2**32
    return (x >> 16).clamp_(min=-LARGEST)
