"""The rules of online runs: what keeps a policy near its reference, what is sampled, and what scores it."""

from __future__ import annotations

from rlhf.config.algorithm import AdaptiveKl, Best, ClipLoss, Group
from rlhf.config.reward import EnsembleSource, FunctionSource
from rlhf.config.sections import OnlineConfig
from rlhf.guard.rule import EVERY, ONLINE, Facts, Rule, RunConfiguration, Value, is_learned, outside

SHORTEST = 16  # tokens
FEWEST_MEMBERS = 3
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


def nothing_to_raise(config: RunConfiguration, facts: Facts) -> Value | None:
    """Return raise_kl where there is no penalty to raise: in a run on data there never is."""
    if "raise_kl" not in (config.guard.on_alarm, *config.guard.alarms.values()):
        return None
    kl = config.algorithm.kl if isinstance(config, OnlineConfig) else None
    return "raise_kl" if kl is None or kl.placement == "none" or kl.coef == 0 else None


def temperature(config: OnlineConfig, facts: Facts) -> Value | None:
    """Return a temperature at which samples are nearly greedy, or nearly noise."""
    return outside(config.sampling.temperature, 0.5, 1.2)


def two_temperatures(config: OnlineConfig, facts: Facts) -> Value | None:
    """Return the temperature of samples where demonstrations are learned at 1 by the same weights."""
    is_mixed = config.algorithm.ptx_coef > 0 and config.sampling.temperature != 1.0
    return config.sampling.temperature if is_mixed else None


def rounded_logprobs(config: OnlineConfig, facts: Facts) -> Value | None:
    """Return `sampler` where its rounded log-probabilities meet a clip range of their own size."""
    loss = config.algorithm.policy_loss
    is_rounded = config.policy.dtype == "bfloat16" and config.sampling.old_log_probs == "sampler"
    is_narrow = isinstance(loss, ClipLoss) and loss.ratio == "sequence_mean"
    return "sampler" if is_rounded and is_narrow else None


def head_in_bfloat16(config: OnlineConfig, facts: Facts) -> Value | None:
    """Return `model` where log-probabilities come from logits in bfloat16."""
    return "model" if config.policy.dtype == "bfloat16" and config.policy.head_dtype == "model" else None


def short_completions(config: OnlineConfig, facts: Facts) -> Value | None:
    """Return a limit in which hardly a sentence fits, where a learned reward reads sentences."""
    length = config.sampling.max_new_tokens
    return float(length) if is_learned(config.reward.source) and length < SHORTEST else None


def cut_off_unpunished(config: OnlineConfig, facts: Facts) -> Value | None:
    """Return 0 where a learned reward scores texts that were cut off as if they were whole."""
    shaping, algorithm = config.reward.shaping, config.algorithm
    is_handled = shaping.missing_eos_penalty > 0 or shaping.overlong_buffer > 0 or algorithm.mask_truncated
    return None if is_handled or not is_learned(config.reward.source) else 0.0


def masked_penalty(config: OnlineConfig, facts: Facts) -> Value | None:
    """Return a penalty on completions that are left out of the loss and of every baseline."""
    penalty, has_group = config.reward.shaping.missing_eos_penalty, isinstance(config.algorithm.advantage, Group)
    return penalty if config.algorithm.mask_truncated and penalty > 0 and not has_group else None


def clip_of_checked_reward(config: OnlineConfig, facts: Facts) -> Value | None:
    """Return a clip on the scores of a function, which has no outliers to tame."""
    return config.reward.shaping.clip if isinstance(config.reward.source, FunctionSource) else None


def small_ensemble(config: OnlineConfig, facts: Facts) -> Value | None:
    """Return the number of members of a conservative ensemble that are too few to disagree."""
    source = config.reward.source
    if not isinstance(source, EnsembleSource) or source.how not in ("minimum", "mean_minus_std"):
        return None
    return float(len(source.sources)) if len(source.sources) < FEWEST_MEMBERS else None


def judge_is_reward(config: OnlineConfig, facts: Facts) -> Value | None:
    """Return the type of a judge that is the learned reward itself."""
    judge = config.eval.source
    return judge.type if judge is not None and judge == config.reward.source and is_learned(judge) else None


def best_by_reward(config: OnlineConfig, facts: Facts) -> Value | None:
    """Return what chooses the best checkpoint where that is the learned reward which is being exploited."""
    judge, reward = config.eval.source, config.reward.source
    is_same = judge is None or judge == reward
    return "the reward" if config.checkpoint.best is not None and is_same and is_learned(reward) else None


