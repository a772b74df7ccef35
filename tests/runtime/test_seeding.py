"""One seed, many independent numbers, the same in every batch and on every machine."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kstest
from torch import Tensor

from rlhf.runtime.seeding import derive_seed, generator, uniforms

MASK = (1 << 64) - 1


def grid(key: int, rows: int, positions: int) -> Tensor:
    """[rows, positions] numbers."""
    every_row = torch.arange(rows).repeat_interleave(positions)
    return uniforms(key, every_row, torch.arange(positions).repeat(rows)).reshape(rows, positions)


def test_derived_seeds_are_pinned() -> None:
    """Changing these would change every run: they are the first 63 bits of SHA-256 of the names joined by '/'."""
    assert derive_seed(0) == 0x5FECEB66FFC86F38 >> 1
    assert derive_seed(0, "sample", 1) == 4703416825124098946
    assert derive_seed(7, "sample", 1) == 5072761393722605040
    assert generator(0, "head").initial_seed() == derive_seed(0, "head")


def test_derived_seeds_differ_and_fit_a_generator() -> None:
    seeds = {derive_seed(seed, name, step) for seed in range(20) for name in ("sample", "order") for step in range(50)}
    assert len(seeds) == 2000
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_generators_are_of_their_own() -> None:
    one, again, other = (torch.rand(4, generator=generator(0, name)) for name in ("a", "a", "b"))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_uniforms_are_pinned() -> None:
    numbers = uniforms(derive_seed(0, "sample", 1), torch.tensor([0, 0, 1, 12345]), torch.tensor([0, 1, 0, 678]))
    assert numbers.tolist() == [0.3255964082036539, 0.8453996882960969, 0.7931881167084676, 0.6589332810932531]


def mix(state: int) -> int:
    """SplitMix64 in Python's integers (Steele et al. 2014, figure 15, with the increment first)."""
    state = (state + 0x9E3779B97F4A7C15) & MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**40), st.integers(0, 2**20))
def test_uniforms_are_splitmix64(key: int, row: int, position: int) -> None:
    golden = 0x9E3779B97F4A7C15
    state = mix((mix((row * golden + key) & MASK) + position * golden) & MASK)
    assert uniforms(key, torch.tensor([row]), torch.tensor([position])).item() == (state >> 11) / 2**53


def test_the_generator_is_the_published_one() -> None:
    """The first outputs of splitmix64 seeded with 1234567, as its reference implementation gives them."""
    assert [mix(1234567 + i * 0x9E3779B97F4A7C15 & MASK) for i in range(3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


@pytest.mark.parametrize("key", [0, 1, derive_seed(0, "sample", 1)])
def test_they_look_uniform(key: int) -> None:
    numbers = grid(key, 300, 100)
    assert numbers.dtype == torch.float64
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert kstest(numbers.flatten().numpy(), "uniform").pvalue > 1e-3
    by_row = kstest(numbers[7].numpy(), "uniform").pvalue
    by_position = kstest(numbers[:, 7].numpy(), "uniform").pvalue
    assert min(by_row, by_position) > 1e-3


@pytest.mark.parametrize("lag", [1, 2, 16])
def test_neighbors_are_uncorrelated(lag: int) -> None:
    numbers = grid(derive_seed(3, "sample", 9), 400, 100) - 0.5
    count = numbers.numel()
    for one, other in ((numbers[lag:], numbers[:-lag]), (numbers[:, lag:], numbers[:, :-lag])):
        correlation = (one * other).mean().item() * 12
        assert abs(correlation) < 4.5 / count**0.5


def test_neighboring_rows_positions_and_keys_never_collide() -> None:
    keys = [0, 1, 2, derive_seed(0, "sample", 1), derive_seed(0, "sample", 2)]
    numbers = torch.stack([grid(key, 200, 100) for key in keys])
    assert numbers.unique().numel() == numbers.numel()


@given(st.permutations(range(8)), st.integers(1, 8))
def test_a_number_does_not_depend_on_the_batch(order: list[int], size: int) -> None:
    rows, positions = torch.arange(8) * 3, torch.arange(8) % 4
    whole = uniforms(5, rows, positions)
    picked = torch.tensor(order[:size])
    assert torch.equal(uniforms(5, rows[picked], positions[picked]), whole[picked])
    assert torch.equal(uniforms(5, rows[picked].int(), positions[picked].int()), whole[picked])
