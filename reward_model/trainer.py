"""Fit a reward model on pairs: the offline loop, for use without a run folder."""

from __future__ import annotations

from collections.abc import Iterator

from reward_model.objective import PairLoss
from rlhf.config.sections import ScheduleConfig
from rlhf.data.stream import BatchStream
from rlhf.runtime.engine import Trained, lr_factor
from rlhf.runtime.metrics import Metrics
from rlhf.runtime.step import Part, optimizer_step
from rlhf.types import PreferencePairs

TERMS = ("rm",)  # what Engine.train is told: the loss terms whose gradient reaches the reward model


def fit(
    trained: Trained,
    loss: PairLoss,
    stream: BatchStream[PreferencePairs],
    schedule: ScheduleConfig,
    *,
    steps: int,
    micro_batch_size: int,
    done: int = 0,
) -> Iterator[tuple[int, Metrics]]:
    """Take the steps after the first `done` up to `steps`, one each time the next (step, metrics) is asked for.

    Batches and learning rate follow from the step number, so a run that is restored to step `done` (weights and
    optimizer) continues as if it had never stopped; logging, evaluation and checkpoints are the caller's.
    """
    trained.module.train()
    for step in range(done + 1, steps + 1):
        factor = lr_factor(step, steps=steps, warmup_steps=schedule.warmup_steps, decay=schedule.decay)
        part = Part(stream.batch(step), loss)
        yield step, optimizer_step([part], [trained], micro_batch_size=micro_batch_size, lr_factor=factor)
