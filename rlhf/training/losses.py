"""The losses of an online update: sums over a micro-batch, denominators of the minibatch.

They connect the mathematics (rlhf.algo) to the models; each is a rlhf.training.step.Loss. The loss of sampled pairs is
the offline one (offline.py).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf.algo.kl import Coefs
from rlhf.algo.masked import Mean
from rlhf.algo.policy_loss import importance_ratio, kl_old_new, loss_weights, token_weights
from rlhf.algorithms.offline_loss import PairLoss
from rlhf.algorithms.sft import DemonstratedLoss
from rlhf.batching import Number
from rlhf.models.policy_models import Models
from rlhf.objective import Objective
from rlhf.training.offline import PairwiseLoss, stack_sides
from rlhf.training.ratios import RatioHistogram
from rlhf.training.rollout import logprob_metrics
from rlhf.types import (
    Demonstrations,
    Experience,
    SampledPairs,
)


def online_losses(
    models: Models, objective: Objective, coefs: Coefs
) -> tuple[OnlineLoss | SampledPairLoss] | tuple[OnlineLoss, CriticLoss]:
    """Return the losses of an online update, the policy's first: over an Experience, or over SampledPairs.

    The loss of a critic with its own backbone is separate, so that its forward pass stores activations only after the
    policy's are freed.
    """
    pair_loss = objective.algorithm.policy_loss.pair_loss
    if pair_loss is not None:
        return (SampledPairLoss(models, pair_loss),)
    policy = OnlineLoss(models, objective, coefs)
    return (policy,) if models.critic is None else (policy, CriticLoss(models, objective))


class OnlineLoss:
    """The online objective on the policy, its value head included; a rlhf.training.step.Loss over Experience."""

    def __init__(self, models: Models, objective: Objective, coefs: Coefs) -> None:
        self.models = models
        self.objective = objective
        self.coefs = coefs
        self.ratio_deviation: Number = 0.0  # max |pi / pi_old - 1| over the calls of `terms` so far
        drawn = objective.policy_loss.drawn_ratios
        self.ratios = None if drawn is None else RatioHistogram(*drawn)
        self._latest: tuple[Tensor, Tensor, Tensor] | None = None  # what `ratios` takes, of the latest call of `terms`

    def denominators(self, batch: Experience) -> dict[str, float]:
        """Compute the denominators of the loss terms from the whole minibatch."""
        denominators = self.objective.denominators(batch)
        return denominators if self.models.critic is None else {"policy": denominators["policy"]}

    def terms(self, micro: Experience) -> tuple[dict[str, Tensor], dict[str, Mean]]:
        """Compute the loss terms, summed over a micro-batch, and their metrics."""
        micro = micro.to(self.models.device)
        if self.models.critic is None:
            outputs = self.models.outputs(micro, compare=self.models.comparison(self.objective.policy_loss, micro))
            micro, distances = self._with_old_logprobs(micro, outputs.logprobs)
            terms, metrics = self.objective.loss(micro, outputs, self.coefs)
        else:
            tokens = self.models.policy_tokens(micro, compare=self.models.comparison(self.objective.policy_loss, micro))
            micro, distances = self._with_old_logprobs(micro, tokens.logprobs)
            terms, metrics = self.objective.policy_term(
                micro, tokens.logprobs, tokens.entropy, self.coefs, tokens.compared
            )
        return terms, metrics | distances

    def _with_old_logprobs(
        self, micro: Experience, logprobs: Float[Tensor, "B T"]
    ) -> tuple[Experience, dict[str, Mean]]:
        """Return the rows with log pi_old, and its metrics if this pass gives it: pi_old is then pi."""
        distances: dict[str, Mean] = {}
        if self.models.update_gives_old_logprobs:
            micro = replace(micro, logprobs=logprobs.detach())
            distances = logprob_metrics(micro, self.models)
        self._update_ratio_deviation(micro, logprobs)
        return micro, distances

    def _update_ratio_deviation(self, micro: Experience, logprobs: Float[Tensor, "B T"]) -> None:
        if not torch.is_grad_enabled():  # a line search tries weights: their ratio is meant to differ from 1
            return
        deviation = ratio_deviation(logprobs, micro.logprobs, micro.loss_mask)
        self.ratio_deviation = _larger(self.ratio_deviation, deviation)
        if self.ratios is not None:
            level = self.objective.policy_loss.ratio_level
            ratio = importance_ratio(logprobs.detach(), micro.logprobs, micro.loss_mask, level)
            self._latest = (ratio, micro.advantages, micro.loss_mask)

    def draw(self) -> None:
        """Count the ratios of the latest call of `terms` for the report's figure."""
        if self.ratios is not None and self._latest is not None:
            self.ratios.add(*self._latest)


