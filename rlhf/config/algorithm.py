"""The algorithm section: advantage, policy loss, value loss and KL penalty of an online run, or an offline loss.

Every choice along these axes is a value in the configuration, so an algorithm is a combination of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from rlhf.algorithms.dpo import Dpo
from rlhf.algorithms.offline_loss import OfflineLoss, PairLoss
from rlhf.algorithms.sft import Sft
from rlhf.config.rescue import Rescue
from rlhf.section import Fraction, NonNegative, OneOf, Positive, Section, type_discriminator


@dataclass(frozen=True, kw_only=True)
class StepSizes:
    """The sizes of an online step, from the sections batch and sampling."""

    prompts: int
    group_size: int  # completions per prompt
    epochs: int
    minibatches: int

    @property
    def completions(self) -> int:
        """Return the number of completions of a step."""
        return self.prompts * self.group_size

    @property
    def updates(self) -> int:
        """Return the number of optimizer steps on the same completions."""
        return self.epochs * self.minibatches

    def check_selected(self, per_prompt: int, what: str) -> None:
        """Check that the rows selected for each prompt, `what` in words, are enough to split into minibatches."""
        selected = self.prompts * per_prompt
        if selected < self.minibatches:
            raise ValueError(f"batch.minibatches is {self.minibatches}, but at most {selected} {what} in a step")


class AdvantageSection(Section):
    """What every way to compute advantages has: a check of the sizes that it needs."""

    def check_sizes(self, sizes: StepSizes) -> None:
        """Check that a step of these sizes has the completions that the advantages are computed from."""


class Gae(AdvantageSection):
    """Generalized advantage estimation with a critic (Schulman et al. 2016)."""

    type: Literal["gae"] = "gae"
    gamma: Fraction = 1.0
    """Discount per token; 1 is usual for text because completions are finite."""
    gae_lambda: Fraction = 0.95
    """Trades bias against variance: 0 gives the TD error, 1 the reward-to-go minus the value."""
    whiten: bool = True
    """Scale the advantages to mean 0 and variance 1 over all tokens of the step."""
    whiten_rewards: bool = False
    """Scale the token rewards to variance 1 over all tokens of the step, keeping their mean."""

    def check_sizes(self, sizes: StepSizes) -> None:
        """Check that there are enough completions to whiten over."""
        if self.whiten and sizes.completions < 8:
            raise ValueError(
                f"whitening over {sizes.completions} completions is noise: use 8 or more, or "
                "algorithm.advantage.whiten=false"
            )


class Group(AdvantageSection):
    """A baseline from the other completions of the same prompt; no critic."""

    type: Literal["group"] = "group"
    baseline: Literal["normalized", "centered", "leave_one_out"] = "normalized"
    """normalized: (score - mean) / std (GRPO); centered: score - mean (Dr. GRPO); leave_one_out: RLOO."""

    def check_sizes(self, sizes: StepSizes) -> None:
        """Check that a prompt has other completions to compare with."""
        if sizes.group_size < 2:
            raise ValueError("a group baseline needs sampling.completions_per_prompt >= 2")


class BatchWhiten(AdvantageSection):
    """Reward-to-go, whitened over the batch (REINFORCE++); no critic."""

    type: Literal["batch_whiten"] = "batch_whiten"
    gamma: Fraction = 1.0
    """Discount per token."""
    whiten: bool = True
    """false: plain REINFORCE without a baseline."""


class Greedy(AdvantageSection):
    """Reward-to-go minus the score of the prompt's greedy completion (ReMax, Li et al. 2024); no critic."""

    type: Literal["greedy"] = "greedy"


