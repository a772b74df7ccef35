"""CISPO (MiniMax 2025, MiniMax-M1): the log-likelihood with a clipped importance weight, over groups as in DAPO."""

from __future__ import annotations

from typing import Literal

from rlhf.algorithms.grpo import GROUP_OF_8
from rlhf.algorithms.policy_loss import Surrogate, TokenLoss, Tokens
from rlhf.algorithms.presets import preset
from rlhf.section import Fraction, NonNegative

preset(
    "cispo",
    {
        "algorithm": {
            "advantage": {"type": "group"},
            "policy_loss": {"type": "cispo"},
            "drop_uniform_groups": True,
        },
        **GROUP_OF_8,
    },
)


class CispoLoss(TokenLoss):
    """Log-probability weighted by the clipped, detached importance ratio (CISPO, MiniMax 2025, eq. 4 and 5)."""

    type: Literal["cispo"] = "cispo"
    clip_eps_low: Fraction = 1.0
    """The weight is at least 1 - clip_eps_low; 1: no lower bound, as in the paper."""
    clip_eps_high: NonNegative = 4.0
    """The weight is at most 1 + clip_eps_high; the paper gives no value."""

    def per_token(self, tokens: Tokens) -> Surrogate:
        """Compute the log-likelihood, weighted by a clipped ratio (MiniMax 2025, MiniMax-M1, eq. 4 and 5).

            -sg(clip(ratio, 1 - low, 1 + high)) * A * log pi

        sg stops the gradient, so every token keeps its own, -weight * A * grad log pi, even if the clip is active:
        the clip bounds a token's weight but never silences it. Otherwise the loss has the gradient of ratio * A.
        """
        ratio = tokens.ratio.detach()
        weight = ratio.clamp(1.0 - self.clip_eps_low, 1.0 + self.clip_eps_high)
        clipped = weight != ratio
        return Surrogate(per_token=-weight * tokens.advantages * tokens.logprobs, clipped=clipped, outside=clipped)
