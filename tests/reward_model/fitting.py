"""A few optimizer steps on pairs, without a run folder."""

from __future__ import annotations

from reward_model.model import BradleyTerryLoss
from rlhf.data.datasets import BatchStream
from rlhf.runtime.engine import TrainableModel
from rlhf.tracking.metrics import Metrics
from rlhf.training.step import LossBatch, optimizer_step
from rlhf.types import PreferencePairs

TERMS = ("rm",)


def fit(
    trained: TrainableModel,
    loss: BradleyTerryLoss,
    stream: BatchStream[PreferencePairs],
    *,
    steps: int,
    micro_batch_size: int,
) -> list[Metrics]:
    """The metrics of the first `steps` steps."""
    trained.module.train()
    return [
        optimizer_step(
            [LossBatch(stream.batch(step), loss)], [trained], micro_batch_size=micro_batch_size, lr_factor=1.0
        )
        for step in range(1, steps + 1)
    ]
