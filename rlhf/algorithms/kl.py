"""The KL penalty against the reference, and the controllers that steer its coefficient."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

from pydantic import model_validator

from rlhf.section import Choice, Facts, NonNegative, OneOf, Positive, Rule, Section, Usual, Value

LARGEST_ERROR = 0.2  # the error of the adaptive controller is clipped to this
ENOUGH_STEPS = 20  # fewer are a trial, in which no controller gets anywhere


class KlController(Choice):
    """The change of the coefficient of the KL penalty from step to step."""

    adapts: ClassVar[bool] = False
    """Whether it moves the coefficient, by the KL that a step has measured."""

    @property
    def goal(self) -> float | None:
        """Return the KL that it steers to, in nats per sequence; None if it steers to none."""
        return None

    def next_coef(self, coef: float, *, kl: float, completions: int) -> float:
        """Return the coefficient for the next step.

        Args:
            coef: the coefficient of the step in which `kl` was measured.
            kl: mean KL to the reference over the step's completions, in nats per *sequence*.
            completions: how many the step sampled, over all ranks.
        """
        return coef


class FixedKl(KlController):
    """A constant coefficient."""

    type: Literal["fixed"] = "fixed"


def horizon_is_short(controller: AdaptiveKl, facts: Facts) -> Value | None:
    """Return a horizon so short that one step can set the coefficient to 0, where it stays."""
    is_short = LARGEST_ERROR * facts.run.completions_per_step >= controller.horizon
    return controller.horizon if is_short else None


def horizon_is_long(controller: AdaptiveKl, facts: Facts) -> Value | None:
    """Return a horizon so long that the coefficient cannot change by a tenth before the run ends."""
    steps = facts.run.schedule.steps
    if steps is None or steps < ENOUGH_STEPS:
        return None
    largest_change = LARGEST_ERROR * steps * facts.run.completions_per_step / controller.horizon
    return controller.horizon if largest_change < 0.1 else None


class AdaptiveKl(KlController):
    """The proportional controller of Ziegler et al. 2019, sec. 2.2."""

    adapts: ClassVar[bool] = True

    type: Literal["adaptive"] = "adaptive"
    target: Annotated[
        Positive,
        Usual(
            low=0.5,
            high=50.0,
            rule="adaptive-kl-target",
            reason="The target is in nats per sequence; values near 0.1 are per token, as in other programs.",
            source="Ziegler et al. 2019, sec. 2.2: 6; Rafailov et al. 2023, sec. 6.1: 3 to 12; verl: 0.1 per token",
            fix="algorithm.kl.controller.target=6",
        ),
    ] = 6.0
    """Target KL to the reference, in nats per sequence (summed over tokens, averaged over completions)."""
    horizon: Positive = 10000.0
    """In completions: the coefficient is multiplied by 1 + error * completions / horizon, error clipped to +-0.2."""

    lint_rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            name="adaptive-kl-horizon",
            level="error",
            key="horizon",
            violation=horizon_is_short,
            reason="The horizon is shorter than a fifth of a step's completions: one step below the target "
            "sets the coefficient to 0 permanently.",
            source="Ziegler et al. 2019, sec. 2.2: 10,000 at 512 completions per step",
            fix="algorithm.kl.controller.horizon of 5 to 20 times the completions of a step",
        ),
        Rule(
            name="adaptive-kl-too-slow",
            level="warning",
            key="horizon",
            violation=horizon_is_long,
            reason="Over the whole run the coefficient can change by less than 10 %, so it is practically fixed.",
            source="Ziegler et al. 2019, sec. 2.2: 10,000 of 2 million completions",
            fix="algorithm.kl.controller.horizon of 5 to 20 times the completions of a step",
        ),
    )

    @property
    def goal(self) -> float | None:
        """Return the target."""
        return self.target

    def next_coef(self, coef: float, *, kl: float, completions: int) -> float:
        """Return the coefficient for the next step, by a proportional controller (Ziegler et al. 2019, sec. 2.2).

            e = clip(KL / target - 1, -0.2, 0.2),   coef <- coef * (1 + e * completions / horizon)

        A KL of NaN carries no information: the coefficient does not change.
        """
        if math.isnan(kl):
            return coef
        error = min(max(kl / self.target - 1.0, -LARGEST_ERROR), LARGEST_ERROR)
        return coef * max(1.0 + error * completions / self.horizon, 0.0)


def coefficient(kl: Kl, facts: Facts) -> Value | None:
    """Return a coefficient of the penalty that is out of range; another rule is for 0."""
    is_usual = kl.placement == "none" or kl.coef == 0 or 1e-4 <= kl.coef <= 0.5
    return None if is_usual or kl.to == "teacher" else kl.coef  # a teacher's weight is the objective's own


def estimator_in_reward(kl: Kl, facts: Facts) -> Value | None:
    """Return an estimator that as a reward has another expected gradient than the KL."""
    return kl.estimator if kl.placement == "reward" and kl.coef > 0 and kl.estimator != "k1" else None


def adaptive_from_zero(kl: Kl, facts: Facts) -> Value | None:
    """Return 0 if a controller multiplies a coefficient of 0."""
    return 0.0 if kl.controller.adapts and kl.coef == 0 else None


class Kl(Section):
    """The KL penalty that keeps the policy close to the reference."""

    placement: Literal["reward", "loss", "none"] = "reward"
    """reward: subtracted from the token rewards; loss: added to the loss; none: no penalty. A preset without a penalty
    has none until this is set; coef alone is an error there."""
    to: Literal["reference", "teacher"] = "reference"
    """teacher: the model of the section `teacher` takes the place of the reference, which is distillation by a penalty;
    coef is then the teacher's weight beside the reward."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """Schulman's estimators; in the loss only k2 and k3 (the expected gradient of k1 is zero)."""
    coef: NonNegative = 0.05
    """Weight of the penalty, in score units per nat."""
    importance_weighted: bool = False
    """In the loss: weight each token's penalty by pi / sampler, so that its expected gradient equals the KL's gradient
    on stale minibatches and stale samples too; false: unweighted, as in the GRPO papers."""
    controller: Annotated[KlController, OneOf("fixed")] = FixedKl()
    """fixed or adaptive."""

    lint_rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            name="kl-coefficient",
            level="warning",
            key="coef",
            violation=coefficient,
            reason="Above 0.5 a nat costs half a standard deviation of a calibrated score; below 1e-4 it has no "
            "effect.",
            source="Huang et al. 2024 (N+): 0.05; Ziegler et al. 2019: 0.15; Shao et al. 2024 (GRPO): 0.04; "
            "verl: 0.001",
            fix="algorithm.kl.coef=0.05",
        ),
        Rule(
            name="kl-estimator-in-reward",
            level="warning",
            key="estimator",
            violation=estimator_in_reward,
            reason="In the reward only k1 gives the gradient of the KL: no gradient flows through a reward of k2 or "
            "k3.",
            source="Tang and Munos 2025; Shah et al. 2025 (A Comedy of Estimators)",
            fix="algorithm.kl.estimator=k1, or algorithm.kl.placement=loss with k2 or k3",
        ),
        Rule(
            name="adaptive-kl-from-zero",
            level="error",
            key="coef",
            violation=adaptive_from_zero,
            reason="The controller multiplies the coefficient, so a coefficient of 0 stays 0.",
            source="Ziegler et al. 2019, sec. 2.2",
            fix="algorithm.kl.coef=0.05",
        ),
    )

    @property
    def weighs(self) -> bool:
        """Return whether the coefficient is above 0, or may become so."""
        return self.coef > 0 or self.controller.adapts

    @model_validator(mode="after")
    def _check_placement(self) -> Kl:
        if self.placement == "loss" and self.estimator == "k1":
            raise ValueError(
                "k1 in the loss has an expected gradient of zero, so it adds only noise. "
                "Use kl.placement=reward, or k2 (exact gradient) or k3 (GRPO's) in the loss"
            )
        if self.importance_weighted and self.placement != "loss":
            raise ValueError(
                f"kl.importance_weighted weighs the penalty in the loss, but kl.placement is {self.placement}: "
                "set kl.placement=loss with k2 or k3, or leave it false"
            )
        if self.placement == "none" and self.to == "teacher":
            raise ValueError("kl.to=teacher is a penalty: set kl.placement to reward or loss, or leave kl.to out")
        if self.placement == "none" and self.controller.adapts:
            raise ValueError("an adaptive controller needs kl.placement to be reward or loss")
        return self
