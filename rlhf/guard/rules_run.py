"""The rules of every run (learning rates, optimizer, schedule, checkpoints), of data, and of held-out rows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from rlhf.config.data import DatasetConfig, TrainableDataConfig
from rlhf.config.run import UNKNOWN_LENGTH
from rlhf.config.sections import SMALL_MODELS, OfflineConfig, OnlineConfig, RewardModelConfig, RunConfiguration
from rlhf.guard.rule import EVERY, OFFLINE, ON_DATA, POLICY, outside
from rlhf.planning.layout import trained_section
from rlhf.planning.plan import RULE as DOES_NOT_FIT
from rlhf.planning.plan import Machine, gigabytes, least_of
from rlhf.section import Facts, Rule, Value

LONG_RUN = 2000  # steps; a lost machine then costs hours
SMALL_MODEL, LARGE_MODEL = SMALL_MODELS[0], 1e9  # parameters
LORA_FACTOR = 10.0
LOWEST_FOR_TINY = 1e-5
LOWEST_ONLINE, SMALL_ONLINE = 3e-6, SMALL_MODELS[1]  # the lowest rate, up to so many parameters
WARMUP_OF_A_TRIAL = 10  # steps; a few steps of any run are a trial, whose warm-up does not matter


class RateRange(NamedTuple):
    """Learning rates reported for full fine-tuning from 5e7 parameters, and the highest from 1e9."""

    low: float
    high: float
    high_large: float


RATES = {
    "online": RateRange(1e-7, 1e-4, 1.5e-5),
    "preference": RateRange(5e-8, 1e-4, 1e-5),
    "sft": RateRange(2e-6, 2e-3, 5e-4),
    "reward model": RateRange(2e-6, 2e-4, 5e-5),
}


def method(config: RunConfiguration) -> str:
    """Return the row of RATES that the run belongs to."""
    if isinstance(config, RewardModelConfig):
        return "reward model"
    if isinstance(config, OnlineConfig):
        return "online"
    return "sft" if config.algorithm.loss.data == "demonstrations" else "preference"


def rate(config: RunConfiguration) -> float | None:
    """Return the learning rate; None if the policy loss sets the length of the step."""
    has_none = isinstance(config, OnlineConfig) and config.algorithm.policy_loss.searches
    return None if has_none else trained_section(config).lr


def rate_is_zero(config: RunConfiguration, facts: Facts) -> Value | None:
    """Return a learning rate of 0."""
    return 0.0 if rate(config) == 0 else None


def rate_is_high(config: RunConfiguration, facts: Facts) -> Value | None:
    """Return a rate above the rates reported for the method and the size; none is reported for tiny models."""
    lr = rate(config)
    if lr is None or facts.parameters is None or facts.parameters < SMALL_MODEL:
        return None
    rates = RATES[method(config)]
    highest = rates.high if facts.parameters < LARGE_MODEL else rates.high_large
    return outside(lr, 0.0, highest * (LORA_FACTOR if trained_section(config).lora is not None else 1.0))


def rate_is_low(config: RunConfiguration, facts: Facts) -> Value | None:
    """Return a rate below the reported ones, or one for billions of parameters in a smaller model."""
    lr = rate(config)
    if facts.parameters is None or not lr:
        return None
    lowest = RATES[method(config)].low
    if method(config) == "online" and facts.parameters < SMALL_ONLINE:
        lowest = LOWEST_ONLINE
    if facts.parameters < SMALL_MODEL:
        lowest = LOWEST_FOR_TINY
    return lr if lr < lowest else None


def lora_scale(config: RunConfiguration, facts: Facts) -> Value | None:
    """Return the scale alpha / r of adapters that is out of range."""
    lora = trained_section(config).lora
    return None if lora is None or lora.rslora else outside(lora.alpha / lora.r, 0.25, 4.0)


def adam_epsilon(config: RunConfiguration, facts: Facts) -> Value | None:
    """Return an Adam epsilon as large as the gradients."""
    return outside(trained_section(config).adam_eps, 0.0, 1e-4) if trained_section(config).optimizer != "sgd" else None


def gradient_clip(config: RunConfiguration, facts: Facts) -> Value | None:
    """Return a gradient norm that is never reached, so that nothing is clipped."""
    section = trained_section(config)
    return outside(section.max_grad_norm, 0.0, 100.0) if section.optimizer != "sgd" else None


def weight_decay(config: RunConfiguration, facts: Facts) -> Value | None:
    """Return a weight decay above the usual ones for fine-tuning."""
    return outside(trained_section(config).weight_decay, 0.0, 0.1)


def average_is_start(config: OnlineConfig | OfflineConfig, facts: Facts) -> Value | None:
    """Return a decay at which the exported average of the weights is still mostly the start model."""
    decay, steps = config.policy.ema_decay, config.schedule.steps
    return decay if decay is not None and steps is not None and decay**steps > 0.5 else None


def warmup_covers_run(config: RunConfiguration, facts: Facts) -> Value | None:
    """Return a warm-up that does not end before the run."""
    steps, warmup = config.schedule.steps, config.schedule.warmup_steps
    return float(warmup) if steps is not None and warmup > WARMUP_OF_A_TRIAL and warmup >= steps else None


def never_saved(config: RunConfiguration, facts: Facts) -> Value | None:
    """Return the interval of checkpoints if a long run has none before its end."""
    steps, every = config.schedule.steps, config.checkpoint.every
    if steps is None or not LONG_RUN <= steps < UNKNOWN_LENGTH:
        return None
    return float(every) if every == 0 or every >= steps else None


def cannot_fit(config: RunConfiguration, facts: Facts) -> Value | None:
    """Return the memory that a run needs in any case, if the device has less."""
    if facts.memory is None:
        return None
    machine = Machine(device=facts.device, memory=facts.memory, processes=facts.processes)
    least = least_of(config, machine)
    if least is None or least <= facts.memory:
        return None
    return f"{gigabytes(least)} GB on a device with {gigabytes(facts.memory)} GB"


RUN_RULES = (
    Rule(
        name=DOES_NOT_FIT,
        level="error",
        runs=EVERY,
        key="memory",
        violation=cannot_fit,
        reason="Weights, gradients and the optimizer's moments alone take more than the memory of the device.",
        source="implementation detail: they are there at once in every optimizer step",
        fix="the changes that `rlhf plan` lists, for example policy.optimizer=adamw_8bit or policy.lora.r=16",
    ),
    Rule(
        name="learning-rate-zero",
        level="warning",
        runs=EVERY,
        key="policy.lr (model.lr)",
        violation=rate_is_zero,
        reason="With a learning rate of 0 nothing is trained; use it for trial runs only.",
        source="implementation detail: the optimizer steps with a rate of 0",
        fix="set a learning rate (starting values: docs/hyperparameters.md)",
    ),
    Rule(
        name="learning-rate-high",
        level="warning",
        runs=EVERY,
        key="policy.lr (model.lr)",
        violation=rate_is_high,
        reason="The highest rates reported from 1e9 parameters on are 1.5e-5 online, 1e-5 for preference "
        "losses, 5e-4 for SFT and 5e-5 for reward models; four to ten times that below 1e9 "
        "parameters, ten times that with adapters.",
        source="Huang et al. 2024 (N+): 3e-6; alignment-handbook: DPO 5e-7, SFT 2e-5, at 135M 1e-6 "
        "and 1e-3; Hong et al. 2024: 8e-6; Schulman et al. 2025 (LoRA without regret)",
        fix="policy.lr=1e-6 online, 5e-7 for DPO, 2e-5 for SFT, model.lr=1e-5 for reward models; ten times "
        "that with adapters",
    ),
    Rule(
        name="learning-rate-low",
        level="warning",
        runs=EVERY,
        key="policy.lr (model.lr)",
        violation=rate_is_low,
        reason="The model will hardly change: a tiny model needs a hundred times the learning rate of a "
        "model with billions of parameters, and one of 135 million twenty times, if it learns from its own samples. "
        "SFT and reward models take more than the default of 1e-6 at every size.",
        source="docs/hyperparameters.md; Meng et al. 2024 (SimPO): 3e-7 is the lowest reported of preference losses; "
        "Huang et al. 2024 (N+): 3e-6 for SFT and reward models",
        fix="policy.lr=2e-5 for SFT, and online from 5e7 to 3e8 parameters; model.lr=1e-5 for reward models; otherwise "
        "multiply the rate by 10 until kl/reference (or the margin) changes",
    ),
    Rule(
        name="lora-scale",
        level="warning",
        runs=EVERY,
        key="policy.lora.alpha / policy.lora.r (model.lora.alpha / model.lora.r)",
        violation=lora_scale,
        reason="alpha / r scales the adapter's output, so it acts as a second learning rate.",
        source="Hu et al. 2021, sec. 4.1; alignment-handbook: 1; Schulman et al. 2025 (LoRA without regret): alpha 32",
        fix="lora.alpha equal to lora.r or twice that",
    ),
    Rule(
        name="adam-epsilon",
        level="warning",
        runs=EVERY,
        key="policy.adam_eps (model.adam_eps)",
        violation=adam_epsilon,
        reason="If epsilon is as large as the root of the second moment, Adam becomes SGD with a tiny rate.",
        source="Huang et al. 2022 (37 details), detail 3: 1e-5; Huang et al. 2024 (N+): 1e-5",
        fix="adam_eps=1e-5",
    ),
    Rule(
        name="gradient-clip",
        level="warning",
        runs=EVERY,
        key="policy.max_grad_norm (model.max_grad_norm)",
        violation=gradient_clip,
        reason="Gradient norms rarely exceed 100 before training diverges, so nothing is clipped.",
        source="Huang et al. 2022 (37 details), detail 11: 0.5; Huang et al. 2024 (N+): 1",
        fix="max_grad_norm=1",
    ),
    Rule(
        name="weight-decay",
        level="warning",
        runs=EVERY,
        key="policy.weight_decay (model.weight_decay)",
        violation=weight_decay,
        reason="Weight decay pulls the weights to zero, not to the start model.",
        source="alignment-handbook, Huang et al. 2024 (N+): 0",
        fix="weight_decay=0",
    ),
    Rule(
        name="average-is-the-start",
        level="error",
        runs=POLICY,
        key="policy.ema_decay",
        violation=average_is_start,
        reason="At the end of the run more than half of the exported average is still the start model.",
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
        reason="A run of 2,000 steps or more loses all progress if it is killed before its end.",
        source="implementation detail: with 0 a run is saved at its end and on interruption",
        fix="checkpoint.every=100",
    ),
)


FEWEST_HELD_OUT = 32
MANY_PASSES, MOST_PASSES, MOST_SFT_PASSES = 3.0, 3.0, 16.0


def batch_of_one(config: OfflineConfig | RewardModelConfig, facts: Facts) -> Value | None:
    """Return a batch of a single row."""
    return 1.0 if config.batch.prompts_per_step == 1 else None


def no_end_learned(config: OfflineConfig, facts: Facts) -> Value | None:
    """Return truncate if rows lose the EOS that the model should learn to end with."""
    sft = config.data.sft
    is_cut = method(config) == "sft" and sft is not None and sft.too_long == "truncate"
    return "truncate" if is_cut else None


def many_epochs(config: OfflineConfig | RewardModelConfig, facts: Facts) -> Value | None:
    """Return more passes over the pairs than are reported."""
    epochs = config.schedule.epochs
    return outside(epochs, 0.0, MOST_PASSES) if epochs is not None and method(config) != "sft" else None


def many_sft_epochs(config: OfflineConfig, facts: Facts) -> Value | None:
    """Return more passes over demonstrations than are reported."""
    epochs = config.schedule.epochs
    return outside(epochs, 0.0, MOST_SFT_PASSES) if epochs is not None and method(config) == "sft" else None


def teacher_template(config: OnlineConfig | OfflineConfig, facts: Facts) -> Value | None:
    """Return a template that is not the tokenizer's own, if a teacher reads its output."""
    is_other = config.teacher is not None and config.data.chat_template != "auto"
    return config.data.chat_template if is_other else None


