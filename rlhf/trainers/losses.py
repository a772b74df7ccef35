"""Losses over models: the seam between the mathematics (rlhf.algo) and the one optimizer step."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf.algo.objective import Coefs, Objective
from rlhf.algo.policy_loss import Aggregate, token_weights
from rlhf.masked import Mean
from rlhf.models.bundle import Models
from rlhf.types import Demonstrations, Experience


class OnlineLoss:
    """The online objective on the run's models; a rlhf.runtime.step.Loss over Experience."""

    def __init__(self, models: Models, objective: Objective, coefs: Coefs) -> None:
        self.models = models
        self.objective = objective
        self.coefs = coefs
        self.ratio_deviation = 0.0  # max |pi / pi_old - 1| since it was last set to 0

    def norms(self, batch: Experience) -> dict[str, float]:
        """Of the whole minibatch."""
        return self.objective.norms(batch)

    def terms(self, micro: Experience) -> tuple[dict[str, Tensor], dict[str, Mean]]:
        """Sums over a micro-batch."""
        micro = micro.to(self.models.device)
        outputs = self.models.outputs(micro)
        self._observe_ratio(outputs.logprobs.detach(), micro)
        return self.objective.loss(micro, outputs, self.coefs)

    def _observe_ratio(self, logprobs: Tensor, micro: Experience) -> None:
        difference = torch.where(micro.loss_mask, logprobs - micro.logprobs, 0.0)
        deviation = float(torch.expm1(difference).abs().max())
        self.ratio_deviation = max(self.ratio_deviation, deviation)


class DemonstrationLoss:
    """Negative log-likelihood of demonstrations; a rlhf.runtime.step.Loss over Demonstrations."""

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
        tokens = self.models.policy_tokens(micro)
        weights, _ = token_weights(micro.loss_mask, self.aggregate, max_tokens=micro.loss_mask.shape[1])
        total = (torch.where(micro.loss_mask, -tokens.logprobs, 0.0) * weights).sum()
        observed = {f"loss/{self.name}": Mean.of(-tokens.logprobs, micro.loss_mask)}
        if self.name == "sft":
            observed["loss/accuracy"] = Mean.of(tokens.first_choice, micro.loss_mask)
        return {self.name: self.coef * total}, observed
