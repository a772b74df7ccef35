"""The rules of the KL penalty, and of what else keeps a policy near its reference."""

from __future__ import annotations

from rlhf.config.algorithm import AdaptiveKl, Best
from rlhf.config.sections import OnlineConfig
from rlhf.guard.rule import ONLINE, Facts, Rule, Value, is_learned, outside

LARGEST_ERROR = 0.2  # the error of the adaptive controller is clipped to this
ENOUGH_STEPS = 20  # fewer are a trial, in which no controller gets anywhere


def no_brake(config: OnlineConfig, facts: Facts) -> Value | None:
    """Return `none` where nothing keeps the policy where a learned reward is right."""
    brakes = (
        config.algorithm.trains_against_reference,
        config.algorithm.target_kl is not None,
        config.checkpoint.best is not None,
        config.guard.on_alarm not in ("ignore", "warn"),
        isinstance(config.algorithm.advantage, Best),  # imitates what the start model writes itself
    )
    return "none, or 0" if is_learned(config.reward.source) and not any(brakes) else None


def kl_coefficient(config: OnlineConfig, facts: Facts) -> Value | None:
    """Return a coefficient of the KL penalty that is out of range; 0 is another rule's business."""
    kl = config.algorithm.kl
    return outside(kl.coef, 1e-4, 0.5) if kl.placement != "none" and kl.coef > 0 else None


def estimator_in_reward(config: OnlineConfig, facts: Facts) -> Value | None:
    """Return an estimator that as a reward has another expected gradient than the KL."""
    kl = config.algorithm.kl
    return kl.estimator if kl.placement == "reward" and kl.coef > 0 and kl.estimator != "k1" else None


def _adaptive(config: OnlineConfig) -> AdaptiveKl | None:
    controller = config.algorithm.kl.controller
    return controller if isinstance(controller, AdaptiveKl) else None


def adaptive_from_zero(config: OnlineConfig, facts: Facts) -> Value | None:
    """Return 0 where a controller multiplies a coefficient of 0."""
    return 0.0 if _adaptive(config) is not None and config.algorithm.kl.coef == 0 else None


def adaptive_target(config: OnlineConfig, facts: Facts) -> Value | None:
    """Return a target that was probably meant per token, or is none."""
    adaptive = _adaptive(config)
    return None if adaptive is None else outside(adaptive.target, 0.5, 50.0)


def adaptive_horizon(config: OnlineConfig, facts: Facts) -> Value | None:
    """Return a horizon so short that one step can set the coefficient to 0, where it stays."""
    adaptive = _adaptive(config)
    if adaptive is None or LARGEST_ERROR * config.completions_per_step < adaptive.horizon:
        return None
    return adaptive.horizon


def adaptive_too_slow(config: OnlineConfig, facts: Facts) -> Value | None:
    """Return a horizon so long that the coefficient cannot change by a tenth before the run ends."""
    adaptive, steps = _adaptive(config), config.schedule.steps
    if adaptive is None or steps is None or steps < ENOUGH_STEPS:
        return None
    largest_change = LARGEST_ERROR * steps * config.completions_per_step / adaptive.horizon
    return adaptive.horizon if largest_change < 0.1 else None


def unmeasured_kl(config: OnlineConfig, facts: Facts) -> Value | None:
    """Return false where nobody can see how far a learned reward has led the policy."""
    return "false" if not config.reference.measure and is_learned(config.reward.source) else None


def nothing_to_raise(config: OnlineConfig, facts: Facts) -> Value | None:
    """Return raise_kl where there is no penalty to raise."""
    kl = config.algorithm.kl
    is_asked = "raise_kl" in (config.guard.on_alarm, *config.guard.alarms.values())
    return "raise_kl" if is_asked and (kl.placement == "none" or kl.coef == 0) else None