def constant_rate(config: OfflineConfig | RewardModelConfig, facts: Facts) -> Value | None:
    """Return constant if the same rows are read many times at the full rate."""
    epochs, decay = config.schedule.epochs, config.schedule.decay
    return decay if epochs is not None and epochs >= MANY_PASSES and decay == "constant" else None


def best_without_evaluation(config: RunConfiguration, facts: Facts) -> Value | None:
    """Return 0 if the best checkpoint is asked for and nothing is evaluated on the way."""
    return 0.0 if config.checkpoint.best is not None and config.eval.every == 0 else None


def _held_out(config: RunConfiguration) -> list[tuple[DatasetConfig, DatasetConfig | None]]:
    """Return the held-out data sets that the run reads, each with the one that is trained on, if of the same kind."""
    data, prompts = config.data, config.data.eval_prompts
    pairs: list[tuple[DatasetConfig | None, DatasetConfig | None]]
    if isinstance(config, OnlineConfig):
        pairs = [(prompts, data.prompts)]
    elif method(config) == "sft":
        pairs = [(data.eval_sft, data.sft)]
    else:
        pairs = [(data.eval_preferences, data.preferences)]
    if isinstance(config, OfflineConfig) and config.held_out_source is not None:
        pairs.append((prompts, None))
    return [(held_out, training) for held_out, training in pairs if held_out is not None]


