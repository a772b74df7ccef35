from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rlhf.data.datasets import epoch_order, rows_read

SIZES = st.integers(1, 30)


@given(SIZES, SIZES, st.integers(0, 5))
def test_every_row_appears_once_in_every_epoch(n: int, batch: int, seed: int) -> None:
    steps = -(-3 * n // batch)
    order = [row for step in range(1, steps + 1) for row in epoch_order(n, batch, seed, step)]
    for epoch in range(3):
        assert sorted(order[epoch * n : (epoch + 1) * n]) == list(range(n))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {tuple(epoch_order(40, 40, seed, step)) for seed in range(3) for step in (1, 2, 3)}
    assert len(orders) == 9


def test_batches_of_any_size_read_one_sequence() -> None:
    by_threes = [row for step in range(1, 15) for row in epoch_order(7, 3, 1, step)]
    by_fourteens = [row for step in range(1, 4) for row in epoch_order(7, 14, 1, step)]
    assert by_threes == by_fourteens


def test_the_order_is_that_of_earlier_runs() -> None:
    """A run resumed under a later version must go on with the rows it had before it."""
    assert epoch_order(10, 6, seed=7, step=2) == [6, 9, 0, 3, 0, 1]


@given(SIZES, SIZES, st.integers(0, 5), st.integers(1, 12))
def test_the_rows_of_a_run_are_those_of_its_steps(n: int, batch: int, seed: int, steps: int) -> None:
    seen = {row for step in range(1, steps + 1) for row in epoch_order(n, batch, seed, step)}
    assert rows_read(n, batch, seed, steps) == sorted(seen)
