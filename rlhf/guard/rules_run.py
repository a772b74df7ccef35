"""The rules of every run: learning rates, optimizer, schedule, checkpoints."""

from __future__ import annotations

from typing import NamedTuple

from rlhf.config.algorithm import SftLoss, TrustRegionLoss
from rlhf.config.run import UNKNOWN_LENGTH
from rlhf.config.sections import OfflineConfig, OnlineConfig, PolicyConfig, RewardModelConfig
from rlhf.guard.rule import EVERY, POLICY, Facts, Rule, RunConfiguration, Value, outside

LONG_RUN = 2000  # steps; what is lost with the machine is then hours
SMALL_MODEL, LARGE_MODEL = 5e7, 1e9  # parameters
LORA_FACTOR = 10.0
LOWEST_FOR_TINY = 1e-5
WARMUP_OF_A_TRIAL = 10  # steps; a few steps of any run are a trial, whose warm-up does not matter


class RateRange(NamedTuple):
    """Learning rates reported for full fine-tuning from 5e7 parameters, and the highest from 1e9."""

    low: float
    high: float
    high_large: float


RATES = {
    "online": RateRange(1e-7, 1e-4, 1.5e-5),
    "preference": RateRange(5e-8, 1e-4, 1e-5),
    "sft": RateRange(1e-6, 2e-3, 5e-4),
    "reward model": RateRange(5e-7, 2e-4, 5e-5),
}


def trained(config: RunConfiguration) -> PolicyConfig:
    """Return the section of the model that the run trains."""
    return config.model if isinstance(config, RewardModelConfig) else config.policy


def method(config: RunConfiguration) -> str:
    """Return the row of RATES that the run belongs to."""
    if isinstance(config, RewardModelConfig):
        return "reward model"
    if isinstance(config, OnlineConfig):
        return "online"
    return "sft" if isinstance(config.algorithm.loss, SftLoss) else "preference"


def rate(config: RunConfiguration) -> float | None:
    """Return the learning rate; None where a trust region sets the length of the step."""
    has_none = isinstance(config, OnlineConfig) and isinstance(config.algorithm.policy_loss, TrustRegionLoss)
    return None if has_none else trained(config).lr


def rate_is_zero(config: RunConfiguration, facts: Facts) -> Value | None:
    """Return a learning rate of 0."""
    return 0.0 if rate(config) == 0 else None


def rate_is_high(config: RunConfiguration, facts: Facts) -> Value | None:
    """Return a rate above what is reported for the method and the size; for tiny models nothing is."""
    lr = rate(config)
    if lr is None or facts.parameters is None or facts.parameters < SMALL_MODEL:
        return None
    rates = RATES[method(config)]
    highest = rates.high if facts.parameters < LARGE_MODEL else rates.high_large
    return outside(lr, 0.0, highest * (LORA_FACTOR if trained(config).lora is not None else 1.0))


def rate_is_low(config: RunConfiguration, facts: Facts) -> Value | None:
    """Return a rate below what is reported, or one for billions of parameters in a tiny model."""
    lr = rate(config)
    if facts.parameters is None or not lr:
        return None
    lowest = RATES[method(config)].low if facts.parameters >= SMALL_MODEL else LOWEST_FOR_TINY
    return lr if lr < lowest else None


def lora_scale(config: RunConfiguration, facts: Facts) -> Value | None:
    """Return the scale alpha / r of adapters that is out of range."""
    lora = trained(config).lora
    return None if lora is None else outside(lora.alpha / lora.r, 0.25, 4.0)


def adam_epsilon(config: RunConfiguration, facts: Facts) -> Value | None:
    """Return an Adam epsilon as large as the gradients."""
    return outside(trained(config).adam_eps, 0.0, 1e-4) if trained(config).optimizer != "sgd" else None


def gradient_clip(config: RunConfiguration, facts: Facts) -> Value | None:
    """Return a gradient norm that is never reached, so that nothing is clipped."""
    return outside(trained(config).max_grad_norm, 0.0, 100.0) if trained(config).optimizer != "sgd" else None


def weight_decay(config: RunConfiguration, facts: Facts) -> Value | None:
    """Return a weight decay above what is usual for fine-tuning."""
    return outside(trained(config).weight_decay, 0.0, 0.1)


def average_is_start(config: OnlineConfig | OfflineConfig, facts: Facts) -> Value | None:
    """Return a decay at which the exported average of the weights is still mostly the start model."""
    decay, steps = config.policy.ema_decay, config.schedule.steps
    return decay if decay is not None and steps is not None and decay**steps > 0.5 else None


def warmup_covers_run(config: RunConfiguration, facts: Facts) -> Value | None:
    """Return a warm-up that does not end before the run does."""
    steps, warmup = config.schedule.steps, config.schedule.warmup_steps
    return float(warmup) if steps is not None and warmup > WARMUP_OF_A_TRIAL and warmup >= steps else None