def best_without_data(config: RunConfiguration, facts: Facts) -> Value | None:
    """Return null if the best checkpoint is asked for and nothing is held out to tell it by."""
    return "null" if config.checkpoint.best is not None and not _held_out(config) else None


def held_out_is_training(config: RunConfiguration, facts: Facts) -> Value | None:
    """Return the path of held-out rows that are the ones trained on."""
    same = [
        held_out.path
        for held_out, training in _held_out(config)
        if isinstance(training, TrainableDataConfig)
        and any(_place(held_out) == _place(source) for source in training.by_source("rows").values())
        and not _are_apart(held_out, training)
    ]
    return same[0] if same else None


def _place(rows: DatasetConfig) -> tuple[str, str]:
    """Return where rows are, alike however the path is written; a single file has no splits."""
    path = Path(rows.path)
    return (str(path.resolve()), "") if path.is_file() else (os.path.normpath(rows.path), rows.split)


def _are_apart(held_out: DatasetConfig, training: DatasetConfig) -> bool:
    """Return whether two data sets of one file are parts that share no prompt."""
    first, second = (getattr(rows, "part", None) for rows in (held_out, training))
    return first is not None and second is not None and (first[1] <= second[0] or second[1] <= first[0])


def few_held_out(config: RunConfiguration, facts: Facts) -> Value | None:
    """Return a limit on held-out rows that leaves too few to tell a better checkpoint from luck."""
    limits = [rows.limit for rows, _ in _held_out(config) if rows.limit is not None and rows.limit < FEWEST_HELD_OUT]
    return float(limits[0]) if limits and config.checkpoint.best is not None else None


