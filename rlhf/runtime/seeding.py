"""One seed, many independent numbers: randomness belongs to (seed, stream, step, row, position), not to a process."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float, Int
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def derive(seed: int, *names: int | str) -> int:
    """A 63-bit seed for the purpose that `names` spell, independent of those for other names."""
    text = "/".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, *names: int | str) -> torch.Generator:
    """A CPU generator of its own for the purpose that `names` spell."""
    return torch.Generator().manual_seed(derive(seed, *names))


@contextmanager
def new_weights(seed: int) -> Iterator[None]:
    """Inside, whatever a library initializes (adapters, rows for added tokens) comes from `seed`."""
    with torch.random.fork_rng():
        torch.manual_seed(derive(seed, "new weights"))
        yield


def uniforms(key: int, rows: Int[Tensor, " B"], positions: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
    """One number in [0, 1) for each (row, position), float64, the same on every device and in every batch.

    SplitMix64 (Steele et al. 2014) over a counter made of the two; `key` comes from `derive`.
    """
    state = _mix(_mix(rows.long() * _GOLDEN + key) + positions.long() * _GOLDEN)
    return (_shift(state, 11)).double() * 2.0**-53


def _mix(state: Tensor) -> Tensor:
    state = state + _GOLDEN
    state = (state ^ _shift(state, 30)) * _MIX_1
    state = (state ^ _shift(state, 27)) * _MIX_2
    return state ^ _shift(state, 31)


def _shift(state: Tensor, bits: int) -> Tensor:
    """Logical right shift of signed 64-bit integers."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)
