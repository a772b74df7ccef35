"""The ranks of a run: how rows are distributed over them, and the collective operations between them."""

from __future__ import annotations

import atexit
import datetime
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf.batching import Batch, concat
from rlhf.errors import RankLost, UserError

T = TypeVar("T")
B = TypeVar("B", bound=Batch)
C = TypeVar("C", bound=Batch)

GRADIENT_BUCKET = 25_000_000  # elements summed over the ranks in one all-reduce


@dataclass(frozen=True)
class RankRows:
    """The rows of one rank: `rows` has the same length on every rank, and its first `live` entries are the rank's own.

    The others repeat a row as padding, and their results are discarded: every rank must run the same number of passes,
    because the passes of a sharded model are collective.
    """

    rows: Tensor  # int64
    live: int


class Distributed:
    """The ranks of a run, of which this process is `rank`; in a single-process run every operation is the identity."""

    def __init__(self, rank: int = 0, world: int = 1, group: Any = None) -> None:
        """Set this process's rank; `group` is the gloo group for Python objects, None the default group."""
        self.rank = rank
        self.world = world
        self._group = group

    @property
    def is_main(self) -> bool:
        """Return whether this is the rank that writes files and prints (rank 0)."""
        return self.rank == 0

    def share(self, count: int) -> RankRows:
        """Return this rank's share of `count` rows: contiguous; ranks differ by at most one row."""
        assert count > 0, "there are no rows to deal"
        start, stop = self._bounds(count, self.rank)
        size = -(-count // self.world)
        rows = list(range(start, stop))
        padding = rows[-1] if rows else count - 1
        return RankRows(torch.tensor(rows + [padding] * (size - len(rows)), dtype=torch.long), len(rows))

    def _bounds(self, count: int, rank: int) -> tuple[int, int]:
        base, extra = divmod(count, self.world)
        start = rank * base + min(rank, extra)
        return start, start + base + (rank < extra)

    def owners(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Assign each name to a rank, so that the sizes of all ranks' names add up to nearly the same.

        The largest comes first and goes to the rank that has least: no rank has more than its share plus the largest.
        """
        loads, owner = [0] * self.world, {}
        for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
            rank = loads.index(min(loads))
            owner[name] = rank
            loads[rank] += sizes[name]
        return owner

    def spread(self, batch: B, work: Callable[[B], C]) -> C:
        """Apply `work` to a batch split over the ranks by rows; every rank gets the results of all rows, in order."""
        if self.world == 1:
            return work(batch)
        share = self.share(len(batch))
        local = work(batch.rows(share.rows)).rows(torch.arange(share.live))
        return concat([part for part in self.gather(local) if len(part)])

    def map_rows_to_tensors(self, batch: B, work: Callable[[B], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Do as `spread`, for `work` that returns CPU tensors with the rows on dimension 0."""
        if self.world == 1:
            return work(batch)
        share = self.share(len(batch))
        local = tuple(tensor[: share.live].clone() for tensor in work(batch.rows(share.rows)))
        return tuple(torch.cat(parts) for parts in zip(*self.gather(local), strict=True))

    def gather(self, value: T) -> list[T]:
        """Gather the value of every rank, in rank order, on all ranks."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        with detect_lost_ranks():
            dist.all_gather_object(values, value, group=self._group)
        return values

    def from_main(self, value: T) -> T:
        """Broadcast the value of the main rank to all ranks."""
        if self.world == 1:
            return value
        objects = [value]
        with detect_lost_ranks():
            dist.broadcast_object_list(objects, src=0, group=self._group)
        return objects[0]

    def on_main(self, work: Callable[[], T]) -> T:
        """Run `work` on the main rank only and return its result on every rank.

        Raises:
            Exception: the error of `work`; on the other ranks a UserError of its text, unless it is one or an OSError.
        """
        if self.world == 1:
            return work()
        if not self.is_main:
            outcome: tuple[Any, Any] = self.from_main((None, None))
            if outcome[1] is not None:
                outcome[1].told_by_main = True  # so that only the main rank prints it
                raise outcome[1]
            received: T = outcome[0]
            return received
        try:
            result = work()
        except Exception as error:
            self.from_main((None, _sendable(error)))
            raise
        self.from_main((result, None))
        return result

    def any(self, flag: bool) -> bool:
        """Return whether `flag` is true on any rank."""
        return max(self.gather(flag))

    def largest(self, value: float) -> float:
        """Return the maximum of `value` over the ranks."""
        return max(self.gather(value))

    def add_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Replace each gradient in place by its sum over the ranks."""
        if self.world > 1:
            for bucket in in_buckets(gradients):
                self.start_sum(bucket)()

    def start_sum(self, gradients: Sequence[Tensor]) -> Callable[[], None]:
        """Start one all-reduce of the gradients; the function returned waits for it and puts the sums in their place.

        Every rank must start the same sums in the same order.
        """
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        with detect_lost_ranks():
            work = dist.all_reduce(flat, async_op=True)

        def finish() -> None:
            with detect_lost_ranks():
                work.wait()
            parts = flat.split([gradient.numel() for gradient in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))

        return finish

    def all_succeed(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank and return the local result once it has succeeded on all; if one fails, all raise.

        Raises:
            Exception: the error of `work` here or on the first other rank that failed (the same if it is a UserError or
                OSError, else a UserError of its text).
        """
        if self.world == 1:
            return work()
        try:
            result = work()
        except Exception as error:
            self.gather(_sendable(error))
            raise
        for failure in self.gather(None):
            if failure is not None:
                raise failure
        return result


SINGLE_PROCESS = Distributed()


def is_lost_rank(error: object) -> bool:
    """Return whether an error is a message of gloo or NCCL about another rank."""
    return isinstance(error, RuntimeError) and (isinstance(error, dist.DistError) or "gloo" in str(error).lower())


@contextmanager
def detect_lost_ranks(*, by_message: bool = False) -> Iterator[None]:
    """Raise RankLost if a collective fails: gloo and NCCL report a missing rank as a RuntimeError.

    With `by_message` the work inside is more than a collective, and other errors are raised as they are.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if by_message and not is_lost_rank(error):
            raise
        raise RankLost(
            "lost contact with another rank (no message for sharding.timeout_s, or its process has ended): stopping; "
            f"the same command continues from the newest checkpoint ({error})"
        ) from error


def _sendable(error: Exception) -> Exception:
    """Convert an error to a type that other ranks can unpickle, keeping its text."""
    return error if isinstance(error, UserError | OSError) else UserError(f"{type(error).__name__}: {error}")


def in_buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the tensors in lists of at most `GRADIENT_BUCKET` elements; a larger one is alone."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and sum(t.numel() for t in bucket) + tensor.numel() > GRADIENT_BUCKET:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


def world_size_from_env() -> int:
    """Return the number of processes that the launcher (torchrun, accelerate, deepspeed) started; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main_process() -> bool:
    """Return whether this is rank 0 according to the launcher, before the process group is initialized."""
    return rank_from_env() == 0


def rank_from_env() -> int:
    """Return this process's rank according to the launcher, before the process group is initialized; 0 without one."""
    return int(os.environ.get("RANK", "0"))


def init_distributed(device: torch.device, *, timeout_s: float) -> Distributed:
    """Initialize torch.distributed; without a launcher with a group of one, which DeepSpeed needs."""
    timeout = datetime.timedelta(seconds=timeout_s)
    if not dist.is_initialized():
        atexit.register(shutdown)  # in a script of rlhf.train: a thread of the group left at the exit may abort it
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        if world_size_from_env() > 1:
            dist.init_process_group(backend, timeout=timeout)
        else:
            os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed reads it
            dist.init_process_group(backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    group = dist.new_group(backend="gloo", timeout=timeout) if device.type == "cuda" else None
    return Distributed(dist.get_rank(), dist.get_world_size(), group)


def is_initialized() -> bool:
    """Return whether torch.distributed is initialized."""
    return dist.is_initialized()


def shutdown() -> None:
    """Shut down torch.distributed if it was initialized."""
    if dist.is_initialized():
        dist.destroy_process_group()
