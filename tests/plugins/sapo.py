"""A user's policy loss in a file of its own: SAPO, soft adaptive policy optimization (Gao et al. 2025)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field

from rlhf.algo.masked import Mean
from rlhf.algorithms.policy_loss import Surrogate, TokenLoss, Tokens
from rlhf.section import Usual

Temperature = Annotated[
    float,
    Field(gt=0),
    Usual(
        low=0.5,
        high=2.0,
        rule="sapo-temperature",
        reason="A gate that is too sharp is a clip, and one that is too flat holds nothing back.",
        source="Gao et al. 2025: 1 and 1.05",
        fix="1",
    ),
]


class Sapo(TokenLoss):
    """A smooth gate in place of the clip (Gao et al. 2025)."""

    metrics: ClassVar[str] = "policy/gate | share | mean slope of the gate, relative to that at ratio 1"

    type: Literal["sapo"] = "sapo"
    tau_pos: Temperature = 1.0
    """Temperature of the gate if the advantage is positive."""
    tau_neg: Temperature = 1.05
    """The same if it is negative; larger, since pushing a token down raises all others."""

    def per_token(self, tokens: Tokens) -> Surrogate:
        """Compute the gated loss.

        -4 / tau * sigmoid(tau * (ratio - 1)) * A,     tau by the sign of A
        """
        tau = torch.where(tokens.advantages > 0, self.tau_pos, self.tau_neg)
        gate = torch.sigmoid(tau * (tokens.ratio - 1.0))
        slope = Mean.of(4.0 * gate * (1.0 - gate), tokens.mask)
        return Surrogate(per_token=-gate * 4.0 / tau * tokens.advantages, metrics={"policy/gate": slope})