def never_saved(config: RunConfiguration, facts: Facts) -> Value | None:
    """Return the interval of checkpoints where a long run has none before its end."""
    steps, every = config.schedule.steps, config.checkpoint.every
    if steps is None or not LONG_RUN <= steps < UNKNOWN_LENGTH:
        return None
    return float(every) if every == 0 or every >= steps else None


RUN_RULES = (
    Rule(
        name="learning-rate-zero",
        level="warning",
        runs=EVERY,
        key="policy.lr (model.lr)",
        violation=rate_is_zero,
        reason="Nothing is trained: this is for a trial run only.",
        source="implementation detail: the optimizer takes its steps with a rate of 0",
        fix="a learning rate: docs/hyperparameters.md",
    ),
    Rule(
        name="learning-rate-high",
        level="warning",
        runs=EVERY,
        key="policy.lr (model.lr)",
        violation=rate_is_high,
        reason="No run reported for this method on a model of this size has a higher rate than 1.5e-5 online, 1e-5 on "
        "preferences, 5e-4 in SFT and 5e-5 for reward models; below 1e9 parameters it is four to ten "
        "times as much, with "
        "adapters ten times.",
        source="Huang et al. 2024 (N+): 3e-6; alignment-handbook: DPO 5e-7, SFT 2e-5, at 135M 1e-6 "
        "and 1e-3; Hong et al. "
        "2024: 8e-6; Schulman et al. 2025 (LoRA without regret)",
        fix="policy.lr=1e-6 online, 5e-7 for DPO, 2e-5 for SFT; ten times that with policy.lora",
    ),
    Rule(
        name="learning-rate-low",
        level="warning",
        runs=EVERY,
        key="policy.lr (model.lr)",
        violation=rate_is_low,
        reason="The model will hardly move: a tiny model needs a hundred times the rate of one with "
        "billions of parameters.",
        source="docs/hyperparameters.md; Meng et al. 2024 (SimPO): 3e-7 is the lowest reported",
        fix="ten times the rate, until kl/reference (or the margin) moves",
    ),
    Rule(
        name="lora-scale",
        level="warning",
        runs=POLICY,
        key="policy.lora.alpha / policy.lora.r",
        violation=lora_scale,
        reason="The adapter's output is multiplied by this, so it is a second learning rate.",
        source="Hu et al. 2021, sec. 4.1; alignment-handbook: 1; Schulman et al. 2025 (LoRA without regret): alpha 32",
        fix="policy.lora.alpha of once or twice policy.lora.r",
    ),
    Rule(
        name="adam-epsilon",
        level="warning",
        runs=EVERY,
        key="policy.adam_eps (model.adam_eps)",
        violation=adam_epsilon,
        reason="Where it is as large as the root of the second moment, Adam is SGD with a tiny rate.",
        source="Huang et al. 2022 (37 details), detail 3: 1e-5; Huang et al. 2024 (N+): 1e-5",
        fix="adam_eps=1e-5",
    ),
    Rule(
        name="gradient-clip",
        level="warning",
        runs=EVERY,
        key="policy.max_grad_norm (model.max_grad_norm)",
        violation=gradient_clip,
        reason="A norm above 100 is not reached until it is too late, so nothing is clipped.",
        source="Huang et al. 2022 (37 details), detail 11: 0.5; Huang et al. 2024 (N+): 1",
        fix="max_grad_norm=1",
    ),
    Rule(
        name="weight-decay",
        level="warning",
        runs=EVERY,
        key="policy.weight_decay (model.weight_decay)",
        violation=weight_decay,
        reason="It pulls the weights to zero, not to the model that the run started from.",
        source="alignment-handbook, Huang et al. 2024 (N+): 0",
        fix="weight_decay=0",
    ),
    Rule(
        name="average-is-the-start",
        level="error",
        runs=POLICY,
        key="policy.ema_decay",
        violation=average_is_start,
        reason="After all steps more than half of the exported average is still the start model.",
        source="arithmetic: ema_decay to the power of schedule.steps",
        fix="policy.ema_decay=0.9 for tens of steps, 0.99 for hundreds",
    ),
    Rule(
        name="warmup-covers-the-run",
        level="warning",
        runs=EVERY,
        key="schedule.warmup_steps",
        violation=warmup_covers_run,
        reason="The run ends before the learning rate has reached its peak.",
        source="arithmetic; alignment-handbook and Meng et al. 2024 (SimPO): a tenth of the steps",
        fix="schedule.warmup_steps of a tenth of schedule.steps",
    ),
    Rule(
        name="never-saved",
        level="error",
        runs=EVERY,
        key="checkpoint.every",
        violation=never_saved,
        reason="A run of 2,000 steps or more that is killed before its end loses all of it.",
        source="implementation detail: with 0 a run is saved at its end, and when it is asked to stop",
        fix="checkpoint.every=100",
    ),
)
