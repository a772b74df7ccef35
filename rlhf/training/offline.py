"""The offline loop: one optimizer step per batch of fixed data. SFT and the preference losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rlhf.batching import Batch
from rlhf.config.sections import BatchConfig, ScheduleConfig
from rlhf.models.kernels.cast import weights_cast_once
from rlhf.models.policy_models import Ema
from rlhf.runtime.engine import TrainableModel, lr_factor
from rlhf.runtime.micro_batch import AdaptiveMicroBatch
from rlhf.tracking.metrics import Metrics
from rlhf.training.session import Session
from rlhf.training.step import Loss, LossBatch, optimizer_step

GRADIENT_PASS = "a forward and backward pass"


@dataclass(frozen=True, kw_only=True)
class OfflineRun:
    """The collaborators of an offline run, made by rlhf.factory."""

    batch: BatchConfig
    schedule: ScheduleConfig
    session: Session
    data: Callable[[int], Batch]  # the rows of a step, with what its loss needs from the whole minibatch
    loss: Loss
    trained: TrainableModel
    ema: Ema | None
    tokens: Callable[[Batch], int]  # how many tokens a batch has, for the throughput
    export: Callable[[Path], None]  # writes the trained model as a standard model folder


def train_offline(run: OfflineRun) -> None:
    """Run the remaining training steps."""
    rows = adaptive_micro_batch(run.batch, run.session)
    for step in run.session.steps():
        with run.session.recorder.phase("data"):
            batch = run.data(step)
        factor = lr_factor(
            step,
            steps=run.session.total_steps,
            warmup_steps=run.schedule.warmup_steps,
            decay=run.schedule.decay,
        )
        with run.session.recorder.phase("update"), weights_cast_once():
            metrics = optimizer_step(
                [LossBatch(batch, run.loss)],
                [run.trained],
                micro_batch_size=rows,
                lr_factor=factor,
                ranks=run.session.ranks,
            )
        run.session.check_update(metrics)
        if run.ema is not None:
            run.ema.update()
        run.session.report(with_skip_counts(metrics, run.session), tokens=run.tokens(batch))


def with_skip_counts(metrics: Metrics, session: Session) -> Mapping[str, float]:
    """Return the values of a step's metrics, with the run's counts of skipped optimizer steps."""
    return metrics.values() | {
        "skipped/nonfinite": float(session.state.skipped),
        "skipped/zero_gradient": float(session.state.idle),
    }


def adaptive_micro_batch(
    batch: BatchConfig, session: Session, *, times: int = 1, what: str = GRADIENT_PASS
) -> AdaptiveMicroBatch:
    """Make the adaptive micro-batch size: `times` the configured one, lowered with a warning when memory runs out."""
    size = batch.micro_batch_tokens or batch.micro_batch_size
    return AdaptiveMicroBatch(
        size * times, tokens=batch.micro_batch_tokens is not None, what=what, note=session.recorder.note
    )