class Best(AdvantageSection):
    """Advantage 1 for a prompt's best completions, the only ones trained on (RAFT, Dong et al. 2023); no critic."""

    type: Literal["best"] = "best"
    keep: Annotated[int, Field(ge=1)] = 1
    """Completions kept per prompt."""
    min_score: float | None = None
    """Minimum score of a kept completion, after shaping and the KL penalty in the reward; null: none."""

    def check_sizes(self, sizes: StepSizes) -> None:
        """Check that there are completions to choose from, and enough chosen ones to split into minibatches."""
        if self.keep >= sizes.group_size and self.min_score is None:
            raise ValueError(
                f"advantage.keep is {self.keep} of {sizes.group_size} completions, so nothing is chosen: "
                "set sampling.completions_per_prompt higher, or advantage.min_score"
            )
        sizes.check_selected(min(self.keep, sizes.group_size), "completions are kept")


class BestAndWorst(AdvantageSection):
    """A pair from each prompt's completions: the best is chosen, the worst rejected; for the pair loss."""

    type: Literal["best_and_worst"] = "best_and_worst"
    min_gap: NonNegative = 0.0
    """Minimum score difference between best and worst, after shaping; other prompts give no pair."""

    def check_sizes(self, sizes: StepSizes) -> None:
        """Check that every prompt gives a pair, and that there are enough pairs to split into minibatches."""
        if sizes.group_size < 2:
            raise ValueError("a pair of a prompt's completions needs sampling.completions_per_prompt >= 2")
        sizes.check_selected(1, "pairs are made")


class FunctionAdvantage(AdvantageSection):
    """Advantages from a user function (rlhf.algo.functions.AdvantageFunction); no critic."""

    type: Literal["function"] = "function"
    target: str
    """module:function, or path/to/file.py:function."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments passed to the function unchanged."""


Advantage = Annotated[
    Gae | Group | BatchWhiten | Greedy | Best | BestAndWorst | FunctionAdvantage, Field(discriminator="type")
]


class TokenLoss(Section):
    """What every surrogate loss has: a weight for each token, and an entropy bonus."""

    type: str
    aggregate: Literal["token_mean", "sequence_mean", "sequence_sum", "constant"] = "token_mean"
    """Weights of the tokens in the loss (rlhf.algo.policy_loss.token_weights)."""
    entropy_coef: NonNegative = 0.0
    """Weight of the entropy bonus, per nat."""


class ClipLoss(TokenLoss):
    """The clipped surrogate (Schulman et al. 2017, eq. 7)."""

    type: Literal["clip"] = "clip"
    ratio: Literal["token", "sequence", "sequence_mean"] = "token"
    """Importance ratio per token, per sequence, or (sequence_mean) GSPO's length-normalized ratio."""
    clip_eps_low: Fraction = 0.2
    """The ratio is clipped below at 1 - clip_eps_low."""
    clip_eps_high: NonNegative = 0.2
    """The ratio is clipped above at 1 + clip_eps_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """For A < 0 the objective is bounded below by dual_clip * A (Ye et al. 2020, eq. 5); null: off."""


class PenaltyLoss(TokenLoss):
    """The surrogate with an adaptive penalty on KL(old || new) instead of the clip (Schulman et al. 2017, sec. 4)."""

    type: Literal["penalty"] = "penalty"
    ratio: Literal["token", "sequence", "sequence_mean"] = "token"
    """As in the clipped loss."""
    coef: Positive = 1.0
    """Initial coefficient of KL(old || new); it may double or halve after each step."""
    target: Positive = 0.01
    """Target KL(old || new), nats per token; above 1.5 x target the coefficient doubles, below target / 1.5 halves."""


class TrustRegionLoss(TokenLoss):
    """The plain surrogate ratio x advantage, descended by natural gradients within a trust region (NPG and TRPO).

    The policy moves once in each step of the run, along F^-1 g, by a length at which KL(old || new) is max_kl to second
    order; further epochs train the critic alone. F is the Fisher matrix of the next token, averaged over tokens.
    """

    type: Literal["trust_region"] = "trust_region"
    max_kl: Positive = 0.01
    """The trust region: KL(old || new) over the whole vocabulary, in nats per token."""
    line_search: bool = True
    """Shorten the step until the exact KL is at most max_kl and the loss decreases; if no length works, the step is
    rejected (TRPO, Schulman et al. 2015). false: take the full step (NPG, Kakade 2001)."""
    backtracks: Annotated[int, Field(ge=0)] = 10
    """Number of shorter lengths that the line search tries."""
    shrink: Annotated[float, Field(gt=0, lt=1)] = 0.7
    """Factor between two lengths."""
    cg_iterations: Annotated[int, Field(ge=1)] = 10
    """Conjugate-gradient iterations; each costs about two passes with gradient over the minibatch."""
    damping: NonNegative = 0.01
    """Added to the diagonal of F. A larger value moves the direction towards the plain gradient."""
    max_parameters: Annotated[int, Field(ge=1)] = 50_000_000
    """Maximum number of trained parameters; the step needs about 48 bytes per parameter."""


class CispoLoss(TokenLoss):
    """Log-probability weighted by the clipped, detached importance ratio (CISPO, MiniMax 2025, eq. 4 and 5)."""

    type: Literal["cispo"] = "cispo"
    clip_eps_low: Fraction = 1.0
    """The weight is at least 1 - clip_eps_low; 1: no lower bound, as in the paper."""
    clip_eps_high: NonNegative = 4.0
    """The weight is at most 1 + clip_eps_high; the paper gives no value."""


class PolicyGradientLoss(TokenLoss):
    """-advantage x log-probability, without ratio or clipping: one optimizer step per sampled batch."""

    type: Literal["policy_gradient"] = "policy_gradient"


class FunctionLoss(TokenLoss):
    """A policy loss per token from a user function (rlhf.algo.functions.LossFunction)."""

    type: Literal["function"] = "function"
    target: str
    """module:function, or path/to/file.py:function."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments passed to the function unchanged."""


