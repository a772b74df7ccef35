"""Shuffled batches computed from the step number alone: a resumed run continues exactly, with no state to save."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import lru_cache
from typing import Generic, Protocol, TypeVar, runtime_checkable

from rlhf.types import Batch

B_co = TypeVar("B_co", bound=Batch, covariant=True)


@runtime_checkable
class RowSet(Protocol[B_co]):
    """A data set that can collate any of its rows into a batch."""

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def collate(self, indices: list[int]) -> B_co:
        """Collate the rows at `indices` into one batch, in that order."""
        ...


@lru_cache(maxsize=8)
def _permutation(n: int, seed: int, epoch: int) -> tuple[int, ...]:
    # For a given seed Python guarantees the same random() sequence across versions, but not the same shuffle().
    draw = random.Random(f"{seed}/{epoch}").random
    keys = [draw() for _ in range(n)]
    return tuple(sorted(range(n), key=keys.__getitem__))


def epoch_order(n: int, batch_size: int, seed: int, step: int) -> list[int]:
    """Return the row indices of batch `step` (from 1) when n rows are shuffled anew in every epoch.

    Batch k is positions [(k-1)·batch_size, k·batch_size) of the endless sequence of epochs, so a batch may
    cross the end of an epoch, and any n consecutive positions from a multiple of n hold every row once.
    """
    assert min(n, batch_size, step) > 0
    start = (step - 1) * batch_size
    return [_permutation(n, seed, position // n)[position % n] for position in range(start, start + batch_size)]


def in_order(rows: RowSet[B_co], size: int) -> Iterator[B_co]:
    """Yield every row once, in data set order, in batches of at most `size`."""
    for start in range(0, len(rows), size):
        yield rows.collate(list(range(start, min(start + size, len(rows)))))


class BatchStream(Generic[B_co]):
    """Endless shuffled batches of a data set, each computed from the seed and the step number alone."""

    def __init__(self, rows: RowSet[B_co], rows_per_step: int, seed: int) -> None:
        self.rows = rows
        self.rows_per_step = rows_per_step
        self.seed = seed

    @property
    def steps_per_epoch(self) -> float:
        """Return how many steps it takes to read every row once."""
        return len(self.rows) / self.rows_per_step

    def batch(self, step: int) -> B_co:
        """Return the batch of step `step`, counted from 1."""
        return self.rows.collate(epoch_order(len(self.rows), self.rows_per_step, self.seed, step))
