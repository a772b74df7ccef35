"""The axes of an algorithm: advantage, policy loss, value loss, place of the KL. A choice is a value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from rlhf.config.base import Section

Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


def type_or(default: str) -> Callable[[object], str]:
    """Which member of a union a section means: its `type`, or `default` where it does not say."""

    def tag(value: object) -> str:
        found = value.get("type", default) if isinstance(value, dict) else getattr(value, "type", default)
        return str(found)

    return tag


class Gae(Section):
    """Generalized advantage estimation with a critic (Schulman et al. 2016)."""

    type: Literal["gae"] = "gae"
    gamma: Fraction = 1.0
    """Discount per token; 1 for text, which ends."""
    gae_lambda: Fraction = 0.95
    """Bias against variance: 0 is the TD error, 1 is reward-to-go minus value."""
    whiten: bool = True
    """Advantages to mean 0 and variance 1 over the live tokens of the whole step."""
    whiten_rewards: bool = False
    """Token rewards to variance 1 over the live tokens of the step, their mean kept."""


class Group(Section):
    """A baseline from the other completions of the same prompt; no critic."""

    type: Literal["group"] = "group"
    baseline: Literal["normalized", "centered", "leave_one_out"] = "normalized"
    """normalized: (score - mean) / std (GRPO); centered: score - mean (Dr. GRPO); leave_one_out: RLOO."""


class BatchWhiten(Section):
    """Reward-to-go, whitened over the batch (REINFORCE++); no critic."""

    type: Literal["batch_whiten"] = "batch_whiten"
    gamma: Fraction = 1.0
    """Discount per token."""
    whiten: bool = True
    """False leaves plain REINFORCE without a baseline."""


Advantage = Annotated[Gae | Group | BatchWhiten, Field(discriminator="type")]


class ClipLoss(Section):
    """The clipped surrogate (Schulman et al. 2017, eq. 7)."""

    type: Literal["clip"] = "clip"
    ratio: Literal["token", "sequence", "sequence_mean"] = "token"
    """Over what the importance ratio is taken; sequence_mean is GSPO's length-normalized one."""
    clip_eps_low: Fraction = 0.2
    """The ratio is clipped below at 1 - clip_eps_low."""
    clip_eps_high: NonNegative = 0.2
    """The ratio is clipped above at 1 + clip_eps_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Where A < 0, the objective is bounded below by dual_clip * A (Ye et al. 2020, eq. 5); null: off."""
    aggregate: Literal["token_mean", "sequence_mean", "sequence_sum", "constant"] = "token_mean"
    """How tokens are weighted; see rlhf.algo.policy_loss.token_weights."""
    entropy_coef: NonNegative = 0.0
    """Weight of the entropy bonus, per nat."""


class PenaltyLoss(Section):
    """The surrogate with an adaptive penalty on KL(old || new) instead of the clip (Schulman et al. 2017, sec. 4)."""

    type: Literal["penalty"] = "penalty"
    ratio: Literal["token", "sequence", "sequence_mean"] = "token"
    """Over what the importance ratio is taken."""
    coef: Positive = 1.0
    """The first coefficient of KL(old || new); doubled or halved after each step."""
    target: Positive = 0.01
    """Wanted KL(old || new), nats per token: above 1.5 x the coefficient doubles, below target / 1.5 it halves."""
    aggregate: Literal["token_mean", "sequence_mean", "sequence_sum", "constant"] = "token_mean"
    """How tokens are weighted; see rlhf.algo.policy_loss.token_weights."""
    entropy_coef: NonNegative = 0.0
    """Weight of the entropy bonus, per nat."""


PolicyLossConfig = Annotated[
    Annotated[ClipLoss, Tag("clip")] | Annotated[PenaltyLoss, Tag("penalty")], Discriminator(type_or("clip"))
]


