"""The section of an online algorithm: advantage, policy loss, value loss and KL penalty, and the checks across them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PrivateAttr, model_validator

from rlhf.algorithms.advantage import Advantage, StepSizes
from rlhf.algorithms.curriculum import Curriculum
from rlhf.algorithms.kl import Kl
from rlhf.algorithms.lagrange import Lagrange
from rlhf.algorithms.policy_loss import PolicyLoss
from rlhf.algorithms.ppo import ClipLoss
from rlhf.algorithms.rescue import Rescue
from rlhf.algorithms.value_loss import ValueLoss
from rlhf.section import Needed, NonNegative, OneOf, Positive, Section, Usual


class Online(Section):
    """An algorithm that samples from the policy it trains."""

    preset: str | None = None
    """The preset that these settings start from."""
    advantage: Annotated[Advantage, OneOf(), Needed("set algorithm.preset, e.g. algorithm.preset=grpo")]
    """The advantage estimator."""
    policy_loss: Annotated[PolicyLoss, OneOf("clip")] = ClipLoss()
    """The policy's loss."""
    value_loss: ValueLoss | None = None
    """The critic's loss; null: no critic."""
    kl: Kl = Kl(placement="none", coef=0.0)
    """The KL penalty against the reference."""
    lagrange: Lagrange | None = None
    """A limit on the mean cost of reward.cost, held by a Lagrange multiplier (Safe RLHF); null: none."""
    target_kl: Annotated[
        Positive | None,
        Usual(
            low=0.003,
            high=0.1,
            rule="target-kl",
            reason="In nats per token: below 0.003 each step ends after one or two updates; above 0.1 it acts too "
            "late.",
            source="Spinning Up's PPO: 0.01; Huang et al. 2022 (37 details), early stopping: 0.01",
            fix="algorithm.target_kl=0.02",
        ),
    ] = None
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
    curriculum: Annotated[Curriculum, OneOf("variance")] | None = None
    """Deal prompts by how often they were solved in earlier steps; null: off."""
    ptx_coef: NonNegative = 0.0
    """Weight of a next-token loss on data.sft, added to the policy loss (PPO-ptx, Ouyang et al. 2022, eq. 2)."""
    _drops_cut_episodes: bool = PrivateAttr(default=False)  # environment.truncation=drop; not written to a file

    @property
    def name(self) -> str:
        """Return the preset's name, or the advantage's type if no preset is named."""
        return self.preset or self.advantage.type

    @model_validator(mode="after")
    def _check_critic_and_groups(self) -> Online:
        if self.advantage.needs_critic and self.value_loss is None:
            raise ValueError(f"advantage.type={self.advantage.type} has a critic, which needs algorithm.value_loss")
        if self.value_loss is not None and not self.advantage.needs_critic:
            raise ValueError(
                f"algorithm.value_loss is set, but advantage.type={self.advantage.type} has no critic: leave it null"
            )
        if self.drop_uniform_groups and not self.advantage.is_group:
            raise ValueError("drop_uniform_groups needs a group advantage")
        if self.refill_rounds and not self.drop_uniform_groups:
            raise ValueError("refill_rounds replaces dropped groups: set drop_uniform_groups=true too")
        if self.rescue is not None:
            self.advantage.check_rescue()
        if self.rescue is not None and self.curriculum is not None:
            self.curriculum.check_rescue(self.rescue)
        return self

    @model_validator(mode="after")
    def _check_policy_loss(self) -> Online:
        if self.advantage.makes_pairs != (self.policy_loss.pair_loss is not None):
            raise ValueError(
                "policy_loss.type=pair learns from the pairs of advantage.type=best_and_worst: set both or neither"
            )
        self.policy_loss.check(self)
        if self.lagrange is not None:
            self.lagrange.check(self)
        return self

    @property
    def leaves_out_cut(self) -> bool:
        """Return whether rows that were cut off are in no loss, by mask_truncated or environment.truncation=drop."""
        return self.mask_truncated or self._drops_cut_episodes

    def leaving_out_cut(self) -> Online:
        """Return the algorithm under environment.truncation=drop."""
        changed = self.model_copy()
        changed._drops_cut_episodes = True
        return changed

    @property
    def follows_prompts(self) -> bool:
        """Return whether prompts are dealt, or given hints, by their results in earlier steps."""
        return self.rescue is not None or self.curriculum is not None

    @property
    def solved_above(self) -> float:
        """Return the score above which a completion counts as a success, for rescue and curriculum."""
        if self.rescue is not None:
            return self.rescue.solved_above
        return 0.0 if self.curriculum is None else self.curriculum.solved_above

    @property
    def trains_against_reference(self) -> bool:
        """Return whether a gradient or a reward depends on the reference."""
        return (self.kl.placement != "none" and self.kl.weighs) or self.policy_loss.pair_loss is not None

    @property
    def reads_weights(self) -> bool:
        """Return whether importance weights of the samples, which multiply advantages, are part of the loss."""
        return self.policy_loss.reads_advantages and self.policy_loss.pair_loss is None

    @property
    def samples(self) -> bool:
        """Return True: the policy's own completions are learned from, at the temperature of sampling."""
        return True

    @property
    def reads_teacher(self) -> bool:
        """Return whether the loss or the KL penalty reads a teacher."""
        return self.compares_with_teacher or self.replaces_reference

    @property
    def replaces_reference(self) -> bool:
        """Return whether the teacher takes the place of the reference."""
        return self.kl.to == "teacher"

    @property
    def compares_with_teacher(self) -> bool:
        """Return whether the loss compares whole distributions with the teacher's, in every pass of an update."""
        return self.policy_loss.reads_teacher

    @property
    def reads_old_log_probs_before_update(self) -> bool:
        """Return whether they are read by anything but a single pass over all completions of a step."""
        drops_rows = self.drop_uniform_groups or self.leaves_out_cut
        in_reward = self.kl.placement == "reward" and self.kl.weighs
        in_advantage = self.rescue is not None or self.advantage.reads_old_logprobs
        return drops_rows or in_reward or in_advantage or self.policy_loss.reads_old_logprobs

    def check_sizes(self, sizes: StepSizes) -> None:
        """Check that advantages and losses can work with steps of these sizes."""
        self.advantage.check_sizes(sizes)
        self.policy_loss.check_sizes(sizes, self)
        if sizes.completions < sizes.minibatches:
            raise ValueError(
                f"batch.minibatches is {sizes.minibatches} but a step has only {sizes.completions} completions"
            )
