"""PPO with an adaptive penalty on KL(old || new) in place of the clip (Schulman et al. 2017, sec. 4)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from rlhf.algorithms.policy_loss import RatioLevel, Surrogate, TokenLoss, Tokens
from rlhf.algorithms.ppo import CRITIC
from rlhf.algorithms.presets import preset
from rlhf.section import Positive

if TYPE_CHECKING:
    from rlhf.algorithms import online
    from rlhf.algorithms.advantage import StepSizes

LARGEST_COEF_CHANGE = 1e6  # of the coefficient against its start, both ways: at 0 or infinity it would stay

preset("ppo_penalty", {"algorithm": {**CRITIC, "policy_loss": {"type": "penalty"}}})


class PenaltyLoss(TokenLoss):
    """The surrogate with an adaptive penalty on KL(old || new) instead of the clip (Schulman et al. 2017, sec. 4)."""

    type: Literal["penalty"] = "penalty"
    ratio: RatioLevel = "token"
    """As in the clipped loss."""
    coef: Positive = 1.0
    """Initial coefficient of KL(old || new); it may rise or fall by `factor` after each step, and stays within a
    millionth and a million times this."""
    target: Positive = 0.01
    """Target KL(old || new), nats per token; above band x target the coefficient rises, below target / band falls."""
    band: Annotated[float, Field(gt=1)] = 1.5
    """Width of the band around the target within which the coefficient stays (Heess et al. 2017: 2)."""
    factor: Annotated[float, Field(gt=1)] = 2.0
    """Factor of the coefficient outside the band (Heess et al. 2017: 1.5)."""
    backtrack_above: Positive | None = None
    """After a step whose KL(old || new) is above this x target, move the policy's weights half of the way back until
    the KL is not above it; costs a pass without gradient in each step. null: never."""

    @property
    def ratio_level(self) -> RatioLevel:
        """Return the level of the importance ratio."""
        return self.ratio

    @property
    def drawn_ratios(self) -> tuple[float, float] | None:
        """Return the range around 1 that has most of the ratios."""
        return 0.5, 1.5

    @property
    def coef_metric(self) -> str:
        """Return the metric of the penalty's coefficient."""
        return "kl/penalty_coef"

    @property
    def start_coef(self) -> float:
        """Return the coefficient of the first step."""
        return self.coef

    @property
    def kl_limit(self) -> float | None:
        """Return the KL(old || new) above which a step is moved back."""
        return None if self.backtrack_above is None else self.backtrack_above * self.target

    def check_run(self, *, sharding: str, splits_weights: bool, shares_backbone: bool) -> None:
        """Check that every rank has whole weights to move back, if steps are moved back."""
        if self.backtrack_above is not None and splits_weights:
            raise ValueError(
                f"policy_loss.backtrack_above moves whole weights back, but sharding is {sharding}: set sharding=ddp, "
                "or policy_loss.backtrack_above=null"
            )

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

        It is divided by `factor` if KL < target / band and multiplied by it if KL > target * band; both are in
        nats per token. It stays within a millionth and a million times its start.
        """
        if kl < self.target / self.band:
            return max(coef / self.factor, self.coef / LARGEST_COEF_CHANGE)
        if kl > self.target * self.band:
            return min(coef * self.factor, self.coef * LARGEST_COEF_CHANGE)
        return coef
