"""Counter-based randomness: draws are keyed by (seed, stream, step, row, position), not by the process that draws."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlhf.batching import widest_dtype

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def derive_seed(seed: int, *names: int | str) -> int:
    """Derive a 63-bit seed from `seed` for the purpose given by `names`, independent of the seeds for other names."""
    text = "/".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, *names: int | str) -> torch.Generator:
    """Create a CPU generator seeded for the purpose given by `names`."""
    return torch.Generator().manual_seed(derive_seed(seed, *names))


@contextmanager
def seeded_initialization(seed: int) -> Iterator[None]:
    """Seed weights that libraries initialize in the context (adapters, embedding rows of added tokens) from `seed`."""
    with torch.random.fork_rng():
        torch.manual_seed(derive_seed(seed, "new weights"))
        yield


def uniforms(key: int, rows: Int[Tensor, " B"], positions: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
    """Draw one float64 in [0, 1) for each (row, position), the same on every device and in every batch.

    SplitMix64 (Steele et al. 2014) over a counter made of row and position; `key` comes from `derive_seed`. They are
    on the device of `rows`, or on the CPU if that device has no float64.
    """
    if widest_dtype(rows.device) != torch.float64:
        rows, positions = rows.cpu(), positions.cpu()
    state = _mix(_mix(rows.long() * _GOLDEN + key) + positions.long() * _GOLDEN)
    return (_shift(state, 11)).double() * 2.0**-53


def _mix(state: Tensor) -> Tensor:
    state = state + _GOLDEN
    state = (state ^ _shift(state, 30)) * _MIX_1
    state = (state ^ _shift(state, 27)) * _MIX_2
    return state ^ _shift(state, 31)


def _shift(state: Tensor, bits: int) -> Tensor:
    """Shift signed 64-bit integers right logically, filling with zeros."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)
