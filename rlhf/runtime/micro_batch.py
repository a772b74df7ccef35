"""Micro-batches that adapt to memory: their size, in rows or tokens, is halved when memory runs out."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from rlhf.batching import Batch, group_by_size
from rlhf.errors import ResourceError
from rlhf.runtime.device import empty_cache, is_out_of_memory

T = TypeVar("T")


class AdaptiveMicroBatch:
    """The micro-batch size in rows, halved when memory runs out, and kept so.

    It never changes a result, so checkpoints do not store it. With `tokens` it counts live tokens instead of rows.
    """

    def __init__(
        self, size: int, *, tokens: bool = False, what: str = "a pass", note: Callable[[str], None] = lambda _: None
    ) -> None:
        """Set the initial size; `what` names the work in messages, and `note` is called at the first halving."""
        self.size = size
        self.tokens = tokens
        self.what = what
        self.note = note
        self._has_warned = False

    @property
    def unit(self) -> str:
        """Return what `size` counts: "row" or "token"."""
        return "token" if self.tokens else "row"

    def cut(self, batch: Batch, size: int | None = None) -> list[Tensor]:
        """Split a batch into the row indices of each micro-batch, of `size` units (the current size if None)."""
        size = size or self.size
        if self.tokens:
            return group_by_size(batch.live_tokens(), size)
        return list(torch.arange(len(batch)).split(size))

    def run(self, work: Callable[[int], T], *, again: Callable[[], object] = lambda: None) -> T:
        """Return `work(size)`; when it runs out of memory, call `again`, halve the size and start over.

        Raises:
            ResourceError: one row does not fit, or the run is distributed and other ranks are in the same pass.
        """
        while True:
            try:
                return work(self.size)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                if self.size == 1 or _in_company():
                    raise ResourceError(self._advice()) from error
            # Only here, with the error gone, is the memory that its frames referenced free again.
            again()
            empty_cache()
            before, self.size = self.size, -(-self.size // 2)
            if not self._has_warned:
                self.note(
                    f"out of memory in {self.what} of {before} {self.unit}s: halved, and again as often as needed; "
                    f"results do not change, speed does (set {self._setting} lower to start there)"
                )
                self._has_warned = True

    def _advice(self) -> str:
        work = f"{self.what} of {self.size} {self.unit}{'s' if self.size > 1 else ''}"
        if self.size > 1:
            return (
                f"out of memory in {work}; a distributed or DeepSpeed run cannot shrink the micro-batch automatically: "
                f"set {self._setting} lower"
            )
        return (
            f"out of memory in {work}: set sampling.max_new_tokens or data.*.max_tokens lower, "
            "policy.gradient_checkpointing=true, policy.lora.r=16, or policy.dtype=bfloat16"
        )

    @property
    def _setting(self) -> str:
        return "batch.micro_batch_tokens" if self.tokens else "batch.micro_batch_size"


def _in_company() -> bool:
    """Check whether the pass cannot be restarted alone: other ranks run it too, or DeepSpeed's hooks are in it."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()