DATA_RULES = (
    Rule(
        name="batch-of-one",
        level="warning",
        runs=ON_DATA,
        key="batch.prompts_per_step",
        violation=batch_of_one,
        reason="Each optimizer step sees one row; to save memory, lower batch.micro_batch_size instead.",
        source="alignment-handbook: 64 and more; Meng et al. 2024 (SimPO): 128",
        fix="batch.prompts_per_step=64 batch.micro_batch_size=1",
    ),
    Rule(
        name="no-end-to-learn",
        level="warning",
        runs=OFFLINE,
        key="data.sft.too_long",
        violation=no_end_learned,
        reason="A truncated row has no EOS, so the model learns to continue instead of ending.",
        source="implementation detail of too_long: truncate; Huang et al. 2024 (N+), on EOS",
        fix="data.sft.too_long=skip, and a data.sft.max_tokens that fits most rows",
    ),
    Rule(
        name="pairs-many-epochs",
        level="warning",
        runs=ON_DATA,
        key="schedule.epochs",
        violation=many_epochs,
        reason="Reward models and preference losses overfit from the second pass on; at most 3 passes are reported.",
        source="Ouyang et al. 2022, app. C: 1 for reward models; alignment-handbook: 1 to 3 for DPO",
        fix="schedule.epochs=1",
    ),
    Rule(
        name="sft-many-epochs",
        level="warning",
        runs=OFFLINE,
        key="schedule.epochs",
        violation=many_sft_epochs,
        reason="The longest reported SFT run takes 16 passes, and its held-out loss rises after the first.",
        source="Ouyang et al. 2022, sec. 3.5",
        fix="schedule.epochs=3, and data.eval_sft to see when the held-out loss rises",
    ),
    Rule(
        name="teacher-template",
        level="warning",
        runs=(OnlineConfig, OfflineConfig),
        key="data.chat_template",
        violation=teacher_template,
        reason="The teacher reads conversations in another form than its own template, in which it answers worse.",
        source="implementation detail: policy and teacher read the same token ids",
        fix="data.chat_template=auto, with the template of the teacher",
    ),
    Rule(
        name="constant-rate-many-epochs",
        level="warning",
        runs=ON_DATA,
        key="schedule.decay",
        violation=constant_rate,
        reason="With a constant rate the last rows have the most weight, and later passes overfit.",
        source="alignment-handbook: cosine; Huang et al. 2022 (37 details), detail 4: linear",
        fix="schedule.decay=cosine",
    ),
    Rule(
        name="best-without-evaluation",
        level="error",
        runs=EVERY,
        key="eval.every",
        violation=best_without_evaluation,
        reason="The best checkpoint is chosen at evaluations, and this run has none before its end.",
        source="implementation detail of checkpoint.best",
        fix="eval.every=20, or checkpoint.best=null",
    ),
    Rule(
        name="best-without-held-out-rows",
        level="error",
        runs=EVERY,
        key="data.eval_prompts, data.eval_preferences, data.eval_sft",
        violation=best_without_data,
        reason="The run has no held-out rows to compare checkpoints on.",
        source="implementation detail of checkpoint.best",
        fix="data.eval_prompts.path (online), data.eval_preferences.path, data.eval_sft.path",
    ),
    Rule(
        name="held-out-is-training",
        level="warning",
        runs=EVERY,
        key="data.eval_prompts, data.eval_preferences, data.eval_sft",
        violation=held_out_is_training,
        reason="The held-out rows are the training rows, so they cannot show memorization.",
        source="Hastie, Tibshirani and Friedman 2009, sec. 7.2",
        fix="other rows: another file or split",
    ),
    Rule(
        name="few-held-out-rows",
        level="warning",
        runs=EVERY,
        key="data.eval_prompts.limit, data.eval_preferences.limit, data.eval_sft.limit",
        violation=few_held_out,
        reason="With fewer than 32 paired scores almost no difference is significant, so the first checkpoint is kept.",
        source="arithmetic: a difference below a third of its standard deviation is within the interval",
        fix="256 held-out rows",
    ),
)
