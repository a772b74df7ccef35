"""The offline loop: one optimizer step per batch of fixed data. SFT and the preference losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rlhf.algo.masked import Mean
from rlhf.batching import Batch
from rlhf.config.run import ScheduleConfig
from rlhf.config.sections import BatchConfig
from rlhf.models.kernels.cast import weights_cast_once
from rlhf.models.policy_models import Ema
from rlhf.runtime.engine import TrainableModel, lr_factor
from rlhf.runtime.micro_batch import AdaptiveMicroBatch
from rlhf.tracking.metrics import Metrics
from rlhf.training.session import Session
from rlhf.training.step import Loss, LossBatch, optimizer_step

MAIN_LOSSES = ("loss/sft", "loss/preference", "loss/rm")
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
    sources: Callable[[int], tuple[str, ...]] | None = None  # the source of each row of a step, where there are several
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
                loss_batches(run, batch, step),
                [run.trained],
                micro_batch_size=rows,
                lr_factor=factor * run.session.state.lr_scale,
                ranks=run.session.ranks,
            )
        run.session.check_update(metrics)
        if run.ema is not None:
            run.ema.update()
        run.session.report(with_skip_counts(metrics, run.session), tokens=run.tokens(batch))


def loss_batches(run: OfflineRun, batch: Batch, step: int) -> list[LossBatch]:
    """Return the rows of a step with their loss: apart for each source, where there are several, to measure its loss.

    The denominators are those of the whole minibatch, so the gradient is that of the rows together.
    """
    if run.sources is None:
        return [LossBatch(batch, run.loss)]
    names, denominators = run.sources(step), run.loss.denominators(batch)
    return [
        LossBatch(
            batch.rows(torch.tensor([row for row, other in enumerate(names) if other == name])),
            SourceLoss(run.loss, denominators, name),
        )
        for name in sorted(set(names))
    ]


class SourceLoss:
    """A loss on the rows of one source of a minibatch, whose mean is also a metric of the source's."""

    def __init__(self, loss: Loss, denominators: dict[str, float], source: str) -> None:
        """Set the loss, its denominators on the whole minibatch, and the name of the source."""
        self.loss, self.source = loss, source
        self._denominators = denominators

    def denominators(self, batch: Batch) -> dict[str, float]:
        """Return the denominators of the whole minibatch."""
        return self._denominators

    def terms(self, micro: Batch) -> tuple[dict[str, Tensor], dict[str, Mean]]:
        """Compute the loss's terms and metrics, and the source's mean loss."""
        terms, metrics = self.loss.terms(micro)
        main = {f"source/loss/{self.source}": metrics[name] for name in MAIN_LOSSES if name in metrics}
        return terms, metrics | main


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
