"""DPO with a hinge (Liu et al. 2024)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from rlhf.algorithms.offline_loss import LogRatioLoss
from rlhf.section import Positive, Usual

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from rlhf.types import Side


class Hinge(LogRatioLoss):
    """DPO with a hinge instead of the logistic loss (Liu et al. 2024).

        L = max(0, δ - β (h_w - h_l)),     δ = margin

    It is the hinge-norm loss of RSO, with margin 1.
    """

    type: Literal["hinge"] = "hinge"
    beta: Annotated[
        Positive,
        Usual(
            low=0.01,
            high=5.0,
            rule="preference-beta",
            reason="If β is too small the policy leaves the reference: a pair has a gradient until its log-ratios are "
            "margin / β apart. If it is too large nothing is learned.",
            source="Rafailov et al. 2023, sec. 6.1: 0.05 to 5; Zephyr's recipe: 0.01",
            fix="0.1",
        ),
    ] = 0.1
    """As in DPO."""
    margin: Positive = 1.0
    """A pair has no gradient once the chosen side leads by this much implicit reward."""

    def compare(self, chosen: Side, rejected: Side) -> Float[Tensor, " B"]:
        """Compute the loss of each pair, without the likelihood of its chosen side."""
        return (self.margin - self.beta * (chosen.log_ratios - rejected.log_ratios)).relu()
