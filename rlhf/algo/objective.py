"""The table of algorithms: configuration -> functions. The only dispatch on an algorithm's parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf.algo.advantages import (
    gae,
    group_centered,
    group_normalized,
    leave_one_out,
    less_baseline,
    rewards_to_go,
    token_rewards,
    uniform_groups,
)
from rlhf.algo.kl import kl_estimate
from rlhf.algo.policy_loss import (
    PolicyLoss,
    clipped_surrogate,
    importance_ratio,
    kl_old_new,
    log_likelihood,
    penalized_surrogate,
    token_weights,
    truncated_importance,
    weighted_log_likelihood,
)
from rlhf.algo.selection import kept, pair_signs, pairs_of
from rlhf.algo.value_loss import clipped_value_loss, value_clipped
from rlhf.config.algorithm import (
    BatchWhiten,
    Best,
    BestAndWorst,
    CispoLoss,
    ClipLoss,
    Gae,
    Greedy,
    Group,
    Online,
    OnlinePairLoss,
    PenaltyLoss,
    PolicyGradientLoss,
    Surrogate,
)
from rlhf.masked import Mean, whiten
from rlhf.types import Experience, Rollout, SampledPairs, extend


@dataclass(frozen=True, kw_only=True)
class Coefs:
    """The coefficients that controllers move between steps."""

    kl: float  # units of score per nat to the reference
    penalty: float  # weight of KL(old || new), for the penalized surrogate


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """What the trained models say of a micro-batch."""

    logprobs: Float[Tensor, "B T"]
    entropy: Float[Tensor, "B T"]
    values: Float[Tensor, "B T"]


def credit(rollout: Rollout, algorithm: Online, coefs: Coefs, *, ratio_cap: float | None = None) -> Experience:
    """Rewards, advantages and returns of a whole step, statistics over all of its rows.

    `ratio_cap`: the completions are of an older policy; advantages are weighted by policy_loss.truncated_importance.
    """
    mask = rollout.completion_mask
    rewards = token_rewards(rollout.scores, _reward_penalty(rollout, algorithm, coefs), mask)
    advantages, returns = _advantages(rollout, rewards, algorithm)
    if ratio_cap is not None:
        advantages = advantages * truncated_importance(rollout.logprobs, rollout.sampler_logprobs, mask, cap=ratio_cap)
    loss_mask = mask & _learned_from(rollout, advantages, algorithm)[:, None]
    return extend(
        Experience,
        rollout,
        loss_mask=loss_mask,
        rewards=rewards,
        advantages=torch.where(loss_mask, advantages, 0.0),
        returns=returns,
    )


def lesson(experience: Experience, algorithm: Online) -> Experience | SampledPairs:
    """What the update reads of a step: every row, the kept rows alone, or pairs of them. It may be empty."""
    match algorithm.advantage:
        case BestAndWorst():
            return pairs_of(experience)
        case Best():
            return experience.rows(experience.loss_mask.any(dim=1).nonzero().flatten())
        case _:
            return experience


def _learned_from(rollout: Rollout, advantages: Float[Tensor, "B T"], algorithm: Online) -> Bool[Tensor, " B"]:
    """The rows that the loss is taken over."""
    whole = rollout.finished if algorithm.mask_truncated else torch.ones_like(rollout.finished)
    if isinstance(algorithm.advantage, Best | BestAndWorst):
        return whole & (advantages != 0).any(dim=1)
    if algorithm.drop_uniform_groups:
        return whole & ~uniform_groups(rollout.scores, rollout.group_size)
    return whole


def _reward_penalty(rollout: Rollout, algorithm: Online, coefs: Coefs) -> Float[Tensor, "B T"]:
    if algorithm.kl.placement != "reward":
        return torch.zeros_like(rollout.logprobs)
    return coefs.kl * kl_estimate(rollout.logprobs, rollout.ref_logprobs, algorithm.kl.estimator)


def _advantages(
    rollout: Rollout, rewards: Float[Tensor, "B T"], algorithm: Online
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    mask = rollout.completion_mask
    match algorithm.advantage:
        case Gae() as how:
            if how.whiten_rewards:
                rewards = whiten(rewards, mask, shift_mean=False)
            advantages, returns = gae(rewards, rollout.values, mask, gamma=how.gamma, gae_lambda=how.gae_lambda)
            return (whiten(advantages, mask) if how.whiten else advantages), returns
        case BatchWhiten() as how:
            returns = rewards_to_go(rewards, mask, gamma=how.gamma)
            return (whiten(returns, mask) if how.whiten else returns), returns
        case Greedy():
            returns = rewards_to_go(rewards, mask, gamma=1.0)
            return less_baseline(rewards, rollout.baselines, mask), returns
        case Group() as how:
            return _per_row(_group_advantage(rewards.sum(dim=1), rollout.group_size, how), rewards, mask)
        case Best() as how:
            chosen = kept(rewards.sum(dim=1), rollout.group_size, keep=how.keep, min_score=how.min_score)
            return _per_row(chosen.to(rewards.dtype), rewards, mask)
        case BestAndWorst():
            return _per_row(pair_signs(rollout.scores, rollout.group_size), rewards, mask)


def _per_row(
    advantages: Float[Tensor, " B"], rewards: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """One advantage for all live tokens of a row, and the rewards-to-go."""
    return torch.where(mask, advantages[:, None], 0.0), rewards_to_go(rewards, mask, gamma=1.0)


def _group_advantage(totals: Float[Tensor, " B"], group_size: int, how: Group) -> Float[Tensor, " B"]:
    match how.baseline:
        case "normalized":
            return group_normalized(totals, group_size)
        case "centered":
            return group_centered(totals, group_size)
        case "leave_one_out":
            return leave_one_out(totals, group_size)


class Objective:
    """The online loss of tokens: named terms, each a sum over a micro-batch and a norm over the minibatch."""

    def __init__(self, algorithm: Online, *, max_tokens: int) -> None:
        self.algorithm = algorithm
        self.max_tokens = max_tokens

    @property
    def surrogate(self) -> Surrogate:
        """How tokens are learned from; a pair loss has no Objective but its own (rlhf.trainers.losses)."""
        config = self.algorithm.policy_loss
        assert not isinstance(config, OnlinePairLoss)
        return config

    def norms(self, minibatch: Experience) -> dict[str, float]:
        """What each term's sum is divided by, from the whole minibatch's masks; never 0."""
        _, policy = token_weights(minibatch.loss_mask, self.surrogate.aggregate, max_tokens=self.max_tokens)
        tokens = float(self._value_mask(minibatch).sum().item())
        return {"policy": max(policy, 1.0), "value": max(tokens, 1.0)}

    def loss(
        self, micro: Experience, outputs: Outputs, coefs: Coefs
    ) -> tuple[dict[str, Float[Tensor, ""]], dict[str, Mean]]:
        """The terms of the loss, summed over `micro` (not yet divided), and what was observed."""
        terms, observed = self.policy_term(micro, outputs.logprobs, outputs.entropy, coefs)
        if self.algorithm.value_loss is not None:
            value, of_value = self.value_term(micro, outputs.values)
            return terms | value, observed | of_value
        return terms, observed

    def policy_term(
        self, micro: Experience, logprobs: Float[Tensor, "B T"], entropy: Float[Tensor, "B T"], coefs: Coefs
    ) -> tuple[dict[str, Float[Tensor, ""]], dict[str, Mean]]:
        """The policy's, with entropy bonus and penalty."""
        mask = micro.loss_mask
        surrogate, observed = self._surrogate(micro, logprobs, coefs)
        observed["policy/entropy"] = Mean.of(entropy, mask)
        per_token = surrogate.per_token
        if self.surrogate.entropy_coef > 0:
            per_token = per_token - self.surrogate.entropy_coef * entropy
        if self.algorithm.kl.placement == "loss":
            live, ref_logprobs = _live(mask, logprobs, micro.ref_logprobs)
            penalty = kl_estimate(live, ref_logprobs, self.algorithm.kl.estimator)
            if self.algorithm.kl.importance_weighted:
                penalty = self._reweighted(penalty, importance_ratio(logprobs, micro.logprobs, mask, "token"))
            per_token = per_token + coefs.kl * penalty
            observed["loss/kl"] = Mean.of(coefs.kl * penalty, mask)
        weights, _ = token_weights(mask, self.surrogate.aggregate, max_tokens=self.max_tokens)
        return {"policy": _weighted_sum(per_token, weights, mask)}, observed

    def value_term(
        self, micro: Experience, values: Float[Tensor, "B T"]
    ) -> tuple[dict[str, Float[Tensor, ""]], dict[str, Mean]]:
        """The critic's."""
        config, mask = self.algorithm.value_loss, self._value_mask(micro)
        assert config is not None
        live, old_values, returns = _live(mask, values, micro.values, micro.returns)
        per_token = clipped_value_loss(live, old_values, returns, clip_eps=config.clip_eps)
        observed = {
            "loss/value": Mean.of(per_token, mask),
            "critic/clip_fraction": Mean.of(value_clipped(live, old_values, returns, clip_eps=config.clip_eps), mask),
        }
        return {"value": config.coef * _weighted_sum(per_token, mask.double(), mask)}, observed

    def _reweighted(self, penalty: Float[Tensor, "B T"], ratio: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
        """Weigh the penalty of tokens that pi_old drew, so that its expected gradient is that of KL(pi || pi_ref).

        k3's mean is the KL, so the weight is part of what is differentiated:  grad E_old[rho k3] = grad KL.  k2's mean
        is not, but its gradient's mean is:  E_old[sg(rho) grad k2] = grad KL.
        """
        return penalty * (ratio if self.algorithm.kl.estimator == "k3" else ratio.detach())

    def _value_mask(self, batch: Experience) -> Bool[Tensor, "B T"]:
        """Return the tokens the critic learns from: all live ones, less those of completions left out as cut off."""
        if not self.algorithm.mask_truncated:
            return batch.completion_mask
        return batch.completion_mask & batch.finished[:, None]

    def _surrogate(
        self, micro: Experience, logprobs: Float[Tensor, "B T"], coefs: Coefs
    ) -> tuple[PolicyLoss, dict[str, Mean]]:
        config, mask = self.surrogate, micro.loss_mask
        level = config.ratio if isinstance(config, ClipLoss | PenaltyLoss) else "token"
        ratio = importance_ratio(logprobs, micro.logprobs, mask, level)
        old_kl = kl_old_new(logprobs, micro.logprobs, mask)
        match config:
            case ClipLoss():
                surrogate = clipped_surrogate(
                    ratio,
                    micro.advantages,
                    clip_eps_low=config.clip_eps_low,
                    clip_eps_high=config.clip_eps_high,
                    dual_clip=config.dual_clip,
                )
            case PenaltyLoss():
                surrogate = penalized_surrogate(ratio, micro.advantages, old_kl, coef=coefs.penalty)
            case CispoLoss():
                (live,) = _live(mask, logprobs)
                surrogate = weighted_log_likelihood(
                    ratio,
                    live,
                    micro.advantages,
                    clip_eps_low=config.clip_eps_low,
                    clip_eps_high=config.clip_eps_high,
                )
            case PolicyGradientLoss():
                (live,) = _live(mask, logprobs)
                surrogate = log_likelihood(live, micro.advantages)
        observed = {
            "loss/policy": Mean.of(surrogate.per_token, mask),
            "policy/clip_fraction": Mean.of(surrogate.clipped, mask),
            "policy/ratio": Mean.of(ratio, mask),
            "kl/old": Mean.of(old_kl, mask),
        }
        return surrogate, observed


def _live(mask: Bool[Tensor, "B T"], *tensors: Float[Tensor, "B T"]) -> tuple[Tensor, ...]:
    """Zero where hidden, *before* the arithmetic: masking a result leaves 0 x NaN in its gradient."""
    return tuple(torch.where(mask, tensor, 0.0) for tensor in tensors)


def _weighted_sum(
    per_token: Float[Tensor, "B T"], weights: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> Float[Tensor, ""]:
    return (torch.where(mask, per_token, 0.0) * weights).sum()


def scaled(terms: Mapping[str, Tensor], norms: Mapping[str, float]) -> dict[str, Tensor]:
    """Divide each term's sum by the norm of the whole minibatch: its share of the loss."""
    return {name: total / norms[name] for name, total in terms.items()}
