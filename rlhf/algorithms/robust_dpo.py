"""Robust DPO (Chowdhury et al. 2024): DPO that is unbiased under flipped labels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from rlhf.algorithms.offline_loss import LogRatioLoss, usual_beta, usual_smoothing
from rlhf.section import Positive

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from rlhf.types import Side


class RobustDpo(LogRatioLoss):
    """DPO with a loss that is unbiased under flipped labels (Chowdhury et al. 2024).

        L = (-(1 - ε) log σ(z) + ε log σ(-z)) / (1 - 2ε),     z = β (h_w - h_l),  ε = label_smoothing

    Its expectation over labels that are flipped with probability ε is the DPO loss of the clean label. It can be
    negative.
    """

    type: Literal["robust_dpo"] = "robust_dpo"
    beta: Annotated[Positive, usual_beta(0.01, 5.0, "Rafailov et al. 2023, sec. 6.1: 0.05 to 5")] = 0.1
    """As in DPO."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5), usual_smoothing("Chowdhury et al. 2024: 0.1")] = 0.1
    """Assumed share of flipped labels; if it is too large, the loss has no lower bound."""

    def compare(self, chosen: Side, rejected: Side) -> Float[Tensor, " B"]:
        """Compute the loss of each pair, without the likelihood of its chosen side."""
        from torch.nn.functional import logsigmoid

        z, eps = self.beta * (chosen.log_ratios - rejected.log_ratios), self.label_smoothing
        mixed = -(1 - eps) * logsigmoid(z) + eps * logsigmoid(-z)
        return mixed / (1 - 2 * eps)
