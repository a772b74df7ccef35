"""The rules of online runs: what keeps a policy near its reference, what is sampled and scored, how it is updated."""

from __future__ import annotations

from rlhf.config.algorithm import (
    AdaptiveKl,
    BatchWhiten,
    Best,
    BestAndWorst,
    ClipLoss,
    FunctionLoss,
    Gae,
    Group,
    TokenLoss,
    TrustRegionLoss,
)
from rlhf.config.reward import EnsembleSource, FunctionSource
from rlhf.config.sections import OnlineConfig
from rlhf.guard.rule import EVERY, ONLINE, Facts, Rule, RunConfiguration, Value, outside

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
    return "none, or 0" if config.reward.source.is_learned and not any(brakes) else None


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
    return "false" if not config.reference.measure and config.reward.source.is_learned else None


def nothing_to_raise(config: RunConfiguration, facts: Facts) -> Value | None:
    """Flag raise_kl when the run has no KL penalty."""
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
    return float(length) if config.reward.source.is_learned and length < SHORTEST else None


def cut_off_unpunished(config: OnlineConfig, facts: Facts) -> Value | None:
    """Return 0 where a learned reward scores texts that were cut off as if they were whole."""
    shaping, algorithm = config.reward.shaping, config.algorithm
    is_handled = shaping.missing_eos_penalty > 0 or shaping.overlong_buffer > 0 or algorithm.mask_truncated
    return None if is_handled or not config.reward.source.is_learned else 0.0


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
    return judge.type if judge is not None and judge == config.reward.source and judge.is_learned else None


def best_by_reward(config: OnlineConfig, facts: Facts) -> Value | None:
    """Return what chooses the best checkpoint where that is the learned reward which is being exploited."""
    judge, reward = config.eval.source, config.reward.source
    is_same = judge is None or judge == reward
    return "the reward" if config.checkpoint.best is not None and is_same and reward.is_learned else None


