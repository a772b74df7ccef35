"""The rules of an online update: clip, epochs, advantages, minibatches, critic."""

from __future__ import annotations

from rlhf.config.algorithm import (
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
from rlhf.config.sections import OnlineConfig
from rlhf.guard.rule import ONLINE, Facts, Rule, Value, outside

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
        reason="With no room on either side every ratio but 1 is clipped: after the first update nothing is learned.",
        source="Schulman et al. 2017, eq. 7",
        fix="algorithm.policy_loss.clip_eps_low=0.2 algorithm.policy_loss.clip_eps_high=0.2",
    ),
    Rule(
        name="clip-range",
        level="warning",
        runs=ONLINE,
        key="algorithm.policy_loss.clip_eps_low, clip_eps_high",
        violation=clip_range,
        reason="PPO was shown with 0.1 to 0.3, clip-higher with 0.28, and GSPO's ratio per sequence with 3e-4.",
        source="Schulman et al. 2017, table 1; Yu et al. 2025 (DAPO), sec. 3.1; Zheng et al. 2025 (GSPO), sec. 5.1",
        fix="0.2; with policy_loss.ratio=sequence_mean 3e-4 and 4e-4",
    ),
    Rule(
        name="dual-clip",
        level="warning",
        runs=ONLINE,
        key="algorithm.policy_loss.dual_clip",
        violation=dual_clip,
        reason="Near 1 it cuts off nearly every negative advantage, and far above it never binds.",
        source="Ye et al. 2020, eq. 5: 3",
        fix="algorithm.policy_loss.dual_clip=3, or null",
    ),
    Rule(
        name="entropy-bonus",
        level="warning",
        runs=ONLINE,
        key="algorithm.policy_loss.entropy_coef",
        violation=entropy_bonus,
        reason="Over a vocabulary of thousands a bonus above 0.05 per nat pays for noise before it pays for text.",
        source="Huang et al. 2022 (37 details), detail 10: 0.01; Huang et al. 2024 (N+): 0",
        fix="algorithm.policy_loss.entropy_coef=0.01, or 0",
    ),
    Rule(
        name="epochs-many-for-text",
        level="warning",
        runs=ONLINE,
        key="batch.epochs",
        violation=epochs_of_text,
        reason="On text 1 to 4 passes over the same completions are reported; PPO's 3 to 30 are of control tasks.",
        source="Huang et al. 2024 (N+): 4; Ziegler et al. 2019: 4; Schulman et al. 2017, tables 3 to 5",
        fix="batch.epochs=4 or less, or algorithm.target_kl=0.02, which ends a step's epochs early",
    ),
    Rule(
        name="epochs-beyond-ppo",
        level="warning",
        runs=ONLINE,
        key="batch.epochs",
        violation=epochs_beyond_ppo,
        reason="No reported PPO takes more than 30 passes over a sample: by then most of it is clipped or overfit.",
        source="Schulman et al. 2017, tables 3 to 5: 3 to 15",
        fix="batch.epochs=4",
    ),
    Rule(
        name="target-kl",
        level="warning",
        runs=ONLINE,
        key="algorithm.target_kl",
        violation=target_kl,
        reason="In nats per token: below 0.003 every step ends after an update or two, above 0.1 it binds too late.",
        source="Spinning Up's PPO: 0.01; Huang et al. 2022 (37 details), early stopping: 0.01",
        fix="algorithm.target_kl=0.02",
    ),
    Rule(
        name="advantages-not-normalized",
        level="warning",
        runs=ONLINE,
        key="algorithm.advantage.whiten",
        violation=not_whitened,
        reason="Without it the size of an update follows the scale of the reward.",
        source="Huang et al. 2022 (37 details), detail 7; Xu et al. 2024, sec. 5",
        fix="algorithm.advantage.whiten=true",
    ),
    Rule(
        name="discount",
        level="warning",
        runs=ONLINE,
        key="algorithm.advantage.gamma",
        violation=discount,
        reason="The score comes with the last token: at 0.95 the first of 100 tokens sees less than a hundredth of it.",
        source="Huang et al. 2024 (N+): 1; Ziegler et al. 2019: 1",
        fix="algorithm.advantage.gamma=1",
    ),
    Rule(
        name="gae-lambda",
        level="warning",
        runs=ONLINE,
        key="algorithm.advantage.gae_lambda",
        violation=gae_lambda,
        reason="A small λ trusts the critic, which knows least at the beginning, over the score.",
        source="Schulman et al. 2016, sec. 6: 0.92 to 0.99; Huang et al. 2024 (N+): 0.95",
        fix="algorithm.advantage.gae_lambda=0.95, or 1",
    ),
    Rule(
        name="small-group",
        level="warning",
        runs=ONLINE,
        key="sampling.completions_per_prompt",
        violation=small_group,
        reason="Of 2 or 3 scores the normalized advantages say hardly more than which is larger.",
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
        reason="Each optimizer step sees one row, so Adam's moments are those of single completions.",
        source="Schulman et al. 2017, table 3: 64; Huang et al. 2024 (N+): 512",
        fix="fewer batch.minibatches, or more batch.prompts_per_step",
    ),
    Rule(
        name="uneven-minibatches",
        level="warning",
        runs=ONLINE,
        key="batch.minibatches",
        violation=uneven_minibatches,
        reason="The last minibatch is smaller than the others and moves the weights as far, so its rows weigh more.",
        source="implementation detail: the loss of a minibatch is divided by its own rows",
        fix="a batch.minibatches that divides the completions of a step",
    ),
    Rule(
        name="critic-frozen",
        level="error",
        runs=ONLINE,
        key="critic.lr",
        violation=critic_frozen,
        reason="GAE subtracts the values of a critic that never learns what the policy's returns are.",
        source="Schulman et al. 2016, sec. 3",
        fix="critic.lr=5e-6, or an algorithm without a critic: algorithm.preset=rloo",
    ),
    Rule(
        name="critic-warmup-covers-the-run",
        level="error",
        runs=ONLINE,
        key="critic.warmup_steps",
        violation=critic_warmup,
        reason="The policy stands still in the critic's warm-up, and the run ends before the warm-up does.",
        source="implementation detail: critic.warmup_steps trains the critic alone",
        fix="critic.warmup_steps below schedule.steps",
    ),
    Rule(
        name="value-loss-weight",
        level="warning",
        runs=ONLINE,
        key="algorithm.value_loss.coef",
        violation=value_weight,
        reason="On a shared backbone the losses compete: too much drowns the policy, too little leaves no critic.",
        source="Huang et al. 2024 (N+): 0.1; Huang et al. 2022 (37 details): 0.5",
        fix="algorithm.value_loss.coef=0.1",
    ),
    Rule(
        name="own-loss-many-updates",
        level="warning",
        runs=ONLINE,
        key="batch.epochs x batch.minibatches",
        violation=own_loss_updates,
        reason="Nobody has shown that a loss of your own holds the policy near its samples for so many updates.",
        source="Huang et al. 2024 (N+): 4 updates on the same completions",
        fix="fewer batch.epochs, or algorithm.target_kl=0.02",
    ),
)
