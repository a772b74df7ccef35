"""The processes of a run: who they are, how rows are dealt to them, and what they tell each other."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf.errors import ProcessLost, UserError
from rlhf.types import Batch, concat

T = TypeVar("T")
B = TypeVar("B", bound=Batch)
C = TypeVar("C", bound=Batch)

GRADIENT_BUCKET = 25_000_000  # numbers that are added up over the processes in one message


@dataclass(frozen=True)
class Share:
    """The rows of one process: `rows` are as many on every process, of which the first `live` are its own.

    The others are repeats: every process makes the same number of passes, because those of a sharded model are
    collective. Their results are thrown away.
    """

    rows: Tensor  # int64
    live: int


class Ranks:
    """The processes of a run, of which this is number `rank`; alone, everything here is the identity."""

    def __init__(self, rank: int = 0, world: int = 1, group: Any = None) -> None:
        """`group` carries what is said between hosts' memories (gloo)."""
        self.rank = rank
        self.world = world
        self._group = group

    @property
    def is_main(self) -> bool:
        """Whether this process writes and prints."""
        return self.rank == 0

    def share(self, count: int) -> Share:
        """This process's part of `count` rows: contiguous, sizes that differ by one at most."""
        assert count > 0, "there are no rows to deal"
        start, stop = self._bounds(count, self.rank)
        size = -(-count // self.world)
        rows = list(range(start, stop))
        filler = rows[-1] if rows else count - 1
        return Share(torch.tensor(rows + [filler] * (size - len(rows)), dtype=torch.long), len(rows))

    def _bounds(self, count: int, rank: int) -> tuple[int, int]:
        base, extra = divmod(count, self.world)
        start = rank * base + min(rank, extra)
        return start, start + base + (rank < extra)

    def spread(self, batch: B, work: Callable[[B], C]) -> C:
        """`work` over the rows of `batch`, each row in one process; every process gets the rows of all, in order."""
        if self.world == 1:
            return work(batch)
        share = self.share(len(batch))
        own = work(batch.rows(share.rows)).rows(torch.arange(share.live))
        return concat([part for part in self.gather(own) if len(part)])

    def spread_tensors(self, batch: B, work: Callable[[B], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """The same, for `work` that gives tensors with the rows on axis 0, on the CPU."""
        if self.world == 1:
            return work(batch)
        share = self.share(len(batch))
        own = tuple(tensor[: share.live].clone() for tensor in work(batch.rows(share.rows)))
        return tuple(torch.cat(parts) for parts in zip(*self.gather(own), strict=True))

    def gather(self, value: T) -> list[T]:
        """What every process gives, in the order of the processes."""
        if self.world == 1:
            return [value]
        found: list[Any] = [None] * self.world
        with _hearing():
            dist.all_gather_object(found, value, group=self._group)
        return found

    def from_main(self, value: T) -> T:
        """What the main process gives."""
        if self.world == 1:
            return value
        held = [value]
        with _hearing():
            dist.broadcast_object_list(held, src=0, group=self._group)
        return held[0]

    def on_main(self, work: Callable[[], T]) -> T:
        """What `work` gives in the main process, where alone it is done.

        Raises:
            Exception: what it raised there; in the other processes, where they cannot know it, a UserError of its text.
        """
        if self.world == 1:
            return work()
        if not self.is_main:
            told: tuple[Any, Any] = self.from_main((None, None))
            if told[1] is not None:
                told[1].told_by_main = True  # so that it is said once
                raise told[1]
            found: T = told[0]
            return found
        try:
            done = work()
        except Exception as error:
            self.from_main((None, _portable(error)))
            raise
        self.from_main((done, None))
        return done

    def any(self, flag: bool) -> bool:
        """Whether it is so in any process."""
        return max(self.gather(flag))

    def largest(self, value: float) -> float:
        """The largest over the processes."""
        return max(self.gather(value))

    def add_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Replace each gradient by its sum over the processes."""
        if self.world == 1:
            return
        bucket: list[Tensor] = []
        for gradient in gradients:
            if bucket and sum(t.numel() for t in bucket) + gradient.numel() > GRADIENT_BUCKET:
                _add(bucket)
                bucket = []
            bucket.append(gradient)
        if bucket:
            _add(bucket)

    def agreed(self, work: Callable[[], T]) -> T:
        """What `work` gives in this process, once it has succeeded in all.

        Raises:
            Exception: what it raised here, or in the first of the other processes (a UserError of its text, where this
                one cannot know it): all go on or none.
        """
        if self.world == 1:
            return work()
        try:
            done = work()
        except Exception as error:
            self.gather(_portable(error))
            raise
        for failed in self.gather(None):
            if failed is not None:
                raise failed
        return done


ALONE = Ranks()


@contextmanager
def _hearing() -> Iterator[None]:
    """Around what all processes do together: gloo and NCCL say by a RuntimeError that one of them is not there."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise ProcessLost(
            "another process of the run is gone, or said nothing for sharding.timeout_s: this one stops too, and the "
            f"same command continues from the newest checkpoint ({error})"
        ) from error


def _portable(error: Exception) -> Exception:
    """The error as other processes can be told of it."""
    return error if isinstance(error, UserError | OSError) else UserError(f"{type(error).__name__}: {error}")


def _add(gradients: Sequence[Tensor]) -> None:
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    with _hearing():
        dist.all_reduce(flat)
    parts = flat.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def launched() -> int:
    """How many processes the launcher (torchrun, accelerate, deepspeed) started; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main_process() -> bool:
    """Whether this is the first of the launched processes: what may be asked before they have met."""
    return int(os.environ.get("RANK", "0")) == 0


def meet(device: torch.device, *, timeout_s: float) -> Ranks:
    """Join the other processes that the launcher started; alone, a group of one, which DeepSpeed wants too."""
    timeout = datetime.timedelta(seconds=timeout_s)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        if launched() > 1:
            dist.init_process_group(backend, timeout=timeout)
        else:
            os.environ.setdefault("LOCAL_RANK", "0")  # which DeepSpeed asks for
            dist.init_process_group(backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    group = dist.new_group(backend="gloo", timeout=timeout) if device.type == "cuda" else None
    return Ranks(dist.get_rank(), dist.get_world_size(), group)


def met() -> bool:
    """Whether this process has joined the others."""
    return dist.is_initialized()


def leave() -> None:
    """Part from the other processes, if they were met."""
    if dist.is_initialized():
        dist.destroy_process_group()
