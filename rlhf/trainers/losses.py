"""Losses over models: the seam between the mathematics (rlhf.algo) and the one optimizer step."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf.algo.objective import Coefs, Objective
from rlhf.algo.policy_loss import Aggregate, importance_ratio, kl_old_new, token_weights
from rlhf.config.algorithm import OnlinePairLoss
from rlhf.masked import Mean
from rlhf.models.bundle import Models
from rlhf.trainers.preference import PairwiseLoss, both_sides
from rlhf.types import Demonstrations, Experience, SampledPairs


def online_losses(
    models: Models, objective: Objective, coefs: Coefs
) -> tuple[OnlineLoss | SampledPairLoss] | tuple[OnlineLoss, CriticLoss]:
    """The losses of an online update, the policy's first: over the tokens of an Experience, or over SampledPairs.

    That of a critic with a backbone of its own stands apart: what its forward pass keeps for the backward pass is made
    when what the policy's kept is gone.
    """
    config = objective.algorithm.policy_loss
    if isinstance(config, OnlinePairLoss):
        return (SampledPairLoss(models, config),)
    policy = OnlineLoss(models, objective, coefs)
    return (policy,) if models.critic is None else (policy, CriticLoss(models, objective))


class OnlineLoss:
    """The online objective on the policy, its value head included; a rlhf.runtime.step.Loss over Experience."""

    def __init__(self, models: Models, objective: Objective, coefs: Coefs) -> None:
        self.models = models
        self.objective = objective
        self.coefs = coefs
        self.ratio_deviation = 0.0  # max |pi / pi_old - 1| since it was last set to 0

    def norms(self, batch: Experience) -> dict[str, float]:
        """Of the whole minibatch."""
        norms = self.objective.norms(batch)
        return norms if self.models.critic is None else {"policy": norms["policy"]}

    def terms(self, micro: Experience) -> tuple[dict[str, Tensor], dict[str, Mean]]:
        """Sums over a micro-batch."""
        micro = micro.to(self.models.device)
        if self.models.critic is None:
            outputs = self.models.outputs(micro)
            self._watch(micro, outputs.logprobs)
            return self.objective.loss(micro, outputs, self.coefs)
        tokens = self.models.policy_tokens(micro)
        self._watch(micro, tokens.logprobs)
        return self.objective.policy_term(micro, tokens.logprobs, tokens.entropy, self.coefs)

    def _watch(self, micro: Experience, logprobs: Float[Tensor, "B T"]) -> None:
        deviation = ratio_deviation(logprobs, micro.logprobs, micro.loss_mask)
        self.ratio_deviation = max(self.ratio_deviation, deviation)


class CriticLoss:
    """The value loss on a critic with a backbone of its own; a rlhf.runtime.step.Loss over Experience."""

    def __init__(self, models: Models, objective: Objective) -> None:
        self.models = models
        self.objective = objective

    def norms(self, batch: Experience) -> dict[str, float]:
        """Of the whole minibatch."""
        return {"value": self.objective.norms(batch)["value"]}

    def terms(self, micro: Experience) -> tuple[dict[str, Tensor], dict[str, Mean]]:
        """Sums over a micro-batch."""
        micro = micro.to(self.models.device)
        return self.objective.value_term(micro, self.models.values(micro))


class SampledPairLoss:
    """An offline pair loss on pairs that the policy drew; a rlhf.runtime.step.Loss over SampledPairs.

    It adds to the offline loss what an online update is watched by: the distance from the policy that drew the pairs.
    """

    def __init__(self, models: Models, config: OnlinePairLoss) -> None:
        self.models = models
        self.pairs = PairwiseLoss(models, config.loss)
        self.ratio_deviation = 0.0  # as OnlineLoss's

    def norms(self, batch: SampledPairs) -> dict[str, float]:
        """The number of pairs in the minibatch."""
        return self.pairs.norms(batch)

    def terms(self, micro: SampledPairs) -> tuple[dict[str, Tensor], dict[str, Mean]]:
        """The loss summed over the pairs of `micro`: a row is a pair, so no cut can part its sides."""
        micro = micro.to(self.models.device)
        rows = both_sides(micro)
        old, mask = torch.cat([micro.chosen_old_logprobs, micro.rejected_old_logprobs]), rows.completion_mask
        tokens = self.models.policy_tokens(rows)
        said = tokens.logprobs.detach()
        self.ratio_deviation = max(self.ratio_deviation, ratio_deviation(said, old, mask))
        terms, observed = self.pairs.compare(micro, rows, tokens.logprobs)
        observed |= {
            "policy/ratio": Mean.of(importance_ratio(said, old, mask, "token"), mask),
            "policy/entropy": Mean.of(tokens.entropy, mask),
            "kl/old": Mean.of(kl_old_new(said, old, mask), mask),
        }
        return terms, observed


def ratio_deviation(logprobs: Float[Tensor, "B T"], old: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> float:
    """The largest |pi / pi_old - 1| of a live token."""
    difference = torch.where(mask, logprobs.detach() - old, 0.0)
    return float(torch.expm1(difference).abs().max())


class DemonstrationLoss:
    """Negative log-likelihood of demonstrations; a rlhf.runtime.step.Loss over Demonstrations.

    At temperature 1 whatever the run samples at: nobody drew demonstrations from the policy.
    """

    def __init__(self, models: Models, *, aggregate: Aggregate, coef: float = 1.0, name: str = "sft") -> None:
        """`name` is sft, or ptx where it is mixed into an online update with weight `coef`."""
        self.models = models
        self.aggregate = aggregate
        self.coef = coef
        self.name = name

    def norms(self, batch: Demonstrations) -> dict[str, float]:
        """Of the whole minibatch."""
        _, norm = token_weights(batch.loss_mask, self.aggregate, max_tokens=batch.loss_mask.shape[1])
        return {self.name: max(norm, 1.0)}

    def terms(self, micro: Demonstrations) -> tuple[dict[str, Tensor], dict[str, Mean]]:
        """Sums over a micro-batch."""
        micro = micro.to(self.models.device)
        tokens = self.models.policy_tokens(micro, temperature=1.0)
        weights, _ = token_weights(micro.loss_mask, self.aggregate, max_tokens=micro.loss_mask.shape[1])
        total = (torch.where(micro.loss_mask, -tokens.logprobs, 0.0) * weights).sum()
        observed = {f"loss/{self.name}": Mean.of(-tokens.logprobs, micro.loss_mask)}
        if self.name == "sft":
            observed["loss/accuracy"] = Mean.of(tokens.first_choice, micro.loss_mask)
        return {self.name: self.coef * total}, observed