class OnlinePairLoss(Section):
    """A preference loss on pairs sampled from the policy itself and ranked by the reward (Guo et al. 2024)."""

    type: Literal["pair"] = "pair"
    loss: Annotated[PairLoss, OneOf("dpo", only=lambda loss: loss.needs_reference)] = Dpo()
    """A loss with a reference (dpo, robust_dpo, ipo or hinge), with the offline settings; only beta keeps the policy
    near the reference."""


Surrogate = ClipLoss | PenaltyLoss | TrustRegionLoss | CispoLoss | PolicyGradientLoss | FunctionLoss
"""Losses that weight each token by an advantage."""
PolicyLossConfig = Annotated[
    Annotated[ClipLoss, Tag("clip")]
    | Annotated[PenaltyLoss, Tag("penalty")]
    | Annotated[TrustRegionLoss, Tag("trust_region")]
    | Annotated[CispoLoss, Tag("cispo")]
    | Annotated[PolicyGradientLoss, Tag("policy_gradient")]
    | Annotated[FunctionLoss, Tag("function")]
    | Annotated[OnlinePairLoss, Tag("pair")],
    Discriminator(type_discriminator("clip")),
]


class ValueLossConfig(Section):
    """The critic's squared error, clipped around the old values."""

    coef: Positive = 0.1
    """Weight relative to the policy loss on a shared backbone; also scales a separate critic's loss."""
    clip_eps: Positive | None = 0.2
    """Maximum distance from the old value before the gradient is clipped, in score units; null: off."""


class FixedKl(Section):
    """A constant coefficient."""

    type: Literal["fixed"] = "fixed"


class AdaptiveKl(Section):
    """The proportional controller of Ziegler et al. 2019, sec. 2.2."""

    type: Literal["adaptive"] = "adaptive"
    target: Positive = 6.0
    """Target KL to the reference, in nats per sequence (summed over tokens, averaged over completions)."""
    horizon: Positive = 10000.0
    """In completions: the coefficient is multiplied by 1 + error * completions / horizon, error clipped to +-0.2."""


