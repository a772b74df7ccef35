"""The rules of what an online run samples, and of what scores it: sampler, reward, judge."""

from __future__ import annotations

from rlhf.config.algorithm import ClipLoss, Group
from rlhf.config.reward import EnsembleSource, FunctionSource
from rlhf.config.sections import OnlineConfig
from rlhf.guard.rule import ONLINE, Facts, Rule, Value, is_learned, outside

SHORTEST = 16  # tokens
FEWEST_MEMBERS = 3


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


REWARD_RULES = (
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
