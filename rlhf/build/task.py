"""What an offline loss needs of its data: the seam between SFT, the preference losses and the one offline run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rlhf.runtime.step import Loss
from rlhf.types import Batch


@dataclass(frozen=True, kw_only=True)
class Task:
    """Rows, their loss, and how well the policy does on those held out."""

    loss: Loss
    data: Callable[[int], Batch]  # the rows of a step
    steps_per_epoch: float
    tokens: Callable[[Batch], int]  # how many a batch holds
    held_out: Callable[[], dict[str, float]]  # metrics of the policy as it is now; none where nothing is held out
    show: tuple[str, ...]  # metrics for the progress display