ONLINE_RULES = (
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
        runs=EVERY,
        key="guard.on_alarm, guard.alarms",
        violation=nothing_to_raise,
        reason="There is no coefficient to raise, so an alarm would do nothing.",
        source="implementation detail: raise_kl multiplies algorithm.kl.coef",
        fix="guard.on_alarm=lower_lr, or in an online run algorithm.kl.placement=reward algorithm.kl.coef=0.05",
    ),
    Rule(
        name="temperature",
        level="warning",
        runs=ONLINE,
        key="sampling.temperature",
        violation=temperature,
        reason="Near 0 the completions of a prompt are alike and nothing is explored; far above 1 they are noise.",
        source="Huang et al. 2024 (N+): 0.7; Ziegler et al. 2019, Shao et al. 2024 (GRPO): 1",
        fix="sampling.temperature=1",
    ),
    Rule(
        name="temperature-mismatch",
        level="warning",
        runs=ONLINE,
        key="sampling.temperature",
        violation=two_temperatures,
        reason="The policy learns from its samples at this temperature and from data.sft at 1: two "
        "distributions of one "
        "model pull at the same weights.",
        source="docs/decisions/012: losses over data are at temperature 1; Ouyang et al. 2022, eq. 2",
        fix="sampling.temperature=1, or algorithm.ptx_coef=0",
    ),
    Rule(
        name="sampler-logprobs-in-a-narrow-clip",
        level="warning",
        runs=ONLINE,
        key="sampling.old_log_probs",
        violation=rounded_logprobs,
        reason="In bfloat16 the sampler's log-probabilities are off by more than GSPO's clip range is wide.",
        source="docs/decisions/012; Zheng et al. 2025 (GSPO), sec. 5.1",
        fix="sampling.old_log_probs=trainer",
    ),
    Rule(
        name="head-in-bfloat16",
        level="warning",
        runs=ONLINE,
        key="policy.head_dtype",
        violation=head_in_bfloat16,
        reason="Logits in bfloat16 put log-probabilities off by hundredths of a nat, which ratio and KL then see.",
        source="docs/decisions/012; Khatri et al. 2025 (ScaleRL): float32 logits",
        fix="policy.head_dtype=float32",
    ),
    Rule(
        name="short-completions",
        level="warning",
        runs=ONLINE,
        key="sampling.max_new_tokens",
        violation=short_completions,
        reason="A learned reward was trained on whole answers, and hardly a sentence fits.",
        source="Ziegler et al. 2019: 24; Huang et al. 2024 (N+): 53",
        fix="a sampling.max_new_tokens as long as the answers in the reward model's data",
    ),
    Rule(
        name="cut-off-unpunished",
        level="warning",
        runs=ONLINE,
        key="reward.shaping.missing_eos_penalty",
        violation=cut_off_unpunished,
        reason="A reward model scores a text that max_new_tokens cut off as if it were whole: not to "
        "end costs nothing.",
        source="Huang et al. 2024 (N+), the EOS trick; Stiennon et al. 2020",
        fix="reward.shaping.missing_eos_penalty=1, or algorithm.mask_truncated=true",
    ),
    Rule(
        name="penalty-on-masked-rows",
        level="warning",
        runs=ONLINE,
        key="reward.shaping.missing_eos_penalty",
        violation=masked_penalty,
        reason="algorithm.mask_truncated leaves out of the loss the very completions that the penalty is for.",
        source="Yu et al. 2025 (DAPO), sec. 3.4",
        fix="one of the two: algorithm.mask_truncated=false, or reward.shaping.missing_eos_penalty=0",
    ),
    Rule(
        name="clip-of-a-checked-reward",
        level="warning",
        runs=ONLINE,
        key="reward.shaping.clip",
        violation=clip_of_checked_reward,
        reason="A function that checks has no outliers: a clip can only make different answers equal.",
        source="the clip is for learned rewards: DeepSpeed-Chat: 5; OpenRLHF: 10",
        fix="reward.shaping.clip=null",
    ),
    Rule(
        name="small-ensemble",
        level="warning",
        runs=ONLINE,
        key="reward.source.sources",
        violation=small_ensemble,
        reason="The minimum or the spread of two members is hardly an estimate of what they do not know.",
        source="Coste et al. 2024: 3 to 5 members",
        fix="4 members, or reward.source.how=mean",
    ),
    Rule(
        name="judge-is-the-reward",
        level="warning",
        runs=ONLINE,
        key="eval.source",
        violation=judge_is_reward,
        reason="A judge that is the trained-on reward rises whatever the policy does to it.",
        source="Gao et al. 2023, sec. 2: proxy and gold",
        fix="another eval.source; with null the training reward is reported as what it is",
    ),
    Rule(
        name="best-by-the-trained-reward",
        level="warning",
        runs=ONLINE,
        key="eval.source",
        violation=best_by_reward,
        reason="The learned reward that is being exploited chooses the checkpoint, so the most exploited one wins.",
        source="Gao et al. 2023, sec. 3",
        fix="eval.source, a judge that nothing is trained on",
    ),
)
