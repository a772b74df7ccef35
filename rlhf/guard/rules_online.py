"""The rules of online runs: on the distance from the reference, on sampling and scores, and on updates."""

from __future__ import annotations

from rlhf.config.sections import OfflineConfig, OnlineConfig, RunConfiguration
from rlhf.guard.rule import EVERY, ONLINE, POLICY, outside
from rlhf.section import Facts, Rule, Value

SHORTEST = 16  # tokens
SHORTEST_ACTION = 8  # tokens of a turn: fewer hold no sentence and no call of a tool


def no_brake(config: OnlineConfig, facts: Facts) -> Value | None:
    """Return `none` if nothing keeps the policy where a learned reward is right."""
    brakes = (
        config.algorithm.trains_against_reference,
        config.algorithm.target_kl is not None,
        config.checkpoint.best is not None,
        config.guard.on_alarm not in ("ignore", "warn"),
        config.algorithm.advantage.imitates,  # what the start model writes itself
    )
    return "none, or 0" if config.reward.source.is_learned and not any(brakes) else None


def unmeasured_kl(config: OnlineConfig, facts: Facts) -> Value | None:
    """Return false if nobody can see how far a learned reward has led the policy."""
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
    """Return the temperature of samples if demonstrations are learned at 1 by the same weights."""
    is_mixed = config.algorithm.ptx_coef > 0 and config.sampling.temperature != 1.0
    return config.sampling.temperature if is_mixed else None


def rounded_logprobs(config: OnlineConfig, facts: Facts) -> Value | None:
    """Return `sampler` if its rounded log-probabilities meet a clip range of their own size."""
    is_rounded = config.policy.dtype == "bfloat16" and config.sampling.old_log_probs == "sampler"
    return "sampler" if is_rounded and config.algorithm.policy_loss.has_narrow_clip else None


def head_in_bfloat16(config: OnlineConfig, facts: Facts) -> Value | None:
    """Return `model` if log-probabilities come from logits in bfloat16."""
    return "model" if config.policy.dtype == "bfloat16" and config.policy.head_dtype == "model" else None


def short_completions(config: OnlineConfig, facts: Facts) -> Value | None:
    """Return a limit in which hardly a sentence fits, if a learned reward reads sentences."""
    length = config.sampling.max_new_tokens
    return float(length) if config.reward.source.is_learned and length < SHORTEST else None


def short_actions(config: OnlineConfig | OfflineConfig, facts: Facts) -> Value | None:
    """Return a limit of a turn in which no sentence and no call of a tool fits."""
    longest, environment = config.sampling.max_new_tokens, config.environment
    has_turns = environment is not None and environment.max_turns > 1
    return float(longest) if has_turns and longest < SHORTEST_ACTION else None


def cut_off_unpunished(config: OnlineConfig, facts: Facts) -> Value | None:
    """Return 0 if a learned reward scores texts that were cut off as if they were whole."""
    shaping, algorithm = config.reward.shaping, config.algorithm
    is_handled = shaping.missing_eos_penalty > 0 or shaping.overlong_buffer > 0 or algorithm.mask_truncated
    return None if is_handled or not config.reward.source.is_learned else 0.0


def masked_penalty(config: OnlineConfig, facts: Facts) -> Value | None:
    """Return a penalty on completions that are left out of the loss and of every baseline."""
    penalty, algorithm = config.reward.shaping.missing_eos_penalty, config.algorithm
    return penalty if algorithm.mask_truncated and penalty > 0 and not algorithm.advantage.is_group else None


def clip_of_checked_reward(config: OnlineConfig, facts: Facts) -> Value | None:
    """Return a clip on the scores of a program, which has no outliers to tame."""
    source = config.reward.source
    return None if source.is_learned or source.is_constant else config.reward.shaping.clip


def judge_is_reward(config: OnlineConfig, facts: Facts) -> Value | None:
    """Return the type of a judge that is the learned reward itself."""
    judge = config.eval.source
    return judge.type if judge is not None and judge == config.reward.source and judge.is_learned else None


