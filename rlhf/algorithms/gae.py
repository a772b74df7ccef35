"""Advantages from a critic: generalized advantage estimation (GAE; Schulman et al. 2016)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from rlhf.algorithms.advantage import Advantage, StepSizes
from rlhf.section import Facts, Fraction, Rule, Usual, Value

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from rlhf.types import Experience, Rollout

FEWEST_TO_WHITEN = 8

Discount = Annotated[
    Fraction,
    Usual(
        low=0.99,
        high=1.0,
        rule="discount",
        reason="The score is at the last token: at 0.95 the first of 100 tokens receives less than 1 % of it.",
        source="Huang et al. 2024 (N+): 1; Ziegler et al. 2019: 1",
        fix="algorithm.advantage.gamma=1",
    ),
]


def not_whitened(advantage: Gae, facts: Facts) -> Value | None:
    """Return false if the advantages are not normalized."""
    return None if advantage.whiten else "false"


class Gae(Advantage):
    """Generalized advantage estimation with a critic (Schulman et al. 2016)."""

    needs_critic: ClassVar[bool] = True
    reads_old_logprobs: ClassVar[bool] = False
    corrects_stale: ClassVar[bool] = True

    type: Literal["gae"] = "gae"
    gamma: Discount = 1.0
    """Discount per token; 1 is usual for text because completions are finite."""
    gae_lambda: Annotated[
        Fraction,
        Usual(
            low=0.9,
            high=1.0,
            rule="gae-lambda",
            reason="A small λ relies on the critic more than on the score, and the critic is poor early in training.",
            source="Schulman et al. 2016, sec. 6: 0.92 to 0.99; Huang et al. 2024 (N+): 0.95; Hu et al. 2025 (Open "
            "Reasoner Zero): 1",
            fix="algorithm.advantage.gae_lambda=1, or 0.95",
        ),
    ] = 1.0
    """Trades bias against variance: 0 gives the TD error, 1 the reward-to-go minus the value. Below 1 a score at the
    end of a long completion reaches its first tokens through the critic alone."""
    turn_lambda: Fraction | None = None
    """With an environment: gae_lambda of the step from the last token of a turn to the first of the next one, as in
    VAGEN (Wang et al. 2025); 1 carries a reward to earlier turns without loss. null: the same as gae_lambda."""
    critic_lambda: Fraction | None = None
    """λ of the critic's targets (decoupled GAE; Yuan et al. 2025, VC-PPO), between turns too: at 1 the critic learns
    the reward-to-go, which its own errors do not bias, while gae_lambda < 1 keeps the variance of the advantages low.
    null: the same as gae_lambda."""
    whiten: bool = True
    """Scale the advantages to mean 0 and variance 1 over all tokens of the step."""
    whiten_over: Literal["step", "minibatch"] = "step"
    """minibatch: whiten over the tokens of each optimizer step instead (Huang et al. 2022, detail 7)."""
    whiten_rewards: bool = False
    """Scale the token rewards to variance 1 over all tokens of the step, keeping their mean."""

    lint_rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            name="advantages-not-normalized",
            level="warning",
            key="whiten",
            violation=not_whitened,
            reason="Without whitening the size of an update depends on the scale of the reward.",
            source="Huang et al. 2022 (37 details), detail 7; Xu et al. 2024, sec. 5",
            fix="algorithm.advantage.whiten=true",
        ),
    )

    def check_rescue(self) -> None:
        """Check that whitening can weigh the completions that were sampled with a hint."""
        if self.whitens_minibatches:
            raise ValueError(
                "algorithm.rescue weighs hinted completions in the statistics of the step: set "
                "algorithm.advantage.whiten_over=step"
            )

    def check_sizes(self, sizes: StepSizes) -> None:
        """Check that there are enough completions to whiten over."""
        if self.whiten and sizes.completions < FEWEST_TO_WHITEN:
            raise ValueError(
                f"whitening over {sizes.completions} completions is noise: raise batch.prompts_per_step x "
                f"sampling.completions_per_prompt to {FEWEST_TO_WHITEN}, or set algorithm.advantage.whiten=false"
            )
        if self.whitens_minibatches and sizes.completions < FEWEST_TO_WHITEN * sizes.minibatches:
            raise ValueError(
                f"whitening over a minibatch of {sizes.completions // sizes.minibatches} completions is noise: use "
                f"{FEWEST_TO_WHITEN} or more in each, or algorithm.advantage.whiten_over=step"
            )

    def compute(
        self, rollout: Rollout, rewards: Float[Tensor, "B T"]
    ) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
        """Compute the advantages and the critic's targets by the recursion of rlhf.algo.advantages.gae."""
        advantages, returns = self._estimate(rollout, rewards)
        return self.whitened(advantages, rollout), returns

    def _estimate(
        self, rollout: Rollout, rewards: Float[Tensor, "B T"]
    ) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
        """Compute the advantages before they are whitened, and the critic's targets."""
        from rlhf.algo.advantages import gae
        from rlhf.algo.masked import whiten

        mask = rollout.action_mask
        if self.whiten_rewards:
            rewards = whiten(rewards, mask, shift_mean=False, weights=rollout.hint_weights)
        estimate = partial(gae, rewards, rollout.values, mask, gamma=self.gamma, final_values=rollout.final_values)
        advantages, returns = estimate(
            gae_lambda=self.gae_lambda, turns=rollout.episode_turns, turn_lambda=self.turn_lambda
        )
        if self.critic_lambda is not None:
            _, returns = estimate(gae_lambda=self.critic_lambda)
        return advantages, returns

    def compute_stale(
        self, rollout: Rollout, rewards: Float[Tensor, "B T"], *, rho_cap: float, trace_cap: float
    ) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
        """Compute advantages and targets by rlhf.algo.advantages.vtrace, from the ratios to the policy that sampled.

        The advantages are not whitened.
        """
        from rlhf.algo.advantages import vtrace
        from rlhf.algo.masked import whiten
        from rlhf.algo.policy_loss import importance_ratio

        mask = rollout.action_mask
        if self.whiten_rewards:
            rewards = whiten(rewards, mask, shift_mean=False)
        ratios = importance_ratio(rollout.logprobs, rollout.sampler_logprobs, mask, "token")
        estimate = partial(
            vtrace, rewards, rollout.values, ratios, mask, gamma=self.gamma, rho_cap=rho_cap, trace_cap=trace_cap
        )
        advantages, returns = estimate(gae_lambda=self.gae_lambda)
        if self.critic_lambda is not None:
            _, returns = estimate(gae_lambda=self.critic_lambda)
        return advantages, returns

    def whitened(self, advantages: Float[Tensor, "B T"], rollout: Rollout) -> Float[Tensor, "B T"]:
        """Whiten over the tokens of the step, if asked."""
        from rlhf.algo.masked import whiten

        if not self.whiten or self.whitens_minibatches:
            return advantages
        return whiten(advantages, rollout.action_mask, weights=rollout.hint_weights)

    @property
    def whitens_minibatches(self) -> bool:
        """Return whether `of_minibatch` whitens."""
        return self.whiten and self.whiten_over == "minibatch"

    def of_minibatch(self, minibatch: Experience) -> Experience:
        """Whiten the advantages over the minibatch's tokens in the loss, if asked, and weight them then."""
        from rlhf.algo.masked import whiten

        if not self.whitens_minibatches:
            return minibatch
        advantages = whiten(minibatch.advantages, minibatch.loss_mask)
        if minibatch.pending_weights is not None:
            advantages = advantages * minibatch.pending_weights
        return replace(minibatch, advantages=advantages)

    def before_whitening(self, experience: Experience) -> Float[Tensor, "B T"]:
        """Return the advantages that whitening has scaled, V-trace's or GAE's; zero outside the mask."""
        import torch

        if not self.whiten or self.whitens_minibatches:
            return experience.advantages
        raw = experience.stale_advantages
        if raw is None and self.critic_lambda is None:
            raw = experience.returns - experience.values
        elif raw is None:  # the targets have another λ
            raw, _ = self._estimate(experience, experience.rewards)
        return torch.where(experience.loss_mask, raw, 0.0)
