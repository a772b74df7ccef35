"""The interface between the offline run and its losses (SFT, preferences): data, loss and held-out evaluation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rlhf.runtime.step import Loss
from rlhf.types import Batch


@dataclass(frozen=True, kw_only=True)
class Task:
    """The data of an offline run, its loss, and its evaluation on held-out data."""

    loss: Loss
    data: Callable[[int], Batch]  # the batch of a step
    steps_per_epoch: float
    tokens: Callable[[Batch], int]  # counts the tokens of a batch
    held_out: Callable[[], dict[str, float]]  # metrics of the current policy; empty without held-out data
    show: tuple[str, ...]  # metrics for the progress display