def cost_is_reward(config: OnlineConfig, facts: Facts) -> Value | None:
    """Return the type of a cost that is the reward itself: higher is better for one and worse for the other."""
    cost = config.reward.cost
    return cost.source.type if cost is not None and cost.source == config.reward.source else None


def best_by_reward(config: OnlineConfig, facts: Facts) -> Value | None:
    """Return the setting that chooses the best checkpoint if that is the learned reward which is being exploited."""
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
        fix="guard.on_alarm=lower_lr; or, online without pairs, algorithm.kl.placement=reward algorithm.kl.coef=0.05",
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
        name="agent-short-actions",
        level="warning",
        runs=POLICY,
        key="sampling.max_new_tokens",
        violation=short_actions,
        reason="An action of fewer than 8 tokens holds no sentence and no call of a tool, so that hardly an episode of "
        "several turns can succeed.",
        source="arithmetic: an empty call of a tool as JSON has more tokens",
        fix="sampling.max_new_tokens=32 (8 for a number alone)",
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
        name="cost-is-the-reward",
        level="error",
        runs=ONLINE,
        key="reward.cost.source",
        violation=cost_is_reward,
        reason="A cost is worse the higher it is: with the reward as the cost, the multiplier pays for low scores.",
        source="Dai et al. 2023: reward and cost are models of separate labels",
        fix="set reward.cost.source to a source of costs",
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


FEWEST_IN_GROUP = 4
FEWEST_COMPLETIONS = 16
USUAL_EPOCHS, MOST_EPOCHS = 4.0, 30.0
MOST_OWN_UPDATES = 16
LEAST_AT_FIRST_TOKEN = 0.05  # of the score; configs/lab/ppo_lag.yaml learns with 0.085
SLOWEST_CRITIC = 0.5  # learning rate over the policy's


def epochs_of_text(config: OnlineConfig, facts: Facts) -> Value | None:
    """Return more passes over the same completions than is usual for text, if no target_kl ends them."""
    if config.algorithm.policy_loss.searches:  # the policy moves once, whatever the passes
        return None
    is_many = USUAL_EPOCHS < config.batch.epochs <= MOST_EPOCHS and config.algorithm.target_kl is None
    return float(config.batch.epochs) if is_many else None


def epochs_beyond_ppo(config: OnlineConfig, facts: Facts) -> Value | None:
    """Return more passes over the same completions than PPO was ever shown with."""
    return outside(float(config.batch.epochs), 1.0, MOST_EPOCHS)


def small_group(config: OnlineConfig, facts: Facts) -> Value | None:
    """Return a group too small to estimate the standard deviation that it is divided by."""
    size = config.sampling.completions_per_prompt
    return float(size) if config.algorithm.advantage.divides_by_spread and size < FEWEST_IN_GROUP else None


def small_step(config: OnlineConfig, facts: Facts) -> Value | None:
    """Return a step with too few completions for its gradient to mean much."""
    return float(config.completions_per_step) if config.completions_per_step < FEWEST_COMPLETIONS else None


def _rows_trained_on(config: OnlineConfig) -> int:
    """Return the most rows that a step's minibatches are made of."""
    per_prompt = config.algorithm.advantage.rows_per_prompt(config.sampling.completions_per_prompt)
    return config.batch.prompts_per_step * per_prompt


def minibatch_of_one(config: OnlineConfig, facts: Facts) -> Value | None:
    """Return the number of minibatches if one of them is a single row."""
    minibatches = config.batch.minibatches
    return float(minibatches) if minibatches > 1 and _rows_trained_on(config) < 2 * minibatches else None


def uneven_minibatches(config: OnlineConfig, facts: Facts) -> Value | None:
    """Return the number of minibatches if it does not divide the rows of a step."""
    minibatches = config.batch.minibatches
    is_uneven = _rows_trained_on(config) % minibatches and minibatch_of_one(config, facts) is None
    return float(minibatches) if is_uneven else None


