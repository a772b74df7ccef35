"""Robust DPO (Chowdhury et al. 2024): DPO that is unbiased under flipped labels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from rlhf.algorithms.offline_loss import LogRatioLoss
from rlhf.section import Positive, Usual

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
    beta: Annotated[
        Positive,
        Usual(
            low=0.01,
            high=5.0,
            rule="preference-beta",
            reason="If β is too small the policy leaves the reference; if it is too large nothing is learned.",
            source="Rafailov et al. 2023, sec. 6.1: 0.05 to 5",
            fix="0.1",
        ),
    ] = 0.1
    """As in DPO."""
    label_smoothing: Annotated[
        float,
        Field(ge=0, lt=0.5),
        Usual(
            high=0.3,
            rule="label-smoothing",
            reason="A smoothing above 0.3 assumes that a third of the labels are wrong, so the pairs carry little "
            "signal.",
            source="Chowdhury et al. 2024: 0.1",
            fix="0.1",
        ),
    ] = 0.1
    """Assumed share of flipped labels; if it is too large, the loss has no lower bound."""

    def compare(self, chosen: Side, rejected: Side) -> Float[Tensor, " B"]:
        """Compute the loss of each pair, without the likelihood of its chosen side."""
        from torch.nn.functional import logsigmoid

        z, eps = self.beta * (chosen.log_ratios - rejected.log_ratios), self.label_smoothing
        mixed = -(1 - eps) * logsigmoid(z) + eps * logsigmoid(-z)
        return mixed / (1 - 2 * eps)