class CriticLoss:
    """The value loss of a critic with its own backbone; a rlhf.training.step.Loss over Experience."""

    def __init__(self, models: Models, objective: Objective) -> None:
        self.models = models
        self.objective = objective

    def denominators(self, batch: Experience) -> dict[str, float]:
        """Compute the denominator of the value loss from the whole minibatch."""
        return {"value": self.objective.denominators(batch)["value"]}

    def terms(self, micro: Experience) -> tuple[dict[str, Tensor], dict[str, Mean]]:
        """Compute the value loss, summed over a micro-batch, and its metrics."""
        micro = micro.to(self.models.device)
        return self.objective.value_term(micro, self.models.values(micro))


class SampledPairLoss:
    """An offline pair loss on pairs sampled from the policy; a rlhf.training.step.Loss over SampledPairs.

    To the offline loss it adds the metrics of an online update: the distance from the policy that sampled the pairs.
    """

    def __init__(self, models: Models, pair_loss: PairLoss) -> None:
        self.models = models
        self.pairs = PairwiseLoss(models, pair_loss)
        self.ratio_deviation: Number = 0.0  # as in OnlineLoss

    def denominators(self, batch: SampledPairs) -> dict[str, float]:
        """Return the number of pairs in the minibatch, the denominator of the loss."""
        return self.pairs.denominators(batch)

    def terms(self, micro: SampledPairs) -> tuple[dict[str, Tensor], dict[str, Mean]]:
        """Compute the loss, summed over the pairs of `micro` (each row is a whole pair), and its metrics."""
        rows = stack_sides(micro).to(self.models.device)
        micro = micro.to(self.models.device)
        old_logprobs, mask = torch.cat([micro.chosen_old_logprobs, micro.rejected_old_logprobs]), rows.loss_mask
        tokens = self.models.policy_tokens(rows)
        logprobs = tokens.logprobs.detach()
        self.ratio_deviation = _larger(self.ratio_deviation, ratio_deviation(logprobs, old_logprobs, mask))
        terms, metrics = self.pairs.compare(micro, rows, tokens.logprobs)
        metrics |= {
            "policy/ratio": Mean.of(importance_ratio(logprobs, old_logprobs, mask, "token"), mask),
            "policy/entropy": Mean.of(tokens.entropy, mask),
            "kl/old": Mean.of(kl_old_new(logprobs, old_logprobs, mask), mask),
        }
        return terms, metrics


def ratio_deviation(logprobs: Float[Tensor, "B T"], old: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Number:
    """Compute the largest |pi / pi_old - 1| over live tokens; on a GPU it stays there."""
    difference = torch.where(mask, logprobs.detach() - old, 0.0)
    largest = torch.expm1(difference).abs().max()
    return largest if largest.is_cuda else float(largest)


def _larger(first: Number, second: Number) -> Number:
    """Return the larger number, without waiting for those that are on a GPU."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.maximum(first, second)
    if isinstance(second, Tensor):
        return second.clamp(min=first)
    return max(first, second)


class DemonstrationLoss:
    """A loss per token of demonstrations, of SFT their likelihood; a rlhf.training.step.Loss over Demonstrations.

    Computed at temperature 1 at any temperature of the run: demonstrations are not drawn from the policy.
    """

    def __init__(self, models: Models, loss: DemonstratedLoss, *, coef: float = 1.0, name: str = "sft") -> None:
        """Set the loss per token, the weight, and the name: sft, or ptx if mixed into an online update."""
        self.models = models
        self.loss = loss
        self.coef = coef
        self.name = name
        self.row_values: dict[str, Tensor] = {}  # of each demonstration of the latest call of `terms`, per token

    def denominators(self, batch: Demonstrations) -> dict[str, float]:
        """Compute the denominator of the loss from the whole minibatch."""
        _, denominator = token_weights(batch.loss_mask, self.loss.aggregate, max_tokens=batch.loss_mask.shape[1])
        return {self.name: max(denominator, 1.0)}

    def terms(self, micro: Demonstrations) -> tuple[dict[str, Tensor], dict[str, Mean]]:
        """Compute the loss, summed over a micro-batch, and its metrics."""
        micro = micro.to(self.models.device)
        compare = self.models.comparison(self.loss, micro)
        tokens = self.models.policy_tokens(micro, temperature=1.0, compare=compare)
        weights = loss_weights(micro.loss_mask, self.loss.aggregate, max_tokens=micro.loss_mask.shape[1])
        per_token = self.loss.per_token(tokens.logprobs, tokens.compared)
        total = (torch.where(micro.loss_mask, per_token, 0.0) * weights).sum()
        lengths = micro.loss_mask.sum(dim=1).clamp(min=1)
        self.row_values = {
            "loss": torch.where(micro.loss_mask, per_token.detach(), 0.0).sum(dim=1) / lengths,
            "accuracy": (tokens.first_choice & micro.loss_mask).sum(dim=1) / lengths,
        }
        metrics = {f"loss/{self.name}": Mean.of(per_token, micro.loss_mask)}
        if self.name == "sft":
            metrics["loss/accuracy"] = Mean.of(tokens.first_choice, micro.loss_mask)
        if tokens.compared is not None:
            metrics |= self.loss.measure(tokens.compared, micro.loss_mask)
        return {self.name: self.coef * total}, metrics
