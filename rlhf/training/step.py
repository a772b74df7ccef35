"""The optimizer step of every trainer: micro-batches, gradient accumulation over ranks, and checks for NaN or Inf."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from rlhf.algo.masked import Mean
from rlhf.batching import Batch, Number
from rlhf.objective import divide_by_denominators
from rlhf.runtime.distributed import SINGLE_PROCESS, Distributed
from rlhf.runtime.engine import SteppingModel, TrainableModel
from rlhf.runtime.memory import AdaptiveMicroBatch, return_gaps
from rlhf.tracking.metrics import Metrics
from rlhf.training.micro_batches import MicroBatch, gather_metrics, read_numbers_once, split_into_micro_batches


@runtime_checkable
class Loss(Protocol):
    """A loss of named terms, each a sum over rows divided by a denominator that depends on the masks alone."""

    def denominators(self, batch: Any) -> dict[str, float]:
        """Compute the denominator of each term for the whole minibatch, before any forward pass."""

    def terms(self, micro: Any) -> tuple[dict[str, Tensor], dict[str, Mean]]:
        """Compute the terms' sums over a micro-batch, and metrics."""


@runtime_checkable
class RowWiseLoss(Loss, Protocol):
    """A loss that also tells the values of single rows: `loss` and `accuracy`, as evaluations compare them."""

    row_values: dict[str, Tensor]  # [B] each, of the latest call of `terms`


@runtime_checkable
class DrawnLoss(Loss, Protocol):
    """A loss that counts tokens of its passes for a figure."""

    def draw(self) -> None:
        """Count the tokens of the latest call of `terms`; it is not called after a dummy pass."""


@dataclass(frozen=True)
class LossBatch:
    """A minibatch and the loss to minimize on it."""

    batch: Batch
    loss: Loss


@dataclass(frozen=True)
class Minibatch:
    """The parts of an optimizer step and how they are split into passes, for a model that searches its step."""

    parts: Sequence[LossBatch]
    fitting: AdaptiveMicroBatch
    ranks: Distributed

    def passes(self, size: int) -> list[MicroBatch]:
        """Split this rank's share of the first part into passes of `size`."""
        return split_into_micro_batches(self.parts[0].batch, self.fitting, size, self.ranks)

    @torch.no_grad()
    def value(self, names: Sequence[str]) -> float:
        """Compute the sum of the named loss terms with the current weights, over all parts and ranks."""
        return sum(self.ranks.gather(self.fitting.run(lambda size: self._local_value(set(names), size))))

    def _local_value(self, names: set[str], size: int) -> float:
        total = 0.0
        for part in self.parts:
            denominators = part.loss.denominators(part.batch)
            if not names & denominators.keys():
                continue
            for micro in split_into_micro_batches(part.batch, self.fitting, size, self.ranks):
                if micro.counts:
                    terms = divide_by_denominators(part.loss.terms(micro.rows)[0], denominators)
                    total += sum(float(value) for name, value in terms.items() if name in names)
        return total


@runtime_checkable
class SearchingModel(TrainableModel, Protocol):
    """A trained model that evaluates steps on the minibatch before it takes one."""

    def search(self, minibatch: Minibatch, *, lr_factor: float) -> Metrics:
        """Take a step for the accumulated gradient and drop the gradient; `<name>/lr` is its length, if any."""


def optimizer_step(
    parts: Sequence[LossBatch],
    trained: Sequence[TrainableModel],
    *,
    micro_batch_size: int | AdaptiveMicroBatch,
    lr_factor: float,
    ranks: Distributed = SINGLE_PROCESS,
) -> Metrics:
    """Take one optimizer step of every `trained` model on the sum of the parts' losses, and return the metrics.

    Micro-batch size and number of ranks affect memory and speed only: gradients are sums divided by denominators of the
    whole minibatch, so the step does not depend on them. When memory runs out the micro-batch is halved and the
    gradient is computed again. Every rank receives the whole parts and processes its share of their rows; the metrics
    cover all ranks. A NaN or Inf in a loss or gradient skips the whole step (no model is updated) and is counted. A
    model whose gradient is exactly zero is not updated either: Adam would still move it by its momentum.
    """
    fitting = (
        micro_batch_size if isinstance(micro_batch_size, AdaptiveMicroBatch) else AdaptiveMicroBatch(micro_batch_size)
    )
    means, losses = fitting.run(  # forward, loss and backward of every micro-batch
        lambda size: _compute_gradients(parts, trained, fitting, size, ranks),
        again=lambda: _drop_gradients(trained),  # of the passes before memory ran out
    )
    means, losses, norms = read_numbers_once(means, losses, [model.grad_norm() for model in trained])
    metrics, total = gather_metrics(means, losses, ranks)
    metrics.add("loss/total", total)
    if not (math.isfinite(total) and all(math.isfinite(norm) for norm in norms)):
        _drop_gradients(trained)
        metrics.update({"skipped/nonfinite": Mean(1.0, 1.0)})
        return metrics
    minibatch = Minibatch(parts, fitting, ranks)
    for model, norm in zip(trained, norms, strict=True):
        metrics.add(f"{model.name}/grad_norm", norm)
        if norm == 0.0:
            model.zero_grad()
            metrics.update({"skipped/zero_gradient": Mean(1.0, 1.0)})
        elif isinstance(model, SearchingModel):
            metrics.merge(model.search(minibatch, lr_factor=lr_factor))
        else:
            assert isinstance(model, SteppingModel)
            metrics.add(f"{model.name}/lr", model.step(norm=norm, lr_factor=lr_factor))  # clips, then steps
    return metrics


def _compute_gradients(
    parts: Sequence[LossBatch],
    trained: Sequence[TrainableModel],
    fitting: AdaptiveMicroBatch,
    size: int,
    ranks: Distributed,
) -> tuple[list[dict[str, Mean]], list[list[Number]]]:
    """Compute the gradient of every model; return the metrics of each micro-batch and its losses, not yet read."""
    means: list[dict[str, Mean]] = []
    losses: list[list[Number]] = []
    for number, part in enumerate(parts):
        if len(parts) > 1:  # the gaps between one model's gradients do not fit another's activations
            return_gaps()
        denominators = part.loss.denominators(part.batch)
        later = {name for other in parts[number + 1 :] for name in other.loss.denominators(other.batch)}
        passes = split_into_micro_batches(part.batch, fitting, size, ranks)
        for index, micro in enumerate(passes):
            sums, observed = part.loss.terms(micro.rows)  # forward, ratio, loss
            terms = divide_by_denominators(sums, denominators)
            if not micro.counts:
                terms = {name: 0.0 * value for name, value in terms.items()}
            if number:  # most is in use now: the gradients of the parts before, and this one's activations
                return_gaps()
            is_last = index == len(passes) - 1
            for model in trained:
                own = [terms[name] for name in model.terms if name in terms]
                if own:
                    model.backward(sum(own[1:], start=own[0]), last=is_last and not later & set(model.terms))
            if micro.counts:
                if isinstance(part.loss, DrawnLoss):
                    part.loss.draw()
                losses.append([value.detach() for value in terms.values()])
                means.append(observed)
    return means, losses


def _drop_gradients(trained: Sequence[TrainableModel]) -> None:
    for model in trained:
        model.zero_grad()