def critic_frozen(config: OnlineConfig, facts: Facts) -> Value | None:
    """Return 0 if a policy learns from the values of a critic that does not learn."""
    has_own_critic = config.algorithm.advantage.needs_critic and not config.critic.shared
    return 0.0 if has_own_critic and config.critic.lr == 0 and config.policy.lr > 0 else None


def critic_warmup(config: OnlineConfig, facts: Facts) -> Value | None:
    """Return a warm-up of the critic that leaves the policy no step."""
    steps, warmup = config.schedule.steps, config.critic.warmup_steps
    has_critic = config.algorithm.advantage.needs_critic
    return float(warmup) if has_critic and steps is not None and steps <= warmup else None


def hidden_score(config: OnlineConfig, facts: Facts) -> Value | None:
    """Return λ and λ^T if a new value head hides a score at the end of T tokens from the first of them."""
    gae_lambda = getattr(config.algorithm.advantage, "gae_lambda", 1.0)
    length, environment = config.sampling.max_new_tokens, config.environment
    is_paid_before_end = config.reward.process is not None or (environment is not None and environment.max_turns > 1)
    share = gae_lambda**length
    is_hidden = share < LEAST_AT_FIRST_TOKEN and _has_new_head(config) and not is_paid_before_end
    return f"{gae_lambda:g}, and {gae_lambda:g} ** {length} is {share:.2g}" if is_hidden else None


def slow_critic(config: OnlineConfig, facts: Facts) -> Value | None:
    """Return a rate of a critic with a new head that is far below the rate of the policy in the same kind of weights.

    A rate of 0 breaks another rule, and a policy whose step is searched has no rate.
    """
    policy, critic = config.policy, config.critic
    is_comparable = (policy.lora is None) == (critic.lora is None) and not config.algorithm.policy_loss.searches
    has_own_rate = _has_new_head(config) and not critic.shared
    is_slow = 0 < critic.lr < SLOWEST_CRITIC * policy.lr
    return critic.lr if is_slow and is_comparable and has_own_rate else None


def _has_new_head(config: OnlineConfig) -> bool:
    return config.algorithm.advantage.needs_critic and config.critic.has_new_head(config.reward.source)


def own_loss_updates(config: OnlineConfig, facts: Facts) -> Value | None:
    """Return how many updates on the same completions a loss of the user's is trusted with, if it is many."""
    updates = config.batch.epochs * config.batch.minibatches
    is_trusted = config.algorithm.policy_loss.is_trusted
    return float(updates) if not is_trusted and updates > MOST_OWN_UPDATES else None


UPDATE_RULES = (
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
        reason="Some or all optimizer steps see one completion, so Adam's moments are very noisy.",
        source="Schulman et al. 2017, table 3: 64; Huang et al. 2024 (N+): 512",
        fix="fewer batch.minibatches, or more batch.prompts_per_step",
    ),
    Rule(
        name="uneven-minibatches",
        level="warning",
        runs=ONLINE,
        key="batch.minibatches",
        violation=uneven_minibatches,
        reason="Some minibatches have a row less but move the weights as far, so their rows have more weight.",
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
        fix="remove critic.lr (it is then five times policy.lr), or an algorithm without a critic: "
        "algorithm.preset=rloo",
    ),
    Rule(
        name="critic-slower-than-policy",
        level="warning",
        runs=ONLINE,
        key="critic.lr",
        violation=slow_critic,
        reason="A new value head has to learn the returns before the policy has changed: at less "
        "than half of policy.lr it may come too late.",
        source="Zheng et al. 2023 (Secrets of RLHF): three times the policy's rate",
        fix="remove critic.lr, which is then five times policy.lr",
    ),
    Rule(
        name="lambda-hides-the-score",
        level="warning",
        runs=ONLINE,
        key="algorithm.advantage.gae_lambda",
        violation=hidden_score,
        reason="Until a new value head has learned, a score at the end of T tokens reaches the first token times λ^T, "
        "which at sampling.max_new_tokens is below 0.05.",
        source="Hu et al. 2025 (Open Reasoner Zero): λ = 1; Yuan et al. 2025 (VC-PPO)",
        fix="algorithm.advantage.gae_lambda=1",
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
