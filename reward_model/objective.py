"""The reward model's loss on preference pairs, in the form that `optimizer_step` expects."""

from __future__ import annotations

import torch
from torch import Tensor

from reward_model.losses import bradley_terry, wins
from reward_model.model import pair_scores
from rlhf.config.sections import RewardModelLoss
from rlhf.masked import Mean
from rlhf.models.backbone import autocast
from rlhf.models.scalar_head import ScalarHeadModel
from rlhf.types import PreferencePairs


class PairLoss:
    """The Bradley-Terry loss over pairs: one term, `rm`, its sum divided by the number of pairs in the minibatch."""

    def __init__(self, model: ScalarHeadModel, config: RewardModelLoss, *, dtype: str) -> None:
        self.model = model
        self.config = config
        self.dtype = dtype

    def norms(self, batch: PreferencePairs) -> dict[str, float]:
        """Return the number of pairs, by which the loss is divided."""
        return {"rm": float(len(batch))}

    def terms(self, micro: PreferencePairs) -> tuple[dict[str, Tensor], dict[str, Mean]]:
        """Compute the loss summed over the pairs of `micro`, and the metrics loss, accuracy, margin and mean score."""
        device = self.model.head.weight.device
        pairs = micro.to(device)
        with autocast(self.dtype, device):
            chosen, rejected = pair_scores(self.model, pairs)
        margins = pairs.margins.to(chosen.dtype) if self.config.use_margin else torch.zeros_like(chosen)
        losses = bradley_terry(chosen, rejected, margins, centering=self.config.centering)
        gaps = (chosen - rejected).detach()
        metrics = {
            "loss/rm": Mean.of(losses),
            "rm/accuracy": Mean.of(wins(gaps)),
            "rm/margin": Mean.of(gaps),
            "rm/score_mean": Mean.of(chosen) + Mean.of(rejected),
        }
        return {"rm": losses.sum()}, metrics
