"""A trained policy whose step is a natural gradient within a trust region: NPG (Kakade 2001), TRPO (Schulman 2015)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from rlhf.algo.trust_region import (
    LineSearch,
    Solution,
    Trial,
    backtrack,
    conjugate_gradient,
    step_length,
    undamped_curvature,
)
from rlhf.batching import Number, widen
from rlhf.config.algorithm import TrustRegionLoss
from rlhf.errors import ConfigError
from rlhf.models.policy_models import Models
from rlhf.models.token_fisher import TokenFisher
from rlhf.runtime.engine import LocalModel
from rlhf.tracking.metrics import Metrics
from rlhf.training.step import Minibatch
from rlhf.types import Experience


class TrustRegionModel:
    """A rlhf.training.step.SearchingModel: its step solves F x = g and searches a length along x.

    It has no state: the checkpoint's optimizer state is empty, and a resumed run takes the same steps.
    """

    def __init__(self, local: LocalModel, models: Models, config: TrustRegionLoss) -> None:
        """Make a replicated model step so; `local` accumulates its gradient.

        Raises:
            ConfigError: it has more trainable parameters than `config` allows.
        """
        self.local, self.config = local, config
        self.name, self.module, self.terms = local.name, local.module, local.terms
        self.parameters: list[nn.Parameter] = local.parameters
        _check_size(sum(p.numel() for p in self.parameters), config.max_parameters)
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

    def state(self) -> dict[str, Any]:
        """Return the optimizer state, which is empty."""
        return self.local.state()

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self.local.load_state(state)

    def search(self, minibatch: Minibatch, *, lr_factor: float) -> Metrics:
        """Take the step for the accumulated gradient of `minibatch`, or none if the line search accepts no length.

            (F + damping) x = g,   theta <- theta - s x,   s = lr_factor * sqrt(2 max_kl / x.Fx), shortened as needed

        F is that of the tokens in the policy's loss, averaged over them. Every rank takes the same step.
        """
        gradient = _flatten(torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters)
        self.zero_grad()
        solution = self._solve(gradient, minibatch)
        curvature = undamped_curvature(solution, gradient, damping=self.config.damping)
        length = lr_factor * step_length(curvature, max_kl=self.config.max_kl)
        metrics = Metrics()
        metrics.add("trust_region/cg_residual", solution.residual(gradient))
        if length == 0.0:
            metrics.add("trust_region/accepted", 0.0)
            return metrics
        outcome = self._move(solution.x, length, minibatch)
        self._record(metrics, outcome, slope=float(solution.x @ gradient))
        return metrics

    def _solve(self, gradient: Tensor, minibatch: Minibatch) -> Solution:
        def product(vector: Tensor) -> Tensor:
            return self._fisher_product(vector, minibatch) + self.config.damping * vector

        return conjugate_gradient(product, gradient, iterations=self.config.cg_iterations)

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

    def _move(self, direction: Tensor, length: float, minibatch: Minibatch) -> LineSearch:
        """Move the weights to the accepted step, or back."""
        old = {name: p.detach().clone() for name, p in self.local.named.items()}
        before = minibatch.value(self.terms)

        def attempt(length: float) -> Trial:
            self._set(old, direction, length)
            kl, loss = self._kl(old, minibatch), minibatch.value(self.terms)
            return Trial(length=length, kl=kl, improvement=before - loss)

        if not self.config.line_search:
            trial = attempt(length)
            return LineSearch(first=trial, last=trial, accepted=True, backtracks=0)
        config = self.config
        outcome = backtrack(attempt, length, max_kl=config.max_kl, shrink=config.shrink, backtracks=config.backtracks)
        if not outcome.accepted:
            self._set(old, direction, 0.0)
        return outcome

    @torch.no_grad()
    def _set(self, old: dict[str, Tensor], direction: Tensor, length: float) -> None:
        """Set the weights to old - length x direction; at length 0 bit by bit the old ones."""
        for (name, step), parameter in zip(self._unflatten(direction).items(), self.parameters, strict=True):
            parameter.copy_(old[name] if length == 0.0 else old[name] - length * step)

    def _record(self, metrics: Metrics, outcome: LineSearch, *, slope: float) -> None:
        metrics.add("trust_region/accepted", float(outcome.accepted))
        metrics.add("trust_region/backtracks", float(outcome.backtracks))
        metrics.add("trust_region/kl_full_step", outcome.first.kl)
        taken = outcome.last if outcome.accepted else Trial(length=0.0, kl=0.0, improvement=0.0)
        metrics.add("trust_region/kl", taken.kl)
        metrics.add("trust_region/improvement", taken.improvement)
        metrics.add("trust_region/expected_improvement", taken.length * slope)
        if outcome.accepted:
            metrics.add(f"{self.name}/lr", taken.length)

    def _unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        named = self.local.named
        parts = vector.split([p.numel() for p in self.parameters])
        return {name: part.view_as(p).to(p.dtype) for (name, p), part in zip(named.items(), parts, strict=True)}

    @property
    def _device(self) -> torch.device:
        return self.parameters[0].device


def _flatten(tensors: Iterable[Tensor]) -> Tensor:
    """Join tensors into a vector of the widest type, in which conjugate gradients lose less to rounding."""
    return widen(torch.cat([tensor.detach().reshape(-1) for tensor in tensors]))


def _count_tokens(minibatch: Minibatch) -> int:
    return max(1, int(_experience(minibatch.parts[0].batch).loss_mask.sum()))


def _experience(batch: object) -> Experience:
    assert isinstance(batch, Experience), "the first part of an online step is the policy's experience"
    return batch


def _check_size(count: int, limit: int) -> None:
    if count > limit:
        raise ConfigError(
            f"a trust region holds about six float64 vectors as long as the trainable parameters, and there are "
            f"{count:,} of them; algorithm.policy_loss.max_parameters is {limit:,}. Train adapters "
            "(policy.lora.r=16), take algorithm.policy_loss.type=penalty, or raise the limit if memory allows"
        )
