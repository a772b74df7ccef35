"""The rules of runs on data (SFT, preference losses, reward models), and of what is held out."""

from __future__ import annotations

from rlhf.config.algorithm import (
    DpoLoss,
    HingeLoss,
    IpoLoss,
    KtoLoss,
    OnlinePairLoss,
    OrpoLoss,
    RobustDpoLoss,
    SftLoss,
    SimpoLoss,
)
from rlhf.config.data import DatasetConfig
from rlhf.config.sections import OfflineConfig, OnlineConfig, RewardModelConfig
from rlhf.guard.rule import EVERY, OFFLINE, ON_DATA, POLICY, Facts, Rule, RunConfiguration, Value, outside
from rlhf.guard.rules_run import method

FEWEST_HELD_OUT = 32
MANY_PASSES, MOST_PASSES, MOST_SFT_PASSES = 3.0, 3.0, 16.0


def beta(config: OfflineConfig | OnlineConfig, facts: Facts) -> Value | None:
    """Return a β that is out of the range reported for its loss."""
    if isinstance(config, OfflineConfig):
        loss: object = config.algorithm.loss
    else:
        pair_loss = config.algorithm.policy_loss
        loss = pair_loss.loss if isinstance(pair_loss, OnlinePairLoss) else None
    match loss:
        case DpoLoss() | RobustDpoLoss() | HingeLoss():
            return outside(loss.beta, 0.01, 5.0)
        case IpoLoss() | KtoLoss():
            return outside(loss.beta, 0.01, 1.0)
        case SimpoLoss():
            return outside(loss.beta, 1.0, 10.0)
        case _:
            return None


def orpo_weight(config: OfflineConfig, facts: Facts) -> Value | None:
    """Return a weight of the odds ratio that is out of range."""
    loss = config.algorithm.loss
    return outside(loss.coef, 0.01, 1.0) if isinstance(loss, OrpoLoss) else None


def simpo_margin(config: OfflineConfig, facts: Facts) -> Value | None:
    """Return the target margin relative to β where it is out of range."""
    loss = config.algorithm.loss
    return outside(loss.gamma / loss.beta, 0.0, 1.6) if isinstance(loss, SimpoLoss) else None


def label_smoothing(config: OfflineConfig, facts: Facts) -> Value | None:
    """Return a label smoothing that says that the labels say next to nothing."""
    loss = config.algorithm.loss
    return outside(loss.label_smoothing, 0.0, 0.3) if isinstance(loss, DpoLoss | RobustDpoLoss) else None


def kto_one_sided(config: OfflineConfig, facts: Facts) -> Value | None:
    """Return a weight of 0 for one of KTO's two sides."""
    loss = config.algorithm.loss
    is_one_sided = isinstance(loss, KtoLoss) and 0.0 in (loss.desirable_weight, loss.undesirable_weight)
    return 0.0 if is_one_sided else None


def batch_of_one(config: OfflineConfig | RewardModelConfig, facts: Facts) -> Value | None:
    """Return a batch of a single row."""
    return 1.0 if config.batch.prompts_per_step == 1 else None


def no_end_learned(config: OfflineConfig, facts: Facts) -> Value | None:
    """Return truncate where rows lose the EOS that the model should learn to end with."""
    sft = config.data.sft
    is_cut = isinstance(config.algorithm.loss, SftLoss) and sft is not None and sft.too_long == "truncate"
    return "truncate" if is_cut else None


def many_epochs(config: OfflineConfig | RewardModelConfig, facts: Facts) -> Value | None:
    """Return more passes over the pairs than are reported."""
    epochs = config.schedule.epochs
    return outside(epochs, 0.0, MOST_PASSES) if epochs is not None and method(config) != "sft" else None


def many_sft_epochs(config: OfflineConfig, facts: Facts) -> Value | None:
    """Return more passes over demonstrations than are reported."""
    epochs = config.schedule.epochs
    return outside(epochs, 0.0, MOST_SFT_PASSES) if epochs is not None and method(config) == "sft" else None