ONLINE_RULES = (
    Rule(
        name="no-brake-on-learned-reward",
        level="warning",
        runs=ONLINE,
        key="algorithm.kl.placement, algorithm.kl.coef",
        violation=no_brake,
        reason="Without a KL penalty, target_kl or early stopping the policy exploits the learned reward: "
        "its score rises while the true score falls.",
        source="Gao et al. 2023, sec. 3; Coste et al. 2024",
        fix="algorithm.kl.placement=reward algorithm.kl.coef=0.05, or checkpoint.best.patience=3 with a judge",
    ),
    Rule(
        name="kl-coefficient",
        level="warning",
        runs=ONLINE,
        key="algorithm.kl.coef",
        violation=kl_coefficient,
        reason="Above 0.5 a nat costs half a standard deviation of a calibrated score; below 1e-4 it has no effect.",
        source="Huang et al. 2024 (N+): 0.05; Ziegler et al. 2019: 0.15; Shao et al. 2024 (GRPO): 0.04; verl: 0.001",
        fix="algorithm.kl.coef=0.05",
    ),
    Rule(
        name="kl-estimator-in-reward",
        level="warning",
        runs=ONLINE,
        key="algorithm.kl.estimator",
        violation=estimator_in_reward,
        reason="In the reward only k1 gives the gradient of the KL: no gradient flows through a reward of k2 or k3.",
        source="Tang and Munos 2025; Shah et al. 2025 (A Comedy of Estimators)",
        fix="algorithm.kl.estimator=k1, or algorithm.kl.placement=loss with k2 or k3",
    ),
    Rule(
        name="adaptive-kl-from-zero",
        level="error",
        runs=ONLINE,
        key="algorithm.kl.coef",
        violation=adaptive_from_zero,
        reason="The controller multiplies the coefficient, so a coefficient of 0 stays 0.",
        source="Ziegler et al. 2019, sec. 2.2",
        fix="algorithm.kl.coef=0.05",
    ),
    Rule(
        name="adaptive-kl-target",
        level="warning",
        runs=ONLINE,
        key="algorithm.kl.controller.target",
        violation=adaptive_target,
        reason="The target is in nats per sequence; values near 0.1 are per token, as in other programs.",
        source="Ziegler et al. 2019, sec. 2.2: 6; Rafailov et al. 2023, sec. 6.1: 3 to 12; verl: 0.1 per token",
        fix="algorithm.kl.controller.target=6",
    ),
    Rule(
        name="adaptive-kl-horizon",
        level="error",
        runs=ONLINE,
        key="algorithm.kl.controller.horizon",
        violation=adaptive_horizon,
        reason="The horizon is shorter than a fifth of a step's completions: one step below the target "
        "sets the coefficient to 0 permanently.",
        source="Ziegler et al. 2019, sec. 2.2: 10,000 at 512 completions per step",
        fix="algorithm.kl.controller.horizon of 5 to 20 times the completions of a step",
    ),
    Rule(
        name="adaptive-kl-too-slow",
        level="warning",
        runs=ONLINE,
        key="algorithm.kl.controller.horizon",
        violation=adaptive_too_slow,
        reason="Over the whole run the coefficient can change by less than 10 %, so it is practically fixed.",
        source="Ziegler et al. 2019, sec. 2.2: 10,000 of 2 million completions",
        fix="algorithm.kl.controller.horizon of 5 to 20 times the completions of a step",
    ),
    Rule(
        name="kl-not-measured",
        level="error",
        runs=ONLINE,
        key="reference.measure",
        violation=unmeasured_kl,
        reason="The distance from the reference is then not measured, and the alarms on the KL cannot work.",
        source="Gao et al. 2023, sec. 3: the gold score is a function of the KL",
        fix="reference.measure=true",
    ),
    Rule(
        name="raise-kl-without-a-penalty",
        level="error",
        runs=EVERY,
        key="guard.on_alarm, guard.alarms",
        violation=nothing_to_raise,
        reason="The run has no KL penalty whose coefficient an alarm could raise.",
        source="implementation detail: raise_kl multiplies algorithm.kl.coef",
        fix="guard.on_alarm=lower_lr, or in an online run algorithm.kl.placement=reward algorithm.kl.coef=0.05",
    ),
    Rule(
        name="temperature",
        level="warning",
        runs=ONLINE,
        key="sampling.temperature",
        violation=temperature,
        reason="Near 0 all completions of a prompt are similar and nothing is explored; far above 1 they are noise.",
        source="Huang et al. 2024 (N+): 0.7; Ziegler et al. 2019, Shao et al. 2024 (GRPO): 1",
        fix="sampling.temperature=1",
    ),
    Rule(
        name="temperature-mismatch",
        level="warning",
        runs=ONLINE,
        key="sampling.temperature",
        violation=two_temperatures,
        reason="The policy learns from its samples at this temperature and from data.sft at temperature 1, "
        "so the two losses train different distributions.",
        source="implementation detail: losses on data sets use temperature 1; Ouyang et al. 2022, eq. 2",
        fix="sampling.temperature=1, or algorithm.ptx_coef=0",
    ),
    Rule(
        name="sampler-logprobs-in-a-narrow-clip",
        level="warning",
        runs=ONLINE,
        key="sampling.old_log_probs",
        violation=rounded_logprobs,
        reason="In bfloat16 the error of the sampler's log-probabilities exceeds the width of GSPO's clip range.",
        source="Zheng et al. 2025 (GSPO), sec. 5.1",
        fix="sampling.old_log_probs=trainer",
    ),
    Rule(
        name="head-in-bfloat16",
        level="warning",
        runs=ONLINE,
        key="policy.head_dtype",
        violation=head_in_bfloat16,
        reason="Logits in bfloat16 shift log-probabilities by hundredths of a nat, which distorts ratio and KL.",
        source="Khatri et al. 2025 (ScaleRL): float32 logits",
        fix="policy.head_dtype=float32",
    ),
    Rule(
        name="short-completions",
        level="warning",
        runs=ONLINE,
        key="sampling.max_new_tokens",
        violation=short_completions,
        reason="A learned reward was trained on complete answers, and this limit cuts off most sentences.",
        source="Ziegler et al. 2019: 24; Huang et al. 2024 (N+): 53",
        fix="set sampling.max_new_tokens to the length of the answers in the reward model's data",
    ),
    Rule(
        name="cut-off-unpunished",
        level="warning",
        runs=ONLINE,
        key="reward.shaping.missing_eos_penalty",
        violation=cut_off_unpunished,
        reason="A reward model scores a text that max_new_tokens cut off as if it were complete, so the "
        "policy pays nothing for not ending.",
        source="Huang et al. 2024 (N+), the EOS trick; Stiennon et al. 2020",
        fix="reward.shaping.missing_eos_penalty=1, or algorithm.mask_truncated=true",
    ),
    Rule(
        name="penalty-on-masked-rows",
        level="warning",
        runs=ONLINE,
        key="reward.shaping.missing_eos_penalty",
        violation=masked_penalty,
        reason="algorithm.mask_truncated excludes from the loss the completions that the penalty applies to.",
        source="Yu et al. 2025 (DAPO), sec. 3.4",
        fix="one of the two: algorithm.mask_truncated=false, or reward.shaping.missing_eos_penalty=0",
    ),
    Rule(
        name="clip-of-a-checked-reward",
        level="warning",
        runs=ONLINE,
        key="reward.shaping.clip",
        violation=clip_of_checked_reward,
        reason="A programmed check has no outliers: clipping only makes different answers equal.",
        source="clips reported for learned rewards: DeepSpeed-Chat: 5; OpenRLHF: 10",
        fix="reward.shaping.clip=null",
    ),
    Rule(
        name="small-ensemble",
        level="warning",
        runs=ONLINE,
        key="reward.source.sources",
        violation=small_ensemble,
        reason="The minimum or the spread of two members is a poor estimate of their uncertainty.",
        source="Coste et al. 2024: 3 to 5 members",
        fix="4 members, or reward.source.how=mean",
    ),
    Rule(
        name="judge-is-the-reward",
        level="warning",
        runs=ONLINE,
        key="eval.source",
        violation=judge_is_reward,
        reason="If the judge is the trained-on reward, its score rises even if the policy exploits it.",
        source="Gao et al. 2023, sec. 2: proxy and gold",
        fix="another eval.source, or null to report the training reward under its own name",
    ),
    Rule(
        name="best-by-the-trained-reward",
        level="warning",
        runs=ONLINE,
        key="eval.source",
        violation=best_by_reward,
        reason="The reward that the policy exploits chooses the checkpoint, so the most exploited checkpoint wins.",
        source="Gao et al. 2023, sec. 3",
        fix="set eval.source to a judge that is not trained on",
    ),
)


