"""The loss of a process reward model: of each step, whether it is right (Lightman et al. 2023).

The model is one with a scalar head, whose score s at the last token of a step's separator is the logit of the step:

    p(right) = σ(s),   L = -[z log σ(s) + (1 - z) log σ(-s)]     for the label z in [0, 1]

A token-classification model with the logits (0, s) gives the same probabilities: so it is exported.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from rlhf.algo.masked import Mean
from rlhf.models.backbone import autocast
from rlhf.models.logprobs import Sequences
from rlhf.models.scalar_head import ScalarHeadModel
from rlhf.types import LabelledSteps


class StepLoss:
    """The cross-entropy of step labels: one term, `rm`, its sum divided by the number of steps in the minibatch."""

    def __init__(self, model: ScalarHeadModel, *, dtype: str) -> None:
        self.model = model
        self.dtype = dtype
        self.row_values: dict[str, Tensor] = {}  # of each row of the latest call of `terms`, averaged over its steps

    def denominators(self, batch: LabelledSteps) -> dict[str, float]:
        """Return the number of steps, by which the loss is divided."""
        return {"rm": max(float(batch.loss_mask.sum()), 1.0)}

    def terms(self, micro: LabelledSteps) -> tuple[dict[str, Tensor], dict[str, Mean]]:
        """Compute the loss summed over the steps of `micro`, and the metrics loss and accuracy."""
        device = self.model.head.weight.device
        micro = micro.to(device)
        with autocast(self.dtype, device):
            rows = Sequences.join(micro.prompt_ids, micro.prompt_mask, micro.completion_ids, micro.completion_mask)
            scores = self.model(rows)[:, -micro.completion_ids.shape[1] :]
        mask = micro.loss_mask
        logits = torch.where(mask, scores.float(), 0.0)
        labels = micro.labels.to(logits.dtype)
        losses = binary_cross_entropy_with_logits(logits, labels, reduction="none")
        correct = (logits.detach() > 0) == (labels > 0.5)
        wrong = mask & (labels <= 0.5)
        steps = mask.sum(dim=1).clamp(min=1)
        self.row_values = {
            "loss": torch.where(mask, losses.detach(), 0.0).sum(dim=1) / steps,
            "accuracy": (correct & mask).sum(dim=1) / steps,
        }
        metrics = {
            "loss/process": Mean.of(losses, mask),
            "process/accuracy": Mean.of(correct, mask),
            "process/errors_found": Mean.of(correct, wrong),
        }
        return {"rm": torch.where(mask, losses, 0.0).sum()}, metrics
