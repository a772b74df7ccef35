"""The reward model's loss: Bradley-Terry with margin and centering, as the optimizer step wants it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from reward_model.model import pair_scores
from rlhf.algo.masked import Mean
from rlhf.config.reward_model import RewardModelLoss
from rlhf.models.backbone import autocast
from rlhf.models.scalar_head import ScalarHeadModel
from rlhf.transfer import to_device
from rlhf.types import PreferencePairs


def bradley_terry(
    chosen_scores: Float[Tensor, " B"],
    rejected_scores: Float[Tensor, " B"],
    margins: Float[Tensor, " B"],
    *,
    centering: float,
) -> Float[Tensor, " B"]:
    """Compute the negative log-likelihood of each preference, plus a pull of the two scores towards a zero sum.

        L = -log σ(r_c - r_r - m) + c · (r_c + r_r)²

    The first term is that of Bradley & Terry (1952) as in Stiennon et al. (2020) and Ouyang et al. (2022, eq. 1);
    the margin m is from Touvron et al. (2023, eq. 2). Preferences determine scores only up to a constant: the second
    term, with c = `centering` (0.01 is usual), removes that freedom (Eisenstein et al. 2023). Losses are not averaged
    over the pairs of a prompt: every pair counts once.
    """
    return -logsigmoid(chosen_scores - rejected_scores - margins) + centering * (chosen_scores + rejected_scores) ** 2


def win_indicator(gaps: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
    """Return 1 where the chosen side scores higher (gap > 0), ½ at a tie, else 0, so a constant score wins half."""
    return torch.heaviside(gaps, torch.full_like(gaps, 0.5))


class BradleyTerryLoss:
    """The Bradley-Terry loss over pairs: one term, `rm`, its sum divided by the number of pairs in the minibatch.

    `weigh` gives each pair a weight in the loss, but not in its metrics; None: 1 each.
    """

    def __init__(
        self,
        model: ScalarHeadModel,
        config: RewardModelLoss,
        *,
        dtype: str,
        weigh: Callable[[PreferencePairs], Float[Tensor, " B"]] | None = None,
    ) -> None:
        self.model = model
        self.config = config
        self.dtype = dtype
        self.weigh = weigh
        self.row_values: dict[str, Tensor] = {}  # of each pair of the latest call of `terms`

    def denominators(self, batch: PreferencePairs) -> dict[str, float]:
        """Return the number of pairs, by which the loss is divided."""
        return {"rm": float(len(batch))}

    def terms(self, micro: PreferencePairs) -> tuple[dict[str, Tensor], dict[str, Mean]]:
        """Compute the loss summed over the pairs of `micro`, and the metrics loss, accuracy, margin and mean score."""
        device = self.model.head.weight.device
        with autocast(self.dtype, device):
            chosen, rejected = pair_scores(self.model, micro)
        (margins,) = (
            to_device([micro.margins.to(chosen.dtype)], device)
            if self.config.use_margin
            else (torch.zeros_like(chosen),)
        )
        losses = bradley_terry(chosen, rejected, margins, centering=self.config.centering)
        gaps = (chosen - rejected).detach()
        self.row_values = {"loss": losses.detach(), "accuracy": win_indicator(gaps)}
        metrics = {
            "loss/rm": Mean.of(losses),
            "rm/accuracy": Mean.of(win_indicator(gaps)),
            "rm/margin": Mean.of(gaps),
            "rm/score_mean": Mean.of(chosen) + Mean.of(rejected),
        }
        weighted = losses if self.weigh is None else losses * self.weigh(micro).to(losses)
        return {"rm": weighted.sum()}, metrics
