"""A trained policy whose step its loss searches, as in a trust region (rlhf/algorithms/trust_region.py)."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from rlhf.algo.trust_region import Trial
from rlhf.algorithms.policy_loss import PolicyLoss
from rlhf.batching import Number, widen
from rlhf.models.policy_models import Models
from rlhf.models.token_fisher import TokenFisher
from rlhf.runtime.engine import LocalModel
from rlhf.tracking.metrics import Metrics
from rlhf.training.step import Minibatch
from rlhf.types import Experience


class SearchedModel:
    """A rlhf.training.step.SearchingModel: its policy loss searches the step.

    It has no state: the checkpoint's optimizer state is empty, and a resumed run takes the same steps.
    """

    def __init__(self, local: LocalModel, models: Models, loss: PolicyLoss) -> None:
        """Make a replicated model step so; `local` accumulates its gradient.

        Raises:
            ConfigError: it has more trainable parameters than `loss` allows.
        """
        self.local, self.loss = local, loss
        self.name, self.module, self.terms = local.name, local.module, local.terms
        self.parameters: list[nn.Parameter] = local.parameters
        loss.check_parameters(sum(p.numel() for p in self.parameters))
        self.fisher = TokenFisher(
            models.policy, temperature=models.temperature, log_probs=models.log_probs, packing=models.packing
        )

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Accumulate the gradient of `loss`; after the step's `last` call the gradient is complete."""
        self.local.backward(loss, last=last)

    def grad_norm(self) -> Number:
        """Compute the global 2-norm of the gradient summed over the ranks."""
        return self.local.grad_norm()

    def zero_grad(self) -> None:
        """Discard the accumulated gradient."""
        self.local.zero_grad()

    def moments(self) -> list[Tensor]:
        """Return the optimizer's moments: there are none."""
        return self.local.moments()

    def state(self) -> dict[str, Any]:
        """Return the optimizer state, which is empty."""
        return self.local.state()

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore a result of `state`."""
        self.local.load_state(state)

    def search(self, minibatch: Minibatch, *, lr_factor: float) -> Metrics:
        """Let the loss take a step for the accumulated gradient of `minibatch`. Every rank takes the same step."""
        gradient = _flatten(torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters)
        self.zero_grad()
        metrics = Metrics()
        space = _Space(self, minibatch, gradient)
        for name, value in self.loss.search(space, lr_factor=lr_factor).items():
            metrics.add(name, value)
        metrics.add("trust_region/forward_passes", float(space.forward_passes))
        return metrics

    def _fisher_product(self, vector: Tensor, minibatch: Minibatch) -> Tensor:
        """Compute F v over all micro-batches and ranks: summed, then divided once."""
        by_name = self._unflatten(vector)

        def over_passes(size: int) -> Tensor:
            total = torch.zeros_like(vector)
            for micro in minibatch.passes(size):
                if micro.counts:
                    product = self.fisher.product(_experience(micro.rows).to(vector.device), by_name)
                    total += _flatten(product[name] for name in by_name)
            return total

        total = minibatch.fitting.run(over_passes)
        minibatch.ranks.add_gradients([total])
        return total / _count_tokens(minibatch)

    def _kl(self, old: dict[str, Tensor], minibatch: Minibatch) -> float:
        """Compute the exact KL(old || live) per token over the whole minibatch."""

        def over_passes(size: int) -> float:
            passes = (micro for micro in minibatch.passes(size) if micro.counts)
            return sum(self.fisher.kl(_experience(micro.rows).to(self._device), old) for micro in passes)

        return sum(minibatch.ranks.gather(minibatch.fitting.run(over_passes))) / _count_tokens(minibatch)

    @torch.no_grad()
    def _set(self, old: dict[str, Tensor], direction: Tensor, length: float) -> None:
        """Set the weights to old - length x direction; at length 0 bit by bit the old ones."""
        for (name, step), parameter in zip(self._unflatten(direction).items(), self.parameters, strict=True):
            parameter.copy_(old[name] if length == 0.0 else old[name] - length * step)

    def _unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        named = self.local.named
        parts = vector.split([p.numel() for p in self.parameters])
        return {name: part.view_as(p).to(p.dtype) for (name, p), part in zip(named.items(), parts, strict=True)}

    @property
    def _device(self) -> torch.device:
        return self.parameters[0].device


class _Space:
    """The weights of the model at a minibatch; a rlhf.algorithms.search.StepSpace."""

    def __init__(self, model: SearchedModel, minibatch: Minibatch, gradient: Tensor) -> None:
        self.model, self.minibatch, self.gradient = model, minibatch, gradient
        self.forward_passes = 0  # a backward pass counts as two, and so does a forward one with its derivative

    @cached_property
    def _start(self) -> tuple[dict[str, Tensor], float]:
        """Return a copy of the weights before the step, and the loss there."""
        old = {name: p.detach().clone() for name, p in self.model.local.named.items()}
        self.forward_passes += 1
        return old, self.minibatch.value(self.model.terms)

    def fisher_product(self, vector: Tensor) -> Tensor:
        """Compute F v for the tokens in the policy's loss."""
        self.forward_passes += 5
        return self.model._fisher_product(vector, self.minibatch)

    def attempt(self, direction: Tensor, length: float) -> Trial:
        """Set the weights to a step's end, and evaluate KL and loss there."""
        old, before = self._start
        self.model._set(old, direction, length)
        self.forward_passes += 3  # old and new weights for the KL, new ones for the loss
        kl, loss = self.model._kl(old, self.minibatch), self.minibatch.value(self.model.terms)
        return Trial(length=length, kl=kl, improvement=before - loss)

    def restore(self) -> None:
        """Set the weights to their values before the step."""
        old, _ = self._start
        self.model._set(old, self.gradient, 0.0)


def _flatten(tensors: Iterable[Tensor]) -> Tensor:
    """Join tensors into a vector of the widest type, in which conjugate gradients lose less to rounding."""
    return widen(torch.cat([tensor.detach().reshape(-1) for tensor in tensors]))


def _count_tokens(minibatch: Minibatch) -> int:
    return max(1, int(_experience(minibatch.parts[0].batch).loss_mask.sum()))


def _experience(batch: object) -> Experience:
    assert isinstance(batch, Experience), "the first part of an online step is the policy's experience"
    return batch