CLIP_RANGES = {"token": (0.1, 0.3), "sequence": (0.1, 0.3), "sequence_mean": (1e-4, 1e-2)}
FEWEST_IN_GROUP = 4
FEWEST_COMPLETIONS = 16
USUAL_EPOCHS, MOST_EPOCHS = 4.0, 30.0
MOST_OWN_UPDATES = 16


def clip_is_zero(config: OnlineConfig, facts: Facts) -> Value | None:
    """Return the clip range where it leaves no room on either side."""
    loss = config.algorithm.policy_loss
    is_zero = isinstance(loss, ClipLoss) and loss.clip_eps_low == 0 and loss.clip_eps_high == 0
    return 0.0 if is_zero else None


def clip_never_binds(config: OnlineConfig, facts: Facts) -> Value | None:
    """Return a clip range below of 1 or more: a ratio is never negative, so nothing bounds it from below."""
    loss = config.algorithm.policy_loss
    return loss.clip_eps_low if isinstance(loss, ClipLoss) and loss.clip_eps_low >= 1 else None


def clip_range(config: OnlineConfig, facts: Facts) -> Value | None:
    """Return the side of the clip range that is out of the range reported for its ratio."""
    loss = config.algorithm.policy_loss
    if not isinstance(loss, ClipLoss) or clip_is_zero(config, facts) is not None:
        return None
    low, high = CLIP_RANGES[loss.ratio]
    sides = [side for side in (loss.clip_eps_low, loss.clip_eps_high) if outside(side, low, high) is not None]
    return sides[0] if sides else None


def dual_clip(config: OnlineConfig, facts: Facts) -> Value | None:
    """Return a dual clip that is out of range."""
    loss = config.algorithm.policy_loss
    bound = loss.dual_clip if isinstance(loss, ClipLoss) else None
    return None if bound is None else outside(bound, 1.5, 10.0)


def entropy_bonus(config: OnlineConfig, facts: Facts) -> Value | None:
    """Return an entropy bonus larger than any reported."""
    loss = config.algorithm.policy_loss
    return outside(loss.entropy_coef, 0.0, 0.05) if isinstance(loss, TokenLoss) else None


