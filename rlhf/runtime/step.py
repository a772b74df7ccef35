"""One optimizer step as if on one machine: the only place that steps, for every trainer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from rlhf.masked import Mean
from rlhf.runtime.engine import Trained
from rlhf.runtime.memory import Fitting
from rlhf.runtime.metrics import Metrics
from rlhf.types import Batch


@runtime_checkable
class Loss(Protocol):
    """A loss made of named terms; each is a sum over rows divided by a norm that masks alone decide."""

    def norms(self, batch: Any) -> dict[str, float]:
        """What each term's sum is divided by, for the whole minibatch, before any forward pass."""

    def terms(self, micro: Any) -> tuple[dict[str, Tensor], dict[str, Mean]]:
        """The terms' sums over a micro-batch, and what was observed."""


@dataclass(frozen=True)
class Part:
    """A minibatch and the loss to descend on it."""

    batch: Batch
    loss: Loss


def optimizer_step(
    parts: Sequence[Part], trained: Sequence[Trained], *, micro_batch_size: int | Fitting, lr_factor: float
) -> Metrics:
    """One step of every `trained` model on the sum of all parts' losses.

    The micro-batch size is about memory: gradients are sums divided by whole-minibatch norms, so it cannot change
    the step; where memory runs out it is halved and the gradient begun anew. A NaN or Inf in a loss or gradient drops
    the whole step (no model moves) and counts it.
    """
    rows = micro_batch_size if isinstance(micro_batch_size, Fitting) else Fitting(micro_batch_size)
    metrics, total = rows.run(lambda size: _gradients(parts, trained, size))
    metrics.add("loss/total", total)
    _step(trained, metrics, finite=math.isfinite(total), lr_factor=lr_factor)
    return metrics


def _gradients(parts: Sequence[Part], trained: Sequence[Trained], micro_batch_size: int) -> tuple[Metrics, float]:
    """The gradient of every model; what was observed, and the loss."""
    for model in trained:
        model.drop_gradient()  # of passes that memory ran out in
    metrics, total = Metrics(), 0.0
    for part in parts:
        norms = part.loss.norms(part.batch)
        for micro in part.batch.split(micro_batch_size):
            sums, observed = part.loss.terms(micro)
            terms = {name: value / norms[name] for name, value in sums.items()}
            _backward(terms, trained)
            total += sum(float(value.detach()) for value in terms.values())
            metrics.update(observed)
    return metrics, total


def _backward(terms: Mapping[str, Tensor], trained: Sequence[Trained]) -> None:
    for model in trained:
        own = [terms[name] for name in model.terms if name in terms]
        if own:
            model.backward(sum(own[1:], start=own[0]))


def _step(trained: Sequence[Trained], metrics: Metrics, *, finite: bool, lr_factor: float) -> None:
    norms = [model.grad_norm() for model in trained]
    if not (finite and all(math.isfinite(norm) for norm in norms)):
        for model in trained:
            model.drop_gradient()
        metrics.update({"skipped/nonfinite": Mean(1.0, 1.0)})
        return
    for model, norm in zip(trained, norms, strict=True):
        lr = model.step(norm=norm, lr_factor=lr_factor)
        metrics.add(f"{model.name}/grad_norm", norm)
        metrics.add(f"{model.name}/lr", lr)
