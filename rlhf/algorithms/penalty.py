"""PPO with an adaptive penalty on KL(old || new) in place of the clip (Schulman et al. 2017, sec. 4)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from rlhf.algorithms.policy_loss import RatioLevel, Surrogate, TokenLoss, Tokens
from rlhf.algorithms.ppo import CRITIC
from rlhf.algorithms.presets import preset
from rlhf.section import Positive

if TYPE_CHECKING:
    from rlhf.algorithms import online
    from rlhf.algorithms.advantage import StepSizes

preset("ppo_penalty", {"algorithm": {**CRITIC, "policy_loss": {"type": "penalty"}}})


class PenaltyLoss(TokenLoss):
    """The surrogate with an adaptive penalty on KL(old || new) instead of the clip (Schulman et al. 2017, sec. 4)."""

    coef_metric: ClassVar[str] = "kl/penalty_coef"

    type: Literal["penalty"] = "penalty"
    ratio: RatioLevel = "token"
    """As in the clipped loss."""
    coef: Positive = 1.0
    """Initial coefficient of KL(old || new); it may double or halve after each step."""
    target: Positive = 0.01
    """Target KL(old || new), nats per token; above 1.5 x target the coefficient doubles, below target / 1.5 halves."""

    @property
    def ratio_level(self) -> RatioLevel:
        """Return the level of the importance ratio."""
        return self.ratio

    @property
    def start_coef(self) -> float:
        """Return the coefficient of the first step."""
        return self.coef

    def check_sizes(self, sizes: StepSizes, algorithm: online.Online) -> None:
        """Check that a step has a second update, at which KL(old || new) is not 0."""
        if sizes.updates < 2:
            raise ValueError(
                "the penalty is steered by KL(old || new), which is 0 at a step's first update: "
                "set batch.epochs or batch.minibatches to 2 or more"
            )

    def per_token(self, tokens: Tokens) -> Surrogate:
        """Compute PPO's KL-penalized surrogate loss (Schulman et al. 2017, eq. 8); the coefficient is the step's.

        -(ratio * A - coef * KL(old || new))
        """
        return Surrogate(per_token=-(tokens.ratio * tokens.advantages - tokens.coefs.penalty * tokens.old_kl))

    def next_coef(self, coef: float, *, kl: float) -> float:
        """Return the coefficient of the penalty for the next step (Schulman et al. 2017, sec. 4).

        It is halved where KL < target / 1.5 and doubled where KL > target * 1.5; both are in nats per token.
        """
        if kl < self.target / 1.5:
            return coef / 2.0
        if kl > self.target * 1.5:
            return coef * 2.0
        return coef