class ValueLossConfig(Section):
    """The critic's squared error, clipped around the old values."""

    coef: Positive = 0.1
    """Weight beside the policy's loss where the two share a backbone; a separate critic is scaled by it too."""
    clip_eps: Positive | None = 0.2
    """How far a value may move from the old one before its gradient stops, in units of score; null: no clip."""


class FixedKl(Section):
    """The coefficient stays as it is."""

    type: Literal["fixed"] = "fixed"


class AdaptiveKl(Section):
    """The proportional controller of Ziegler et al. 2019, sec. 2.2."""

    type: Literal["adaptive"] = "adaptive"
    target: Positive = 6.0
    """Wanted KL to the reference, in nats per sequence (summed over the tokens, averaged over completions)."""
    horizon: Positive = 10000.0
    """In completions: the coefficient is multiplied by 1 + error * completions / horizon, the error clipped at 0.2."""


class Kl(Section):
    """The penalty that keeps the policy near the reference."""

    placement: Literal["reward", "loss", "none"] = "reward"
    """Subtracted from the token rewards, added to the loss, or neither."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """Schulman's estimators; in the loss only k2 and k3 (k1's expected gradient is zero)."""
    coef: NonNegative = 0.05
    """Units of score per nat."""
    controller: Annotated[
        Annotated[FixedKl, Tag("fixed")] | Annotated[AdaptiveKl, Tag("adaptive")], Discriminator(type_or("fixed"))
    ] = FixedKl()
    """fixed or adaptive."""

    @model_validator(mode="after")
    def _has_a_gradient(self) -> Kl:
        if self.placement == "loss" and self.estimator == "k1":
            raise ValueError("k1 in the loss has an expected gradient of zero; use k2 (exact gradient) or k3 (GRPO's)")
        if self.placement == "none" and self.controller.type == "adaptive":
            raise ValueError("an adaptive controller needs kl.placement to be reward or loss")
        return self


class Online(Section):
    """An algorithm that samples from the policy it trains."""

    preset: str | None = None
    """The named algorithm that these settings started from."""
    advantage: Advantage
    """Where credit comes from."""
    policy_loss: PolicyLossConfig = ClipLoss()
    """What the policy descends."""
    value_loss: ValueLossConfig | None = None
    """What the critic descends; null without a critic."""
    kl: Kl = Kl(placement="none", coef=0.0)
    """The penalty to the reference."""
    target_kl: Positive | None = None
    """Stop a step's remaining epochs when KL(old || new) exceeds 1.5 x this, nats per token; null: never."""
    drop_uniform_groups: bool = False
    """Leave out groups whose completions all scored alike (DAPO)."""
    ptx_coef: NonNegative = 0.0
    """Weight of the next-token loss on data.sft beside the policy's (PPO-ptx, Ouyang et al. 2022, eq. 2)."""

    @model_validator(mode="after")
    def _critic_where_needed(self) -> Online:
        if isinstance(self.advantage, Gae) != (self.value_loss is not None):
            raise ValueError("GAE needs algorithm.value_loss, and only GAE does")
        if self.drop_uniform_groups and not isinstance(self.advantage, Group):
            raise ValueError("drop_uniform_groups needs a group advantage")
        return self


class SftLoss(Section):
    """Next-token negative log-likelihood over completion tokens."""

    type: Literal["sft"] = "sft"
    aggregate: Literal["token_mean", "sequence_mean", "sequence_sum"] = "token_mean"
    """How tokens are weighted."""


class Offline(Section):
    """An algorithm that learns from a fixed data set."""

    preset: str | None = None
    """The named algorithm that these settings started from."""
    loss: SftLoss = SftLoss()
    """What the policy descends."""


def _kind(value: object) -> str:
    offline = "loss" in value if isinstance(value, dict) else isinstance(value, Offline)
    return "offline" if offline else "online"


Algorithm = Annotated[Annotated[Online, Tag("online")] | Annotated[Offline, Tag("offline")], Discriminator(_kind)]
"""Online unless it names a loss over fixed data."""
