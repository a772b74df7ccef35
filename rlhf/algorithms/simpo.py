"""Simple preference optimization (Meng et al. 2024)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from rlhf.algorithms.offline_loss import PairLoss
from rlhf.section import Facts, NonNegative, Positive, Rule, Usual, Value

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from rlhf.types import Side


def large_margin(loss: Simpo, facts: Facts) -> Value | None:
    """Return the target margin relative to β if few pairs can reach it."""
    ratio = loss.gamma / loss.beta
    return ratio if ratio > 1.0 else None


class Simpo(PairLoss):
    """Simple preference optimization (Meng et al. 2024); no reference.

        L = -log σ(β (m_w - m_l) - γ)

    The loss is eq. 6 of the paper. Some implementations have γ/β as their setting instead of γ.
    """

    type: Literal["simpo"] = "simpo"
    needs_reference: ClassVar[bool] = False
    beta: Annotated[
        Positive,
        Usual(
            low=1.0,
            high=10.0,
            rule="preference-beta",
            reason="β multiplies a mean log-probability per token, which is small: it has another scale than DPO's β.",
            source="Meng et al. 2024: 2 to 10",
            fix="2",
        ),
    ] = 2.0
    """Multiplies the mean log-probability per token, in nats."""
    gamma: NonNegative = 1.0
    """Target margin between the two rewards, which include beta."""

    lint_rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            name="simpo-margin",
            level="warning",
            key="gamma / beta",
            violation=large_margin,
            reason="Few pairs reach a target margin above β, a nat per token.",
            source="Meng et al. 2024, README of the code: 0.1 to 0.8 β, and a search from 0 to β",
            fix="set gamma to half of beta",
        ),
    )

    def reward(self, side: Side) -> Float[Tensor, " B"]:
        """Compute the implicit reward of one side of each pair, β m."""
        return self.beta * side.mean_logprobs

    def per_pair(self, chosen: Side, rejected: Side) -> Float[Tensor, " B"]:
        """Compute the loss of each pair."""
        from torch.nn.functional import logsigmoid

        return -logsigmoid(self.beta * (chosen.mean_logprobs - rejected.mean_logprobs) - self.gamma)
