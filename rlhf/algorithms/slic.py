"""SLiC-HF (Zhao et al. 2023): sequence likelihood calibration."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from rlhf.algorithms.offline_loss import PairLoss
from rlhf.section import NonNegative, Positive

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from rlhf.types import Side


class Slic(PairLoss):
    """SLiC-HF (Zhao et al. 2023): a hinge on log-probabilities plus the chosen side's likelihood; no reference.

        L = max(0, δ - log π(y_w) + log π(y_l)) - λ log π(y_w),     δ = margin,  λ = nll_coef

    Departure: the paper's second term is over a target of the SFT data, or over the best-ranked of several samples; in
    a pair, the best-ranked is the chosen completion.
    """

    type: Literal["slic"] = "slic"
    needs_reference: ClassVar[bool] = False
    margin: Positive = 1.0
    """By how much the chosen side should be likelier, in nats summed over the completion."""
    nll_coef: NonNegative = 0.5
    """Weight of the chosen side's negative log-likelihood, summed over its tokens."""

    def reward(self, side: Side) -> Float[Tensor, " B"]:
        """Compute the implicit reward of one side of each pair, log π(y)."""
        return side.logprobs

    def per_pair(self, chosen: Side, rejected: Side) -> Float[Tensor, " B"]:
        """Compute the loss of each pair."""
        return (self.margin - chosen.logprobs + rejected.logprobs).relu() - self.nll_coef * chosen.logprobs