def constant_rate(config: OfflineConfig | RewardModelConfig, facts: Facts) -> Value | None:
    """Return constant where the same rows are read many times at the full rate."""
    epochs, decay = config.schedule.epochs, config.schedule.decay
    return decay if epochs is not None and epochs >= MANY_PASSES and decay == "constant" else None


def best_without_evaluation(config: RunConfiguration, facts: Facts) -> Value | None:
    """Return 0 where the best checkpoint is asked for and nothing is evaluated on the way."""
    return 0.0 if config.checkpoint.best is not None and config.eval.every == 0 else None


def _held_out(config: RunConfiguration) -> list[tuple[DatasetConfig, DatasetConfig | None]]:
    """Return the held-out data sets that the run reads, each with the one that is trained on, if it is its like."""
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
    """Return null where the best checkpoint is asked for and nothing is held out to tell it by."""
    return "null" if config.checkpoint.best is not None and not _held_out(config) else None


def held_out_is_training(config: RunConfiguration, facts: Facts) -> Value | None:
    """Return the path of held-out rows that are the ones trained on."""
    same = [
        held_out.path
        for held_out, training in _held_out(config)
        if training is not None and (held_out.path, held_out.split) == (training.path, training.split)
    ]
    return same[0] if same else None


def few_held_out(config: RunConfiguration, facts: Facts) -> Value | None:
    """Return a limit on held-out rows that leaves too few to tell a better checkpoint from luck."""
    limits = [rows.limit for rows, _ in _held_out(config) if rows.limit is not None and rows.limit < FEWEST_HELD_OUT]
    return float(limits[0]) if limits and config.checkpoint.best is not None else None