class Kl(Section):
    """The KL penalty that keeps the policy close to the reference."""

    placement: Literal["reward", "loss", "none"] = "reward"
    """reward: subtracted from the token rewards; loss: added to the loss; none: no penalty."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """Schulman's estimators; in the loss only k2 and k3 (the expected gradient of k1 is zero)."""
    coef: NonNegative = 0.05
    """Weight of the penalty, in score units per nat."""
    importance_weighted: bool = False
    """In the loss: weight each token's penalty by pi / pi_old, so that its expected gradient equals the KL's gradient
    on stale minibatches too; false: unweighted, as in the GRPO papers."""
    controller: Annotated[
        Annotated[FixedKl, Tag("fixed")] | Annotated[AdaptiveKl, Tag("adaptive")],
        Discriminator(type_discriminator("fixed")),
    ] = FixedKl()
    """fixed or adaptive."""

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
        if self.placement == "none" and self.controller.type == "adaptive":
            raise ValueError("an adaptive controller needs kl.placement to be reward or loss")
        return self


class Online(Section):
    """An algorithm that samples from the policy it trains."""

    preset: str | None = None
    """The preset that these settings start from."""
    advantage: Advantage
    """The advantage estimator."""
    policy_loss: PolicyLossConfig = ClipLoss()
    """The policy's loss."""
    value_loss: ValueLossConfig | None = None
    """The critic's loss; null: no critic."""
    kl: Kl = Kl(placement="none", coef=0.0)
    """The KL penalty against the reference."""
    target_kl: Positive | None = None
    """End a step's epochs once KL(old || new) exceeds 1.5 x this, in nats per token; null: never."""
    drop_uniform_groups: bool = False
    """Exclude groups whose completions all have the same score (DAPO)."""
    mask_truncated: bool = False
    """Exclude completions cut off by max_new_tokens from the losses of policy and critic (DAPO's overlong filtering).
    They still count in the group's baseline and in the score metrics."""
    refill_rounds: Annotated[int, Field(ge=0)] = 0
    """Rounds of sampling more prompts to replace excluded groups (DAPO); 0: none."""
    rescue: Rescue | None = None
    """Resample prompts whose whole group fails, with hints, and replay them later; null: off."""
    ptx_coef: NonNegative = 0.0
    """Weight of a next-token loss on data.sft, added to the policy loss (PPO-ptx, Ouyang et al. 2022, eq. 2)."""

    @property
    def name(self) -> str:
        """Return the preset's name, or the advantage's type if no preset is named."""
        return self.preset or self.advantage.type

    @model_validator(mode="after")
    def _check_critic_and_groups(self) -> Online:
        if isinstance(self.advantage, Gae) != (self.value_loss is not None):
            raise ValueError("GAE needs algorithm.value_loss, and only GAE does")
        if self.drop_uniform_groups and not isinstance(self.advantage, Group):
            raise ValueError("drop_uniform_groups needs a group advantage")
        if self.refill_rounds and not self.drop_uniform_groups:
            raise ValueError("refill_rounds replaces dropped groups: set drop_uniform_groups=true too")
        if self.rescue is not None and not isinstance(self.advantage, Group):
            raise ValueError(
                "algorithm.rescue mixes completions with and without a hint in one group: it needs "
                "advantage.type=group (grpo, dr_grpo, rloo, dapo, cispo, gspo)"
            )
        return self

    @model_validator(mode="after")
    def _check_pair_loss(self) -> Online:
        if isinstance(self.advantage, BestAndWorst) != isinstance(self.policy_loss, OnlinePairLoss):
            raise ValueError(
                "policy_loss.type=pair learns from the pairs of advantage.type=best_and_worst: set both or neither"
            )
        if isinstance(self.policy_loss, OnlinePairLoss) and self.mask_truncated:
            raise ValueError(
                "mask_truncated leaves out single completions, but a pair loss learns from two at once: "
                "set mask_truncated=false, and reward.shaping.missing_eos_penalty to rank what is cut off lower"
            )
        if isinstance(self.policy_loss, OnlinePairLoss) and self.kl.placement != "none":
            raise ValueError(
                f"a pair loss reads no KL penalty, but kl.placement is {self.kl.placement}: leave algorithm.kl out; "
                "the pull to the reference is policy_loss.loss.beta"
            )
        return self

    @model_validator(mode="after")
    def _check_trust_region(self) -> Online:
        if isinstance(self.policy_loss, TrustRegionLoss) and self.target_kl is not None:
            raise ValueError("a trust region bounds KL(old || new) itself by policy_loss.max_kl: leave target_kl null")
        return self

    @property
    def trains_against_reference(self) -> bool:
        """Return whether a gradient or a reward depends on the reference."""
        penalty = self.kl.placement != "none" and (self.kl.coef > 0 or isinstance(self.kl.controller, AdaptiveKl))
        return penalty or isinstance(self.policy_loss, OnlinePairLoss)

    @property
    def reads_old_log_probs_before_update(self) -> bool:
        """Return whether something depends on them that is not a single pass over all completions of a step."""
        drops_rows = self.drop_uniform_groups or self.mask_truncated or isinstance(self.advantage, Best)
        penalty = self.kl.coef > 0 or isinstance(self.kl.controller, AdaptiveKl)
        in_reward = self.kl.placement == "reward" and penalty
        in_advantage = self.rescue is not None or isinstance(self.advantage, FunctionAdvantage)
        in_search = isinstance(self.policy_loss, OnlinePairLoss | TrustRegionLoss)
        return drops_rows or in_reward or in_advantage or in_search

    def check_sizes(self, sizes: StepSizes) -> None:
        """Check that advantages and losses can work with steps of these sizes."""
        self.advantage.check_sizes(sizes)
        self._check_updates(sizes.updates)
        if isinstance(self.policy_loss, TrustRegionLoss):
            self._check_one_step(sizes)
        if sizes.completions < sizes.minibatches:
            raise ValueError(
                f"batch.minibatches is {sizes.minibatches} but a step has only {sizes.completions} completions"
            )

    def _check_updates(self, updates: int) -> None:
        if isinstance(self.policy_loss, PenaltyLoss) and updates < 2:
            raise ValueError(
                "the penalty is steered by KL(old || new), which is 0 at a step's first update: "
                "set batch.epochs or batch.minibatches to 2 or more"
            )
        needs_fresh = isinstance(self.policy_loss, PolicyGradientLoss) and not isinstance(self.advantage, Best)
        if needs_fresh and updates > 1:
            raise ValueError(
                "the policy_gradient loss has no importance ratio, so a second optimizer step on the same completions "
                "would be wrong: set batch.epochs=1 batch.minibatches=1, or algorithm.policy_loss.type=clip"
            )

    def _check_one_step(self, sizes: StepSizes) -> None:
        if sizes.minibatches > 1:
            raise ValueError(
                "a trust region is one step around the policy that sampled, on all its completions: "
                "set batch.minibatches=1"
            )
        if sizes.epochs > 1 and self.value_loss is None:
            raise ValueError(
                "in a trust region epochs after the first train the critic, and there is none: set batch.epochs=1"
            )


class Offline(Section):
    """An algorithm that learns from a fixed data set."""

    preset: str | None = None
    """The preset that these settings start from."""
    loss: Annotated[OfflineLoss, OneOf("sft")] = Sft()
    """The policy's loss: sft, or a preference loss (dpo, robust_dpo, ipo, hinge, slic, simpo, orpo, kto)."""

    @property
    def name(self) -> str:
        """Return the preset's name, or the loss's type if no preset is named."""
        return self.preset or self.loss.type

    def check_sizes(self, prompts_per_step: int) -> None:
        """Check that the loss can work with this many rows in a step."""
        self.loss.check_sizes(prompts_per_step)


def algorithm_kind(value: object) -> Literal["online", "offline"]:
    """Return the kind of an algorithm: offline if it has a `loss`, the loss over a fixed data set."""
    offline = "loss" in value if isinstance(value, Mapping) else isinstance(value, Offline)
    return "offline" if offline else "online"


Algorithm = Annotated[
    Annotated[Online, Tag("online")] | Annotated[Offline, Tag("offline")], Discriminator(algorithm_kind)
]
"""Online, unless the section sets `loss`, the loss over a fixed data set."""
