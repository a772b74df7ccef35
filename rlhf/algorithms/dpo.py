"""Direct preference optimization (Rafailov et al. 2023), and conservative DPO (Mitchell 2023)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from rlhf.algorithms.offline_loss import LogRatioLoss, usual_beta, usual_smoothing
from rlhf.algorithms.presets import preset
from rlhf.section import Positive

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from rlhf.types import Side


class Dpo(LogRatioLoss):
    """Direct preference optimization (Rafailov et al. 2023); with label smoothing, conservative DPO (cDPO).

        L = -(1 - ε) log σ(z) - ε log σ(-z),     z = β (h_w - h_l),  ε = label_smoothing

    The loss is eq. 7 of the paper. cDPO (Mitchell 2023) takes ε to be the share of flipped labels; its optimum is at
    σ(z) = 1 - ε, so the margin stays finite. It is not robust_dpo.
    """

    type: Literal["dpo"] = "dpo"
    beta: Annotated[
        Positive, usual_beta(0.01, 5.0, "Rafailov et al. 2023, sec. 6.1: 0.05 to 5; Zephyr's recipe: 0.01")
    ] = 0.1
    """Factor of the log-ratio to the reference (nats per sequence); a larger value stays closer to it."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5), usual_smoothing("Mitchell 2023 (cDPO): 0.1")] = 0.0
    """Assumed share of flipped labels; 0.1 is usual for cDPO."""

    def compare(self, chosen: Side, rejected: Side) -> Float[Tensor, " B"]:
        """Compute the loss of each pair, without the likelihood of its chosen side."""
        from torch.nn.functional import logsigmoid

        z, eps = self.beta * (chosen.log_ratios - rejected.log_ratios), self.label_smoothing
        return -(1 - eps) * logsigmoid(z) - eps * logsigmoid(-z)


preset("cdpo", {"algorithm": {"loss": {"type": "dpo", "label_smoothing": 0.1}}})
