"""Fit a reward model on pairs: the offline loop."""

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


def total_steps(schedule: ScheduleConfig, steps_per_epoch: float) -> int:
    """The length of the run in steps; a last, partial step of an epoch is not dropped."""
    if schedule.steps is not None:
        return schedule.steps
    assert schedule.epochs is not None
    return max(1, round(schedule.epochs * steps_per_epoch + 0.499))


def fit(
    trained: Trained,
    loss: PairLoss,
    stream: BatchStream[PreferencePairs],
    schedule: ScheduleConfig,
    *,
    micro_batch_size: int,
    done: int = 0,
) -> Iterator[tuple[int, Metrics]]:
    """Take the steps after the first `done`, one each time the next (step, metrics) is asked for.

    Batches and learning rate follow from the step number, so a run that is restored to step `done` (weights and
    optimizer) continues as if it had never stopped; logging, evaluation and checkpoints are the caller's.
    """
    steps = total_steps(schedule, stream.steps_per_epoch)
    trained.module.train()
    for step in range(done + 1, steps + 1):
        factor = lr_factor(step, steps=steps, warmup_steps=schedule.warmup_steps, decay=schedule.decay)
        part = Part(stream.batch(step), loss)
        yield step, optimizer_step([part], [trained], micro_batch_size=micro_batch_size, lr_factor=factor)