def epochs_of_text(config: OnlineConfig, facts: Facts) -> Value | None:
    """Return more passes over the same completions than is usual for text, where no target_kl ends them."""
    if isinstance(config.algorithm.policy_loss, TrustRegionLoss):  # its policy moves once, whatever the passes
        return None
    is_many = USUAL_EPOCHS < config.batch.epochs <= MOST_EPOCHS and config.algorithm.target_kl is None
    return float(config.batch.epochs) if is_many else None


def epochs_beyond_ppo(config: OnlineConfig, facts: Facts) -> Value | None:
    """Return more passes over the same completions than PPO was ever shown with."""
    return outside(float(config.batch.epochs), 1.0, MOST_EPOCHS)


def target_kl(config: OnlineConfig, facts: Facts) -> Value | None:
    """Return a target_kl that is out of range."""
    target = config.algorithm.target_kl
    return None if target is None else outside(target, 0.003, 0.1)


def not_whitened(config: OnlineConfig, facts: Facts) -> Value | None:
    """Return false where GAE's advantages are not normalized."""
    advantage = config.algorithm.advantage
    return "false" if isinstance(advantage, Gae) and not advantage.whiten else None


def discount(config: OnlineConfig, facts: Facts) -> Value | None:
    """Return a discount that hides the end of a text from its beginning."""
    advantage = config.algorithm.advantage
    return outside(advantage.gamma, 0.99, 1.0) if isinstance(advantage, Gae | BatchWhiten) else None


def gae_lambda(config: OnlineConfig, facts: Facts) -> Value | None:
    """Return a λ below what is reported."""
    advantage = config.algorithm.advantage
    return outside(advantage.gae_lambda, 0.9, 1.0) if isinstance(advantage, Gae) else None


def small_group(config: OnlineConfig, facts: Facts) -> Value | None:
    """Return a group too small to estimate the standard deviation that it is divided by."""
    advantage, size = config.algorithm.advantage, config.sampling.completions_per_prompt
    is_normalized = isinstance(advantage, Group) and advantage.baseline == "normalized"
    return float(size) if is_normalized and size < FEWEST_IN_GROUP else None


def small_step(config: OnlineConfig, facts: Facts) -> Value | None:
    """Return a step with too few completions for its gradient to mean much."""
    return float(config.completions_per_step) if config.completions_per_step < FEWEST_COMPLETIONS else None


def _rows_trained_on(config: OnlineConfig) -> int:
    """Return the most rows that a step's minibatches are made of."""
    advantage, prompts = config.algorithm.advantage, config.batch.prompts_per_step
    if isinstance(advantage, BestAndWorst):
        return prompts
    if isinstance(advantage, Best):
        return prompts * min(advantage.keep, config.sampling.completions_per_prompt)
    return config.completions_per_step


def minibatch_of_one(config: OnlineConfig, facts: Facts) -> Value | None:
    """Return the number of minibatches where each is a single row."""
    minibatches = config.batch.minibatches
    return float(minibatches) if minibatches > 1 and _rows_trained_on(config) < 2 * minibatches else None


def uneven_minibatches(config: OnlineConfig, facts: Facts) -> Value | None:
    """Return the number of minibatches where it does not divide the rows of a step."""
    minibatches = config.batch.minibatches
    is_uneven = _rows_trained_on(config) % minibatches and minibatch_of_one(config, facts) is None
    return float(minibatches) if is_uneven else None


def critic_frozen(config: OnlineConfig, facts: Facts) -> Value | None:
    """Return 0 where a policy learns from the values of a critic that does not."""
    has_own_critic = isinstance(config.algorithm.advantage, Gae) and not config.critic.shared
    return 0.0 if has_own_critic and config.critic.lr == 0 and config.policy.lr > 0 else None


def critic_warmup(config: OnlineConfig, facts: Facts) -> Value | None:
    """Return a warm-up of the critic that leaves the policy no step."""
    steps, warmup = config.schedule.steps, config.critic.warmup_steps
    has_critic = isinstance(config.algorithm.advantage, Gae)
    return float(warmup) if has_critic and steps is not None and steps <= warmup else None


def value_weight(config: OnlineConfig, facts: Facts) -> Value | None:
    """Return a weight of the value loss that is out of range, where it competes with the policy's."""
    loss = config.algorithm.value_loss
    return outside(loss.coef, 0.01, 1.0) if loss is not None and config.critic.shared else None


