"""Spread weights over the numbers that bfloat16 rounds to them, so that small steps of training count.

Arithmetic in bfloat16 rounds float32 weights for every product. A model that was published in bfloat16 lies on the grid
of that rounding, and a step below half of its spacing (1/512 of a weight at most) is rounded back to the start: no
product changes, although the float32 weight did. If each weight has its own offset of less than half a spacing, the
start rounds to the same numbers, and a step of a tenth of the spacing takes a tenth of the weights to the next number:
the mean of the rounded steps is the step. This is dither (Roberts 1962, "Picture coding using pseudo-random noise").

A model that was published in bfloat16 and trained in float32 is still near the grid: rounded to the nearest numbers,
most of its training is gone. The same offsets, added to its weights, keep the mean of what was trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rlhf.runtime.engine import Engine

CHUNK = 2**18  # elements at a time, which stay in the cache
LARGEST = 2**15 - 1  # offset; half the spacing of bfloat16 is 2^15 spacings of float32
SMALLEST_NORMAL, LARGEST_EXACT, INFINITE = 0x00800000, 0x7F7F0000, 0x7F800000  # bits of float32
SAMPLE = 2**16  # elements of a matrix that `is_uneven` is computed from
EVEN = (1 / 8, 1 / 4, 1 / 4, 1 / 4, 1 / 8)  # shares in `count_distances` of numbers spread evenly, or exact in float16
TOLERANCE = 0.1  # summed over the shares

M = TypeVar("M", bound=nn.Module)


@torch.no_grad()
def dither_matrices(module: nn.Module, engine: Engine, *, frozen: bool = False) -> None:
    """Add offsets to the trained float32 matrices of a module whose arithmetic is in bfloat16, in place.

    Vectors are not rounded by the arithmetic, and stay. So do weights that are not trained, unless `frozen`.
    """
    for parameter in _matrices(module):
        if parameter.requires_grad or frozen:
            _change(_part(parameter, engine), engine.first_element(parameter), dither)


@torch.no_grad()
def spread_trained(module: M, engine: Engine | None = None) -> M:
    """Add offsets to a module's float32 matrices, in place, if they were trained from bfloat16; return the module.

    Numbers that bfloat16 has exactly stay, so that models published in bfloat16 do not change. Nor do models that were
    trained in float32 from the beginning, or have offsets already: see `is_uneven`. Every rank calls this.

    Args:
        module: a model that is loaded for arithmetic in bfloat16.
        engine: holds the parts of its weights, if they are split over the ranks.
    """
    parts = [(_part(p, engine), engine.first_element(p) if engine else 0) for p in _matrices(module)]
    counts = [count_distances(part.reshape(-1)[:SAMPLE]) for part, _ in parts]
    ranks = [counts] if engine is None else engine.ranks.gather(counts)
    if is_uneven(counts for of_rank in ranks for counts in of_rank):
        for part, first in parts:
            _change(part, first, spread)
    return module


def _matrices(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the matrices in float32: the arithmetic does not round vectors."""
    for parameter in module.parameters():
        shape = getattr(parameter, "ds_shape", parameter.shape)  # of a shard, shape is the part's
        if parameter.dtype == torch.float32 and len(shape) > 1:
            yield parameter


def _part(parameter: nn.Parameter, engine: Engine | None) -> Tensor:
    return parameter.detach() if engine is None else engine.part(parameter)


def _change(part: Tensor, first: int, change: Callable[..., Tensor]) -> None:
    """Replace the elements in place, a few at a time, so that they stay in the cache."""
    flat = part.reshape(-1)  # a copy of a transposed weight
    for start in range(0, len(flat), CHUNK):
        piece = flat[start : start + CHUNK]
        piece.copy_(change(piece, first=first + start))
    if not part.is_contiguous():
        part.copy_(flat.view_as(part))


def count_distances(numbers: Float[Tensor, " N"]) -> list[int]:
    """Count the numbers by their distance to the nearest one of bfloat16, to 0, 1/8, 1/4, 3/8 or 1/2 of the spacing.

    Zeros are left out, and so are numbers that are all exact: they were not trained.
    """
    bits = numbers.view(torch.int32)
    rest = bits[bits & 0x7FFFFFFF >= SMALLEST_NORMAL] & 0xFFFF
    counts = torch.bincount((torch.minimum(rest, 0x10000 - rest) + 0x1000) // 0x2000, minlength=len(EVEN))
    return counts.tolist() if bool(rest.any()) else [0] * len(EVEN)


def is_uneven(counts: Iterable[Sequence[int]]) -> bool:
    """Return whether numbers lie otherwise between bfloat16's than chance would have it, from `count_distances`.

    So lie the weights of a model that was published in bfloat16 and moved by less than a few of its spacings: rounding
    to the nearest moves them all in one direction, back to the start for most.
    """
    sums = [sum(column) for column in zip([0] * len(EVEN), *counts, strict=True)]
    total = sum(sums)
    if not total:
        return False
    difference: float = sum(abs(count / total - share) for count, share in zip(sums, EVEN, strict=True))
    return difference > TOLERANCE + 3 * math.sqrt(len(EVEN) / total)  # by chance 0.7 of the root on average


def dither(numbers: Float[Tensor, " N"], *, first: int = 0) -> Float[Tensor, " N"]:
    """Add to each number that bfloat16 has exactly an offset below half of its spacing there.

    Other numbers stay: they are spread already, or `spread` has spread them, and a second offset would take them to
    other numbers of bfloat16. So do zeros.

    Args:
        numbers: in float32.
        first: the index of the first number in its flattened weight. The offset is a hash of the index, so that it is
            the same on every device and for every sharding.
    """
    return _add_offsets(numbers, first, exact=True)


def spread(numbers: Float[Tensor, " N"], *, first: int = 0) -> Float[Tensor, " N"]:
    """Add the offset of `dither` to each number that bfloat16 has not exactly.

    A number a tenth of the spacing above one of bfloat16 then rounds to it with probability 9/10, else to the next.
    """
    return _add_offsets(numbers, first, exact=False)


def _add_offsets(numbers: Tensor, first: int, *, exact: bool) -> Tensor:
    bits = numbers.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    limit = INFINITE if exact else LARGEST_EXACT  # beyond, the sum may be infinite
    gets_one = ((bits & 0xFFFF == 0) == exact) & (magnitude >= SMALLEST_NORMAL) & (magnitude < limit)
    return (bits + torch.where(gets_one, _offsets(first, len(bits), bits.device), 0)).view(torch.float32)


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
