"""The online objective: surrogate, KL penalty, entropy bonus and value loss, as the algorithm's configuration says.

A loss is a sum over tokens divided by a denominator of the whole minibatch: micro-batches and ranks change nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf.algo.functions import LossFunction
from rlhf.algo.kl import Coefs, kl_estimate
from rlhf.algo.masked import Mean
from rlhf.algo.policy_loss import (
    PolicyLoss,
    cispo_loss,
    clipped_surrogate,
    importance_ratio,
    kl_old_new,
    loss_weights,
    penalized_surrogate,
    policy_gradient_loss,
    token_weights,
    unclipped_surrogate,
)
from rlhf.algo.value_loss import clipped_value_loss, value_clip_mask
from rlhf.batching import widen
from rlhf.config.algorithm import (
    CispoLoss,
    ClipLoss,
    FunctionLoss,
    Online,
    OnlinePairLoss,
    PenaltyLoss,
    PolicyGradientLoss,
    Surrogate,
    TrustRegionLoss,
)
from rlhf.types import Experience


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """What the trained models compute for a micro-batch."""

    logprobs: Float[Tensor, "B T"]
    entropy: Float[Tensor, "B T"]
    values: Float[Tensor, "B T"]


class Objective:
    """The token-level online loss: named terms, each a sum over a micro-batch with a denominator of the minibatch."""

    def __init__(self, algorithm: Online, *, max_tokens: int, function: LossFunction | None = None) -> None:
        """Prepare the loss that `algorithm` describes; `function` computes it where policy_loss.type is function."""
        self.algorithm, self.max_tokens, self.function = algorithm, max_tokens, function

    @property
    def surrogate(self) -> Surrogate:
        """Return the configuration of the policy loss; pair losses do not use Objective (see rlhf.training.losses)."""
        config = self.algorithm.policy_loss
        assert not isinstance(config, OnlinePairLoss)
        return config

    def denominators(self, minibatch: Experience) -> dict[str, float]:
        """Compute each term's denominator from the masks of the whole minibatch; never 0."""
        _, policy = token_weights(minibatch.loss_mask, self.surrogate.aggregate, max_tokens=self.max_tokens)
        tokens = float(self._value_mask(minibatch).sum().item())
        return {"policy": max(policy, 1.0), "value": max(tokens, 1.0)}

    def loss(
        self, micro: Experience, outputs: Outputs, coefs: Coefs
    ) -> tuple[dict[str, Float[Tensor, ""]], dict[str, Mean]]:
        """Compute the terms of the loss, summed over `micro` (not yet divided), and their metrics."""
        terms, metrics = self.policy_term(micro, outputs.logprobs, outputs.entropy, coefs)
        if self.algorithm.value_loss is not None:
            value, value_metrics = self.value_term(micro, outputs.values)
            return terms | value, metrics | value_metrics
        return terms, metrics

    def policy_term(
        self, micro: Experience, logprobs: Float[Tensor, "B T"], entropy: Float[Tensor, "B T"], coefs: Coefs
    ) -> tuple[dict[str, Float[Tensor, ""]], dict[str, Mean]]:
        """Compute the policy loss with entropy bonus and KL penalty, summed over `micro`, and its metrics."""
        mask = micro.loss_mask
        surrogate, metrics = self._surrogate(micro, logprobs, coefs)
        metrics["policy/entropy"] = Mean.of(entropy, mask)
        per_token = surrogate.per_token
        if self.surrogate.entropy_coef > 0:
            per_token = per_token - self.surrogate.entropy_coef * entropy
        if self.algorithm.kl.placement == "loss":
            live, ref_logprobs = _live(mask, logprobs, micro.ref_logprobs)
            penalty = micro.hint_weights * kl_estimate(live, ref_logprobs, self.algorithm.kl.estimator)
            if self.algorithm.kl.importance_weighted:
                penalty = self._reweighted(penalty, importance_ratio(logprobs, micro.logprobs, mask, "token"))
            per_token = per_token + coefs.kl * penalty
            metrics["loss/kl"] = Mean.of(coefs.kl * penalty, mask)
        weights = loss_weights(mask, self.surrogate.aggregate, max_tokens=self.max_tokens)
        return {"policy": _weighted_sum(per_token, weights, mask)}, metrics

    def value_term(
        self, micro: Experience, values: Float[Tensor, "B T"]
    ) -> tuple[dict[str, Float[Tensor, ""]], dict[str, Mean]]:
        """Compute the clipped value loss, summed over `micro`, and its metrics."""
        config, mask = self.algorithm.value_loss, self._value_mask(micro)
        assert config is not None
        live, old_values, returns = _live(mask, values, micro.values, micro.returns)
        per_token = clipped_value_loss(live, old_values, returns, clip_eps=config.clip_eps)
        metrics = {
            "loss/value": Mean.of(per_token, mask),
            "critic/clip_fraction": Mean.of(value_clip_mask(live, old_values, returns, clip_eps=config.clip_eps), mask),
        }
        return {"value": config.coef * _weighted_sum(per_token, widen(mask), mask)}, metrics

    def _reweighted(self, penalty: Float[Tensor, "B T"], ratio: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
        """Weight the penalty of tokens drawn from pi_old, so that its expected gradient is that of KL(pi || pi_ref).

        The mean of k3 is the KL, so its weight is differentiated too:  grad E_old[rho k3] = grad KL.  The mean of k2 is
        not, but the mean of its gradient is the KL's, so its weight is detached:  E_old[sg(rho) grad k2] = grad KL.
        """
        return penalty * (ratio if self.algorithm.kl.estimator == "k3" else ratio.detach())

    def _value_mask(self, batch: Experience) -> Bool[Tensor, "B T"]:
        """Return the mask of the tokens that the critic learns from: live, and not of a masked truncated completion."""
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
            case TrustRegionLoss():
                surrogate = unclipped_surrogate(ratio, micro.advantages)
            case CispoLoss():
                (live,) = _live(mask, logprobs)
                surrogate = cispo_loss(
                    ratio,
                    live,
                    micro.advantages,
                    clip_eps_low=config.clip_eps_low,
                    clip_eps_high=config.clip_eps_high,
                )
            case PolicyGradientLoss():
                surrogate = policy_gradient_loss(torch.where(mask, logprobs, 0.0), micro.advantages)
            case FunctionLoss():
                assert self.function is not None
                live, old = _live(mask, logprobs, micro.logprobs)
                per_token = self.function(logprobs=live, old_logprobs=old, advantages=micro.advantages, mask=mask)
                surrogate = PolicyLoss(per_token=per_token, clipped=torch.zeros_like(mask))
        metrics = {
            "loss/policy": Mean.of(surrogate.per_token, mask),
            "policy/clip_fraction": Mean.of(surrogate.clipped, mask),
            "policy/ratio": Mean.of(ratio, mask),
            "kl/old": Mean.of(old_kl, mask),
        }
        if surrogate.outside is not None:
            metrics["policy/outside_clip"] = Mean.of(surrogate.outside, mask)
        return surrogate, metrics


def _live(mask: Bool[Tensor, "B T"], *tensors: Float[Tensor, "B T"]) -> tuple[Tensor, ...]:
    """Zero the masked entries *before* the arithmetic: masking the result would leave 0 x NaN in its gradient."""
    return tuple(torch.where(mask, tensor, 0.0) for tensor in tensors)


def _weighted_sum(
    per_token: Float[Tensor, "B T"], weights: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> Float[Tensor, ""]:
    return (torch.where(mask, per_token, 0.0) * weights).sum()


def divide_by_denominators(terms: Mapping[str, Tensor], denominators: Mapping[str, float]) -> dict[str, Tensor]:
    """Divide each term's sum by its denominator over the whole minibatch, giving its share of the loss."""
    return {name: total / denominators[name] for name, total in terms.items()}
