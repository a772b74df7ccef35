"""As many rows, or tokens, at a time as memory holds: fewer where they do not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from rlhf.errors import ResourceError
from rlhf.types import Batch, portions

T = TypeVar("T")


class Fitting:
    """Rows per pass, halved when memory runs out, and then kept so. It never changes a result: no checkpoint has it.

    With `tokens` it is live tokens per pass, of however many rows.
    """

    def __init__(
        self, size: int, *, tokens: bool = False, what: str = "a pass", note: Callable[[str], None] = lambda _: None
    ) -> None:
        """`what` is done with so many rows, for messages; `note` is told the first time that they are halved."""
        self.size = size
        self.tokens = tokens
        self.what = what
        self.note = note
        self._said = False

    @property
    def unit(self) -> str:
        """What is counted."""
        return "token" if self.tokens else "row"

    def cut(self, batch: Batch, size: int | None = None) -> list[Tensor]:
        """The rows of each pass, `size` of the unit at a time; None: as many as fit so far."""
        size = size or self.size
        if self.tokens:
            return portions(batch.live_tokens(), size)
        return list(torch.arange(len(batch)).split(size))

    def run(self, work: Callable[[int], T], *, again: Callable[[], object] = lambda: None) -> T:
        """What `work(size)` gives; on running out of memory, and after `again`, it is begun anew with half the size.

        Raises:
            ResourceError: one row does not fit, or other processes are in the middle of the same pass.
        """
        while True:
            try:
                return work(self.size)
            except torch.OutOfMemoryError as error:
                if self.size == 1 or _in_company():
                    raise ResourceError(self._advice()) from error
            # Only here, with the error gone, is what its frames held free again.
            again()
            torch.cuda.empty_cache()
            before, self.size = self.size, -(-self.size // 2)
            if not self._said:
                self.note(
                    f"out of memory in {self.what} of {before} {self.unit}s: halved, and again as often as needed; "
                    f"results do not change, speed does (set {self._setting} lower to start there)"
                )
                self._said = True

    def _advice(self) -> str:
        how = f"{self.what} of {self.size} {self.unit}{'s' if self.size > 1 else ''}"
        if self.size > 1:
            return f"out of memory in {how} in company of other processes or DeepSpeed: set {self._setting} lower"
        return (
            f"out of memory in {how}: set sampling.max_new_tokens or data.*.max_tokens lower, "
            "policy.gradient_checkpointing=true, policy.lora.r=16, or policy.dtype=bfloat16"
        )

    @property
    def _setting(self) -> str:
        return "batch.micro_batch_tokens" if self.tokens else "batch.micro_batch_size"


def _in_company() -> bool:
    """Whether others are in the middle of this pass: processes that must make the same ones, or DeepSpeed's hooks."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()
