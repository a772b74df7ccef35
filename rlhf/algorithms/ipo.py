"""Identity preference optimization (Azar et al. 2024): a regression of the margin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from rlhf.algorithms.offline_loss import LogRatioLoss
from rlhf.algorithms.presets import preset
from rlhf.section import Positive, Usual

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from rlhf.types import Side


class Ipo(LogRatioLoss):
    """Identity preference optimization (Azar et al. 2024).

        L = (h_w - h_l - 1/(2β))²

    The loss is eq. 17 of the paper. The meaning of β depends on the scale of h: with h summed over tokens (the paper,
    and DPO's reference repository) the margin is 1/(2β) nats per sequence; with h divided by the length (TRL), per
    token.
    """

    type: Literal["ipo"] = "ipo"
    beta: Annotated[
        Positive,
        Usual(
            low=0.01,
            high=1.0,
            rule="preference-beta",
            reason="The log-ratios are pulled 1 / (2 β) nats apart: a small β pulls the policy far from the reference, "
            "a large one hardly moves it.",
            source="Azar et al. 2024: 0.1 to 1",
            fix="0.1",
        ),
    ] = 0.1
    """The paper's tau: the difference of log-ratios is pulled towards 1 / (2 beta) nats."""
    normalize: Literal["none", "length"] = "none"
    """none: log-ratios summed over a completion (the paper); length: per token (TRL). Each needs its own beta."""

    def reward(self, side: Side) -> Float[Tensor, " B"]:
        """Compute the implicit reward of one side of each pair, β h."""
        return self.beta * self._log_ratios(side)

    def compare(self, chosen: Side, rejected: Side) -> Float[Tensor, " B"]:
        """Compute the loss of each pair, without the likelihood of its chosen side."""
        return (self._log_ratios(chosen) - self._log_ratios(rejected) - 1 / (2 * self.beta)) ** 2

    def _log_ratios(self, side: Side) -> Float[Tensor, " B"]:
        return side.mean_log_ratios if self.normalize == "length" else side.log_ratios


preset("ipo_per_token", {"algorithm": {"loss": {"type": "ipo", "normalize": "length"}}})
