"""Proximal policy optimization (PPO; Schulman et al. 2017): the clipped surrogate, here with a critic and a KL penalty.

The file of the critic's advantages is gae.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from rlhf.algorithms.policy_loss import RatioLevel, Surrogate, TokenLoss, Tokens
from rlhf.algorithms.presets import preset
from rlhf.section import Facts, Fraction, NonNegative, Positive, Rule, Usual, Value

if TYPE_CHECKING:
    from rlhf.algorithms import online
    from rlhf.algorithms.advantage import StepSizes

CLIP_RANGES = {"token": (0.1, 0.3), "sequence": (0.1, 0.3), "sequence_mean": (1e-4, 1e-2)}
CLIP_BAND = CLIP_STEP = 1.5  # of the adaptive clip range: around its target KL, and of the range in one step
LARGEST_CLIP_SCALE = 4.0
CRITIC: dict[str, Any] = {"advantage": {"type": "gae"}, "value_loss": {}, "kl": {"placement": "reward"}}
"""The settings of every preset with a critic; Kl has its estimator and coefficient."""

preset("ppo", {"algorithm": CRITIC})


def clip_is_zero(loss: ClipLoss, facts: Facts) -> Value | None:
    """Return the clip range if it leaves no room on either side."""
    return 0.0 if loss.clip_eps_low == 0 and loss.clip_eps_high == 0 else None


def clip_never_binds(loss: ClipLoss, facts: Facts) -> Value | None:
    """Return a clip range below of 1 or more: a ratio is never negative, so nothing bounds it from below."""
    return loss.clip_eps_low if loss.clip_eps_low >= 1 else None


def clip_range(loss: ClipLoss, facts: Facts) -> Value | None:
    """Return the side of the clip range that is out of the range reported for its ratio."""
    if clip_is_zero(loss, facts) is not None:
        return None
    low, high = CLIP_RANGES[loss.ratio]
    return next((side for side in (loss.clip_eps_low, loss.clip_eps_high) if not low <= side <= high), None)


class ClipLoss(TokenLoss):
    """The clipped surrogate (Schulman et al. 2017, eq. 7)."""

    type: Literal["clip"] = "clip"
    ratio: RatioLevel = "token"
    """Importance ratio per token, per sequence, or (sequence_mean) GSPO's length-normalized ratio."""
    clip_eps_low: Fraction = 0.2
    """The ratio is clipped below at 1 - clip_eps_low."""
    clip_eps_high: NonNegative = 0.2
    """The ratio is clipped above at 1 + clip_eps_high."""
    dual_clip: Annotated[
        Annotated[float, Field(gt=1)] | None,
        Usual(
            low=1.5,
            high=10.0,
            rule="dual-clip",
            reason="Near 1 it clips nearly every negative advantage; at large values it has no effect.",
            source="Ye et al. 2020, eq. 5: 3",
            fix="algorithm.policy_loss.dual_clip=3, or null",
        ),
    ] = None
    """For A < 0 the objective is bounded below by dual_clip * A (Ye et al. 2020, eq. 5); null: off."""
    adapt_to: Positive | None = None
    """Target KL(old || new), nats per token: after a step above 1.5 x this the clip range is divided by 1.5, after one
    below this / 1.5 multiplied by it, within a quarter and four times its start; null: the range is fixed."""

    lint_rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            name="clip-zero",
            level="error",
            key="clip_eps_low, clip_eps_high",
            violation=clip_is_zero,
            reason="With a clip range of 0 every ratio other than 1 is clipped: nothing is learned after the first "
            "update.",
            source="Schulman et al. 2017, eq. 7",
            fix="algorithm.policy_loss.clip_eps_low=0.2 algorithm.policy_loss.clip_eps_high=0.2",
        ),
        Rule(
            name="clip-never-binds",
            level="error",
            key="clip_eps_low",
            violation=clip_never_binds,
            reason="A ratio is never negative, so 1 - clip_eps_low bounds nothing: one step can unlearn a token.",
            source="Schulman et al. 2017, eq. 7 and table 1: 0.1 to 0.3",
            fix="algorithm.policy_loss.clip_eps_low=0.2",
        ),
        Rule(
            name="clip-range",
            level="warning",
            key="clip_eps_low, clip_eps_high",
            violation=clip_range,
            reason="Published ranges: 0.1 to 0.3 for PPO, 0.28 for clip-higher, 3e-4 for GSPO's ratio per sequence.",
            source="Schulman et al. 2017, table 1; Yu et al. 2025 (DAPO), sec. 3.1; Zheng et al. 2025 (GSPO), sec. 5.1",
            fix="algorithm.policy_loss.clip_eps_low=0.2 algorithm.policy_loss.clip_eps_high=0.2; with "
            "algorithm.policy_loss.ratio=sequence_mean 3e-4 and 4e-4",
        ),
    )

    @property
    def ratio_level(self) -> RatioLevel:
        """Return the level of the importance ratio."""
        return self.ratio

    @property
    def has_narrow_clip(self) -> bool:
        """Return whether the clip range is as narrow as GSPO's."""
        return self.ratio == "sequence_mean"

    @property
    def drawn_ratios(self) -> tuple[float, float] | None:
        """Return three clip ranges on either side of 1; None if there is no range."""
        low, high = max(0.0, 1.0 - 3 * self.clip_eps_low), 1.0 + 3 * self.clip_eps_high
        return (low, high) if low < high else None

    @property
    def coef_metric(self) -> str:
        """Return the metric of the scale of the clip range, if that is adapted."""
        return "" if self.adapt_to is None else "policy/clip_scale"

    @property
    def start_coef(self) -> float:
        """Return the scale of the clip range in the first step."""
        return 0.0 if self.adapt_to is None else 1.0

    def next_coef(self, coef: float, *, kl: float) -> float:
        """Return the scale of the clip range for the next step.

        The rule of the adaptive penalty (Schulman et al. 2017, sec. 4), here for the clip: divided by 1.5 if
        KL > target * 1.5, multiplied by 1.5 if KL < target / 1.5, and kept within [1/4, 4].
        """
        if self.adapt_to is None:
            return coef
        factor = CLIP_STEP if kl < self.adapt_to / CLIP_BAND else 1.0
        factor = 1 / CLIP_STEP if kl > self.adapt_to * CLIP_BAND else factor
        return min(max(coef * factor, 1 / LARGEST_CLIP_SCALE), LARGEST_CLIP_SCALE)

    def check_sizes(self, sizes: StepSizes, algorithm: online.Online) -> None:
        """Check that a step has a second update, at which KL(old || new) is not 0, if that steers the clip range."""
        if self.adapt_to is not None and sizes.updates < 2:
            raise ValueError(
                "policy_loss.adapt_to is steered by KL(old || new), which is 0 at a step's first update: "
                "set batch.epochs or batch.minibatches to 2 or more"
            )

    def per_token(self, tokens: Tokens) -> Surrogate:
        """Compute PPO's clipped surrogate loss (Schulman et al. 2017, eq. 7; DAPO for low != high).

            -min(ratio * A, clip(ratio, 1 - low, 1 + high) * A)

        With `dual_clip` c > 1 and A < 0 the objective is max(min(...), c * A) (Ye et al. 2020, eq. 5), so that a token
        that became much more likely cannot dominate. The gradient stops in exactly these cases:
        A > 0 and ratio > 1 + high; A < 0 and ratio < 1 - low; and, with dual clip, A < 0 and ratio > c. With `adapt_to`
        low and high are multiplied by the scale of the step.
        """
        import torch

        ratio, advantages = tokens.ratio, tokens.advantages
        scale = 1.0 if self.adapt_to is None else tokens.coefs.penalty
        low, high = 1.0 - min(1.0, scale * self.clip_eps_low), 1.0 + scale * self.clip_eps_high
        clipped_ratio = ratio.clamp(low, high)
        objective = torch.minimum(ratio * advantages, clipped_ratio * advantages)
        clipped = ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))
        if self.dual_clip is not None:
            floor = self.dual_clip * advantages
            objective = torch.where(advantages < 0, torch.maximum(objective, floor), objective)
            clipped = clipped | ((advantages < 0) & (ratio > self.dual_clip))
        return Surrogate(per_token=-objective, clipped=clipped, outside=clipped_ratio != ratio)
