"""One optimizer step as if on one machine: the only place that steps, for every trainer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from rlhf.algo.objective import scaled
from rlhf.masked import Mean
from rlhf.runtime.engine import Trained
from rlhf.runtime.memory import Fitting
from rlhf.runtime.metrics import Metrics
from rlhf.runtime.ranks import ALONE, Ranks
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


@dataclass(frozen=True)
class Pass:
    """The rows of one forward and backward pass; `counts` is False for one made only to keep step with the others."""

    rows: Batch
    counts: bool


def optimizer_step(
    parts: Sequence[Part],
    trained: Sequence[Trained],
    *,
    micro_batch_size: int | Fitting,
    lr_factor: float,
    ranks: Ranks = ALONE,
) -> Metrics:
    """One step of every `trained` model on the sum of all parts' losses.

    The micro-batch size and the number of processes are about memory and speed: gradients are sums divided by
    whole-minibatch norms, so they cannot change the step; where memory runs out the micro-batch is halved and the
    gradient begun anew. Each process is given whole parts and takes its share of their rows; the metrics are those of
    all. A NaN or Inf in a loss or gradient drops the whole step (no model moves) and counts it. A model whose gradient
    is exactly zero does not move either: Adam would carry it on by the momentum of earlier steps.
    """
    fitting = micro_batch_size if isinstance(micro_batch_size, Fitting) else Fitting(micro_batch_size)
    metrics, total = fitting.run(
        lambda size: _gradients(parts, trained, fitting, size, ranks),
        again=lambda: _drop(trained),  # of the passes that memory ran out in
    )
    metrics.add("loss/total", total)
    _step(trained, metrics, finite=math.isfinite(total), lr_factor=lr_factor)
    return metrics


def _gradients(
    parts: Sequence[Part], trained: Sequence[Trained], fitting: Fitting, size: int, ranks: Ranks
) -> tuple[Metrics, float]:
    """The gradient of every model; what was observed, and the loss."""
    metrics, total = Metrics(), 0.0
    for number, part in enumerate(parts):
        norms = part.loss.norms(part.batch)
        passes = passes_of(part.batch, fitting, size, ranks)
        for index, one in enumerate(passes):
            sums, observed = part.loss.terms(one.rows)
            terms = scaled(sums, norms)
            if not one.counts:
                terms = {name: 0.0 * value for name, value in terms.items()}
            ended = index == len(passes) - 1
            later = {name for other in parts[number + 1 :] for name in other.loss.norms(other.batch)} if ended else None
            _backward(terms, trained, later)
            if one.counts:
                total += sum(float(value.detach()) for value in terms.values())
                metrics.update(observed)
    return _of_all(metrics, total, ranks)


def passes_of(batch: Batch, fitting: Fitting, size: int, ranks: Ranks) -> list[Pass]:
    """This process's passes over its share of the rows: as many in every process, since those of a sharded model meet.

    A process that runs out of rows repeats one of them, which then counts for nothing.
    """
    share = ranks.share(len(batch))
    own = batch.rows(share.rows[: share.live])
    passes = [Pass(own.rows(rows), True) for rows in fitting.cut(own, size) if len(rows)]
    most = ranks.largest(float(len(passes))) if fitting.tokens else -(-len(share.rows) // size)
    missing = int(most) - len(passes)
    return passes + [Pass(batch.rows(share.rows[-1:]), False)] * missing


def _of_all(metrics: Metrics, total: float, ranks: Ranks) -> tuple[Metrics, float]:
    """What all processes observed, and their loss: the same in each."""
    found = ranks.gather((metrics.means(), total))
    together = Metrics()
    for means, _ in found:
        together.update(means)
    return together, sum(each for _, each in found)


def _backward(terms: Mapping[str, Tensor], trained: Sequence[Trained], later: set[str] | None) -> None:
    """`later` are the terms of the parts still to come; None where this part goes on."""
    for model in trained:
        own = [terms[name] for name in model.terms if name in terms]
        if own:
            last = later is not None and not later & set(model.terms)
            model.backward(sum(own[1:], start=own[0]), last=last)


def _step(trained: Sequence[Trained], metrics: Metrics, *, finite: bool, lr_factor: float) -> None:
    norms = [model.grad_norm() for model in trained]
    if not (finite and all(math.isfinite(norm) for norm in norms)):
        _drop(trained)
        metrics.update({"skipped/nonfinite": Mean(1.0, 1.0)})
        return
    for model, norm in zip(trained, norms, strict=True):
        metrics.add(f"{model.name}/grad_norm", norm)
        if norm == 0.0:
            model.drop_gradient()
            metrics.update({"skipped/zero_gradient": Mean(1.0, 1.0)})
            continue
        lr = model.step(norm=norm, lr_factor=lr_factor)
        metrics.add(f"{model.name}/lr", lr)


def _drop(trained: Sequence[Trained]) -> None:
    for model in trained:
        model.drop_gradient()