def own_loss_updates(config: OnlineConfig, facts: Facts) -> Value | None:
    """Return how many updates on the same completions a loss of the user's is trusted with, where it is many."""
    updates = config.batch.epochs * config.batch.minibatches
    is_own = isinstance(config.algorithm.policy_loss, FunctionLoss)
    return float(updates) if is_own and updates > MOST_OWN_UPDATES else None


UPDATE_RULES = (
    Rule(
        name="clip-zero",
        level="error",
        runs=ONLINE,
        key="algorithm.policy_loss.clip_eps_low, clip_eps_high",
        violation=clip_is_zero,
        reason="With a clip range of 0 every ratio other than 1 is clipped: nothing is learned after the first update.",
        source="Schulman et al. 2017, eq. 7",
        fix="algorithm.policy_loss.clip_eps_low=0.2 algorithm.policy_loss.clip_eps_high=0.2",
    ),
    Rule(
        name="clip-never-binds",
        level="error",
        runs=ONLINE,
        key="algorithm.policy_loss.clip_eps_low",
        violation=clip_never_binds,
        reason="A ratio is never negative, so 1 - clip_eps_low bounds nothing: one step can unlearn a token.",
        source="Schulman et al. 2017, eq. 7 and table 1: 0.1 to 0.3",
        fix="algorithm.policy_loss.clip_eps_low=0.2",
    ),
    Rule(
        name="clip-range",
        level="warning",
        runs=ONLINE,
        key="algorithm.policy_loss.clip_eps_low, clip_eps_high",
        violation=clip_range,
        reason="Published ranges: 0.1 to 0.3 for PPO, 0.28 for clip-higher, 3e-4 for GSPO's ratio per sequence.",
        source="Schulman et al. 2017, table 1; Yu et al. 2025 (DAPO), sec. 3.1; Zheng et al. 2025 (GSPO), sec. 5.1",
        fix="0.2; with policy_loss.ratio=sequence_mean 3e-4 and 4e-4",
    ),
    Rule(
        name="dual-clip",
        level="warning",
        runs=ONLINE,
        key="algorithm.policy_loss.dual_clip",
        violation=dual_clip,
        reason="Near 1 it clips nearly every negative advantage; at large values it has no effect.",
        source="Ye et al. 2020, eq. 5: 3",
        fix="algorithm.policy_loss.dual_clip=3, or null",
    ),
    Rule(
        name="entropy-bonus",
        level="warning",
        runs=ONLINE,
        key="algorithm.policy_loss.entropy_coef",
        violation=entropy_bonus,
        reason="With a vocabulary of thousands of tokens a bonus above 0.05 per nat rewards noise.",
        source="Huang et al. 2022 (37 details), detail 10: 0.01; Huang et al. 2024 (N+): 0",
        fix="algorithm.policy_loss.entropy_coef=0.01, or 0",
    ),
    Rule(
        name="epochs-many-for-text",
        level="warning",
        runs=ONLINE,
        key="batch.epochs",
        violation=epochs_of_text,
        reason="For text, 1 to 4 passes over the same completions are reported; 3 to 30 are from control tasks.",
        source="Huang et al. 2024 (N+): 4; Ziegler et al. 2019: 4; Schulman et al. 2017, tables 3 to 5",
        fix="batch.epochs=4 or less, or algorithm.target_kl=0.02, which ends a step's epochs early",
    ),
    Rule(
        name="epochs-beyond-ppo",
        level="error",
        runs=ONLINE,
        key="batch.epochs",
        violation=epochs_beyond_ppo,
        reason="No published PPO run takes more than 30 passes: most tokens are clipped or overfit by then.",
        source="Schulman et al. 2017, tables 3 to 5: 3 to 15",
        fix="batch.epochs=4",
    ),
    Rule(
        name="target-kl",
        level="warning",
        runs=ONLINE,
        key="algorithm.target_kl",
        violation=target_kl,
        reason="In nats per token: below 0.003 each step ends after one or two updates; above 0.1 it acts too late.",
        source="Spinning Up's PPO: 0.01; Huang et al. 2022 (37 details), early stopping: 0.01",
        fix="algorithm.target_kl=0.02",
    ),
    Rule(
        name="advantages-not-normalized",
        level="warning",
        runs=ONLINE,
        key="algorithm.advantage.whiten",
        violation=not_whitened,
        reason="Without whitening the size of an update depends on the scale of the reward.",
        source="Huang et al. 2022 (37 details), detail 7; Xu et al. 2024, sec. 5",
        fix="algorithm.advantage.whiten=true",
    ),
    Rule(
        name="discount",
        level="warning",
        runs=ONLINE,
        key="algorithm.advantage.gamma",
        violation=discount,
        reason="The score is at the last token: at 0.95 the first of 100 tokens receives less than 1 % of it.",
        source="Huang et al. 2024 (N+): 1; Ziegler et al. 2019: 1",
        fix="algorithm.advantage.gamma=1",
    ),
    Rule(
        name="gae-lambda",
        level="warning",
        runs=ONLINE,
        key="algorithm.advantage.gae_lambda",
        violation=gae_lambda,
        reason="A small λ relies on the critic more than on the score, and the critic is poor early in training.",
        source="Schulman et al. 2016, sec. 6: 0.92 to 0.99; Huang et al. 2024 (N+): 0.95",
        fix="algorithm.advantage.gae_lambda=0.95, or 1",
    ),
    Rule(
        name="small-group",
        level="warning",
        runs=ONLINE,
        key="sampling.completions_per_prompt",
        violation=small_group,
        reason="With 2 or 3 scores, normalized advantages carry little more than their order.",
        source="Shao et al. 2024 (GRPO), sec. 4.2: 64; Yu et al. 2025 (DAPO): 16",
        fix="sampling.completions_per_prompt=8, or algorithm.preset=rloo, for which 2 and 4 are reported",
    ),
    Rule(
        name="small-step",
        level="warning",
        runs=ONLINE,
        key="batch.prompts_per_step x sampling.completions_per_prompt",
        violation=small_step,
        reason="The gradient of fewer than 16 completions is mostly noise.",
        source="Huang et al. 2024 (N+): 512; Xu et al. 2024, sec. 5: large batches are a key to PPO on text",
        fix="batch.prompts_per_step=64",
    ),
    Rule(
        name="minibatch-of-one",
        level="warning",
        runs=ONLINE,
        key="batch.minibatches",
        violation=minibatch_of_one,
        reason="Each optimizer step sees one completion, so Adam's moments are very noisy.",
        source="Schulman et al. 2017, table 3: 64; Huang et al. 2024 (N+): 512",
        fix="fewer batch.minibatches, or more batch.prompts_per_step",
    ),
    Rule(
        name="uneven-minibatches",
        level="warning",
        runs=ONLINE,
        key="batch.minibatches",
        violation=uneven_minibatches,
        reason="The last minibatch is smaller but moves the weights as far, so its rows have more weight.",
        source="implementation detail: the loss of a minibatch is divided by its own rows",
        fix="a batch.minibatches that divides the completions of a step",
    ),
    Rule(
        name="critic-frozen",
        level="error",
        runs=ONLINE,
        key="critic.lr",
        violation=critic_frozen,
        reason="GAE subtracts the values of a critic that never learns the policy's returns.",
        source="Schulman et al. 2016, sec. 3",
        fix="critic.lr=5e-6, or an algorithm without a critic: algorithm.preset=rloo",
    ),
    Rule(
        name="critic-warmup-covers-the-run",
        level="error",
        runs=ONLINE,
        key="critic.warmup_steps",
        violation=critic_warmup,
        reason="The policy is not trained during the critic's warm-up, and the run ends before the warm-up does.",
        source="implementation detail: critic.warmup_steps trains the critic alone",
        fix="critic.warmup_steps below schedule.steps",
    ),
    Rule(
        name="value-loss-weight",
        level="warning",
        runs=ONLINE,
        key="algorithm.value_loss.coef",
        violation=value_weight,
        reason="On a shared backbone the losses compete: a large weight harms the policy, a small one the critic.",
        source="Huang et al. 2024 (N+): 0.1; Huang et al. 2022 (37 details): 0.5",
        fix="algorithm.value_loss.coef=0.1",
    ),
    Rule(
        name="own-loss-many-updates",
        level="warning",
        runs=ONLINE,
        key="batch.epochs x batch.minibatches",
        violation=own_loss_updates,
        reason="A custom loss may not keep the policy close to its samples over this many updates.",
        source="Huang et al. 2024 (N+): 4 updates on the same completions",
        fix="fewer batch.epochs, or algorithm.target_kl=0.02",
    ),
)