DATA_RULES = (
    Rule(
        name="preference-beta",
        level="warning",
        runs=POLICY,
        key="algorithm.loss.beta (online_dpo: algorithm.policy_loss.loss.beta)",
        violation=beta,
        reason="Too small a β lets go of the reference and too large a one learns nothing; each loss "
        "has its own scale.",
        source="Rafailov et al. 2023, sec. 6.1: 0.05 to 5; Zephyr's recipe: 0.01; Azar et al. 2024: "
        "0.1 to 1; Ethayarajh "
        "et al. 2024: 0.01 to 0.1; Meng et al. 2024: 2 to 10",
        fix="0.1 for DPO, IPO and KTO, 2 for SimPO",
    ),
    Rule(
        name="orpo-weight",
        level="warning",
        runs=OFFLINE,
        key="algorithm.loss.coef",
        violation=orpo_weight,
        reason="Above 1 the odds ratio drowns the likelihood that keeps ORPO near the data.",
        source="Hong et al. 2024: 0.1 to 1",
        fix="algorithm.loss.coef=0.1",
    ),
    Rule(
        name="simpo-margin",
        level="warning",
        runs=OFFLINE,
        key="algorithm.loss.gamma / algorithm.loss.beta",
        violation=simpo_margin,
        reason="A target margin of more than 1.6 β asks for a lead per token that hardly a pair has.",
        source="Meng et al. 2024: 0.3 to 1.6 β",
        fix="algorithm.loss.gamma of half of algorithm.loss.beta",
    ),
    Rule(
        name="label-smoothing",
        level="warning",
        runs=OFFLINE,
        key="algorithm.loss.label_smoothing",
        violation=label_smoothing,
        reason="It says that every third label or more is wrong, so the pairs say next to nothing.",
        source="Mitchell 2023 (cDPO), Chowdhury et al. 2024 (robust DPO): 0.1",
        fix="algorithm.loss.label_smoothing=0.1",
    ),
    Rule(
        name="kto-one-sided",
        level="warning",
        runs=OFFLINE,
        key="algorithm.loss.desirable_weight, undesirable_weight",
        violation=kto_one_sided,
        reason="With one side at 0 nothing is contrasted: KTO becomes imitation, or unlearning.",
        source="Ethayarajh et al. 2024: the weighted numbers of the two sides within 1 to 3/2 of each other",
        fix="both weights above 0",
    ),
    Rule(
        name="batch-of-one",
        level="warning",
        runs=ON_DATA,
        key="batch.prompts_per_step",
        violation=batch_of_one,
        reason="Each optimizer step sees one row; to save memory is what batch.micro_batch_size is for.",
        source="alignment-handbook: 64 and more; Meng et al. 2024 (SimPO): 128",
        fix="batch.prompts_per_step=64 batch.micro_batch_size=1",
    ),
    Rule(
        name="no-end-to-learn",
        level="warning",
        runs=OFFLINE,
        key="data.sft.too_long",
        violation=no_end_learned,
        reason="A row that is cut has no EOS, so the model learns to go on where it should end.",
        source="implementation detail of too_long: truncate; Huang et al. 2024 (N+), on EOS",
        fix="data.sft.too_long=skip, and a data.sft.max_tokens in which most rows fit",
    ),
    Rule(
        name="pairs-many-epochs",
        level="warning",
        runs=ON_DATA,
        key="schedule.epochs",
        violation=many_epochs,
        reason="Reward models and preference losses overfit from the second pass on; more than 3 are not reported.",
        source="Ouyang et al. 2022, app. C: 1 for reward models; alignment-handbook: 1 to 3 for DPO",
        fix="schedule.epochs=1",
    ),
    Rule(
        name="sft-many-epochs",
        level="warning",
        runs=OFFLINE,
        key="schedule.epochs",
        violation=many_sft_epochs,
        reason="The longest reported SFT takes 16 passes, and its held-out loss rises after the first.",
        source="Ouyang et al. 2022, sec. 3.5",
        fix="schedule.epochs=3, and data.eval_sft to see where it turns",
    ),
    Rule(
        name="constant-rate-many-epochs",
        level="warning",
        runs=ON_DATA,
        key="schedule.decay",
        violation=constant_rate,
        reason="At the full rate to the end the rows seen last weigh most, and the third pass overfits first.",
        source="alignment-handbook: cosine; Huang et al. 2022 (37 details), detail 4: linear",
        fix="schedule.decay=cosine",
    ),
    Rule(
        name="best-without-evaluation",
        level="error",
        runs=EVERY,
        key="eval.every",
        violation=best_without_evaluation,
        reason="The best checkpoint is chosen among the evaluations, and there would be none on the way.",
        source="implementation detail of checkpoint.best",
        fix="eval.every=20, or checkpoint.best=null",
    ),
    Rule(
        name="best-without-held-out-rows",
        level="error",
        runs=EVERY,
        key="data.eval_prompts, data.eval_preferences, data.eval_sft",
        violation=best_without_data,
        reason="There are no held-out rows by which a checkpoint could be the best.",
        source="implementation detail of checkpoint.best",
        fix="data.eval_prompts.path (online), data.eval_preferences.path, data.eval_sft.path",
    ),
    Rule(
        name="held-out-is-training",
        level="warning",
        runs=EVERY,
        key="data.eval_prompts, data.eval_preferences, data.eval_sft",
        violation=held_out_is_training,
        reason="The rows that should tell learning from learning by heart are those that are trained on.",
        source="Hastie, Tibshirani and Friedman 2009, sec. 7.2",
        fix="other rows: another file or split",
    ),
    Rule(
        name="few-held-out-rows",
        level="warning",
        runs=EVERY,
        key="data.eval_prompts.limit, data.eval_preferences.limit, data.eval_sft.limit",
        violation=few_held_out,
        reason="Of fewer than 32 paired scores hardly any difference is more than noise, so the "
        "first checkpoint stays.",
        source="arithmetic: a difference below a third of its standard deviation is within the interval",
        fix="256 held-out rows",
    ),
)