KL_RULES = (
    Rule(
        name="no-brake-on-learned-reward",
        level="warning",
        runs=ONLINE,
        key="algorithm.kl.placement, algorithm.kl.coef",
        violation=no_brake,
        reason="Without a penalty, target_kl or early stopping the policy leaves what the reward was "
        "trained on, and the "
        "true score falls while the learned one rises.",
        source="Gao et al. 2023, sec. 3; Coste et al. 2024",
        fix="algorithm.kl.placement=reward algorithm.kl.coef=0.05, or checkpoint.best.patience=3 with a judge",
    ),
    Rule(
        name="kl-coefficient",
        level="warning",
        runs=ONLINE,
        key="algorithm.kl.coef",
        violation=kl_coefficient,
        reason="Above 0.5 a nat costs half a standard deviation of a calibrated score; below 1e-4 nothing holds.",
        source="Huang et al. 2024 (N+): 0.05; Ziegler et al. 2019: 0.15; Shao et al. 2024 (GRPO): 0.04; verl: 0.001",
        fix="algorithm.kl.coef=0.05",
    ),
    Rule(
        name="kl-estimator-in-reward",
        level="warning",
        runs=ONLINE,
        key="algorithm.kl.estimator",
        violation=estimator_in_reward,
        reason="As a reward only k1 has the expected gradient of the KL: the gradient through k2 or k3 itself is lost.",
        source="Tang and Munos 2025; Shah et al. 2025 (A Comedy of Estimators)",
        fix="algorithm.kl.estimator=k1, or algorithm.kl.placement=loss with k2 or k3",
    ),
    Rule(
        name="adaptive-kl-from-zero",
        level="error",
        runs=ONLINE,
        key="algorithm.kl.coef",
        violation=adaptive_from_zero,
        reason="The controller multiplies the coefficient, so from 0 it never becomes anything else.",
        source="Ziegler et al. 2019, sec. 2.2",
        fix="algorithm.kl.coef=0.05",
    ),
    Rule(
        name="adaptive-kl-target",
        level="warning",
        runs=ONLINE,
        key="algorithm.kl.controller.target",
        violation=adaptive_target,
        reason="The target is in nats per sequence; 0.1 is what a program that averages over tokens would say.",
        source="Ziegler et al. 2019, sec. 2.2: 6; Rafailov et al. 2023, sec. 6.1: 3 to 12; verl: 0.1 per token",
        fix="algorithm.kl.controller.target=6",
    ),
    Rule(
        name="adaptive-kl-horizon",
        level="error",
        runs=ONLINE,
        key="algorithm.kl.controller.horizon",
        violation=adaptive_horizon,
        reason="A fifth of a step's completions is more than the horizon: one step below the target "
        "sets the coefficient "
        "to 0 for good.",
        source="Ziegler et al. 2019, sec. 2.2: 10,000 at 512 completions a step",
        fix="algorithm.kl.controller.horizon of 5 to 20 times the completions of a step",
    ),
    Rule(
        name="adaptive-kl-too-slow",
        level="warning",
        runs=ONLINE,
        key="algorithm.kl.controller.horizon",
        violation=adaptive_too_slow,
        reason="Over the whole run the coefficient can change by less than a tenth: it is fixed in all but name.",
        source="Ziegler et al. 2019, sec. 2.2: 10,000 of 2 million completions",
        fix="algorithm.kl.controller.horizon of 5 to 20 times the completions of a step",
    ),
    Rule(
        name="kl-not-measured",
        level="warning",
        runs=ONLINE,
        key="reference.measure",
        violation=unmeasured_kl,
        reason="Nothing then shows how far a learned reward has led the policy, and the alarms on the KL are blind.",
        source="Gao et al. 2023, sec. 3: the gold score is a function of the KL",
        fix="reference.measure=true",
    ),
    Rule(
        name="raise-kl-without-a-penalty",
        level="error",
        runs=ONLINE,
        key="guard.on_alarm, guard.alarms",
        violation=nothing_to_raise,
        reason="There is no coefficient to raise, so an alarm would do nothing.",
        source="implementation detail: raise_kl multiplies algorithm.kl.coef",
        fix="guard.on_alarm=lower_lr, or algorithm.kl.placement=reward algorithm.kl.coef=0.05",
    ),
)
