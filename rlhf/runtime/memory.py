"""As many rows at a time as memory holds: fewer where they do not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from rlhf.errors import ResourceError

T = TypeVar("T")


class Fitting:
    """Rows per pass, halved when memory runs out, and then kept so. It never changes a result: no checkpoint has it."""

    def __init__(self, rows: int, *, what: str = "a pass", note: Callable[[str], None] = lambda _: None) -> None:
        """`what` is done with so many rows, for messages; `note` is told the first time that they are halved."""
        self.rows = rows
        self.what = what
        self.note = note
        self._said = False

    def run(self, work: Callable[[int], T], *, again: Callable[[], object] = lambda: None) -> T:
        """What `work(rows)` gives; on running out of memory, and after `again`, it is begun anew with half the rows.

        Raises:
            ResourceError: one row does not fit, or other processes are in the middle of the same pass.
        """
        while True:
            try:
                return work(self.rows)
            except torch.OutOfMemoryError as error:
                if self.rows == 1 or _in_company():
                    raise ResourceError(self._advice()) from error
            # Only here, with the error gone, is what its frames held free again.
            again()
            torch.cuda.empty_cache()
            before, self.rows = self.rows, -(-self.rows // 2)
            if not self._said:
                self.note(
                    f"out of memory in {self.what} of {before} rows: halved, and again as often as needed; results do "
                    f"not change, speed does (set batch.micro_batch_size lower to start there)"
                )
                self._said = True

    def _advice(self) -> str:
        how = f"{self.what} of {self.rows} row{'s' if self.rows > 1 else ''}"
        if self.rows > 1:
            return (
                f"out of memory in {how} in company of other processes or DeepSpeed: set batch.micro_batch_size lower"
            )
        return (
            f"out of memory in {how}: set sampling.max_new_tokens or data.*.max_tokens lower, "
            "policy.gradient_checkpointing=true, policy.lora.r=16, or policy.dtype=bfloat16"
        )


def _in_company() -> bool:
    """Whether others are in the middle of this pass: processes that must make the same ones, or DeepSpeed's hooks."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()
