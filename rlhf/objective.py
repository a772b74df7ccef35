"""The online objective of a configured algorithm: surrogate, KL penalty, entropy bonus and value loss.

A loss is a sum over tokens divided by a denominator of the whole minibatch: micro-batches and ranks change nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf.algo.kl import Coefs, kl_estimate
from rlhf.algo.masked import Mean
from rlhf.algo.policy_loss import importance_ratio, kl_old_new, loss_weights, token_weights
from rlhf.algorithms.online import Online
from rlhf.algorithms.policy_loss import Surrogate, TokenLoss, Tokens
from rlhf.batching import widen
from rlhf.errors import ConfigError
from rlhf.types import Experience
from rlhf.user_code import check_per_token


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """The outputs of the trained models for a micro-batch."""

    logprobs: Float[Tensor, "B T"]
    entropy: Float[Tensor, "B T"]
    values: Float[Tensor, "B T"]
    teacher: Float[Tensor, "K B T"] | None = None  # the result of the loss's `against_teacher`, if it reads a teacher


class Objective:
    """The token-level online loss: named terms, each a sum over a micro-batch with a denominator of the minibatch."""

    def __init__(self, algorithm: Online, *, max_tokens: int) -> None:
        """Prepare the loss that `algorithm` describes."""
        self.algorithm, self.max_tokens = algorithm, max_tokens

    @property
    def policy_loss(self) -> TokenLoss:
        """Return the policy loss; one over pairs does not use Objective (see rlhf.training.losses)."""
        loss = self.algorithm.policy_loss
        assert isinstance(loss, TokenLoss)
        return loss

    def denominators(self, minibatch: Experience) -> dict[str, float]:
        """Compute each term's denominator from the masks of the whole minibatch; never 0."""
        _, policy = token_weights(minibatch.loss_mask, self.policy_loss.aggregate, max_tokens=self.max_tokens)
        tokens = float(self._value_mask(minibatch).sum().item())
        return {"policy": max(policy, 1.0), "value": max(tokens, 1.0)}

    def loss(
        self, micro: Experience, outputs: Outputs, coefs: Coefs
    ) -> tuple[dict[str, Float[Tensor, ""]], dict[str, Mean]]:
        """Compute the terms of the loss, summed over `micro` (not yet divided), and their metrics."""
        terms, metrics = self.policy_term(micro, outputs.logprobs, outputs.entropy, coefs, outputs.teacher)
        if self.algorithm.value_loss is not None:
            value, value_metrics = self.value_term(micro, outputs.values)
            return terms | value, metrics | value_metrics
        return terms, metrics

    def policy_term(
        self,
        micro: Experience,
        logprobs: Float[Tensor, "B T"],
        entropy: Float[Tensor, "B T"],
        coefs: Coefs,
        teacher: Float[Tensor, "K B T"] | None = None,
    ) -> tuple[dict[str, Float[Tensor, ""]], dict[str, Mean]]:
        """Compute the policy loss with entropy bonus and KL penalty, summed over `micro`, and its metrics."""
        mask = micro.loss_mask
        surrogate, metrics = self._surrogate(micro, logprobs, coefs, teacher)
        metrics["policy/entropy"] = Mean.of(entropy, mask)
        per_token = surrogate.per_token
        if self.policy_loss.needs_entropy:
            per_token = per_token - self.policy_loss.entropy_coef * entropy
        if self.algorithm.kl.placement == "loss":
            live, ref_logprobs = _live(mask, logprobs, micro.ref_logprobs)
            penalty = kl_estimate(live, ref_logprobs, self.algorithm.kl.estimator)
            if micro.hint_weights is not None:
                penalty = micro.hint_weights * penalty
            if self.algorithm.kl.importance_weighted:
                drawn = torch.where(micro.hinted[:, None], micro.logprobs, micro.sampler_logprobs)
                penalty = self._reweighted(penalty, importance_ratio(logprobs, drawn, mask, "token"))
            per_token = per_token + coefs.kl * penalty
            metrics["loss/kl"] = Mean.of(coefs.kl * penalty, mask)
        weights = loss_weights(mask, self.policy_loss.aggregate, max_tokens=self.max_tokens)
        return {"policy": _weighted_sum(per_token, weights, mask)}, metrics

    def value_term(
        self, micro: Experience, values: Float[Tensor, "B T"]
    ) -> tuple[dict[str, Float[Tensor, ""]], dict[str, Mean]]:
        """Compute the clipped value loss, summed over `micro`, and its metrics."""
        config, mask = self.algorithm.value_loss, self._value_mask(micro)
        assert config is not None
        live, old_values, returns = _live(mask, values, micro.values, micro.returns)
        per_token = config.per_token(live, old_values, returns)
        if micro.value_weights is not None:
            per_token = micro.value_weights * per_token
        metrics = {
            "loss/value": Mean.of(per_token, mask),
            "critic/clip_fraction": Mean.of(config.clipped(live, old_values, returns), mask),
        }
        return {"value": config.coef * _weighted_sum(per_token, widen(mask), mask)}, metrics

    def _reweighted(self, penalty: Float[Tensor, "B T"], ratio: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
        """Weight the penalty so that its expected gradient, over tokens of mu, is the gradient of KL(pi || pi_ref).

        With rho = pi / mu, mu the sampler: pi_old, or an older policy, or a server. The mean of k3 is the KL, so its
        weight is differentiated too:  grad E_mu[rho k3] = grad KL.  Of k2 only the mean gradient equals the KL's,
        so its weight is detached:  E_mu[sg(rho) grad k2] = grad KL.
        """
        return penalty * (ratio if self.algorithm.kl.estimator == "k3" else ratio.detach())

    def _value_mask(self, batch: Experience) -> Bool[Tensor, "B T"]:
        """Return the mask of the tokens that the critic learns from: live, and not of a masked truncated completion."""
        if not self.algorithm.leaves_out_cut:
            return batch.action_mask
        return batch.action_mask & batch.whole[:, None]

    def _surrogate(
        self,
        micro: Experience,
        logprobs: Float[Tensor, "B T"],
        coefs: Coefs,
        teacher: Float[Tensor, "K B T"] | None,
    ) -> tuple[Surrogate, dict[str, Mean]]:
        loss, mask = self.policy_loss, micro.loss_mask
        ratio = importance_ratio(logprobs, micro.logprobs, mask, loss.ratio_level)
        old_kl = kl_old_new(logprobs, micro.logprobs, mask)
        live, old = _live(mask, logprobs, micro.logprobs)
        surrogate = checked_surrogate(
            loss,
            Tokens(
                ratio=ratio,
                logprobs=live,
                old_logprobs=old,
                advantages=micro.advantages,
                mask=mask,
                old_kl=old_kl,
                coefs=coefs,
                teacher=teacher,
            ),
        )
        clipped = torch.zeros_like(mask) if surrogate.clipped is None else surrogate.clipped
        metrics = {
            "loss/policy": Mean.of(surrogate.per_token, mask),
            "policy/clip_fraction": Mean.of(clipped, mask),
            "policy/ratio": Mean.of(ratio, mask),
            "kl/old": Mean.of(old_kl, mask),
        }
        if surrogate.outside is not None:
            metrics["policy/outside_clip"] = Mean.of(surrogate.outside, mask)
        return surrogate, {**metrics, **surrogate.metrics}


def checked_surrogate(loss: TokenLoss, tokens: Tokens) -> Surrogate:
    """Compute the loss of every token, and check what the class returned.

    Raises:
        ConfigError: it is no Surrogate with a value for each token and metrics that are means.
    """
    what, result = f"{type(loss).__name__}.per_token", cast(object, loss.per_token(tokens))
    if not isinstance(result, Surrogate):
        kind = type(result).__name__
        raise ConfigError(f"{what} returned a {kind}: it has to return a Surrogate(per_token=a tensor [B, T])")
    for values in (result.per_token, *(flags for flags in (result.clipped, result.outside) if flags is not None)):
        check_per_token(values, tokens.mask, what)
    for name, mean in cast(Mapping[str, object], result.metrics).items():
        if not isinstance(mean, Mean):
            kind = type(mean).__name__
            raise ConfigError(f"{what} returned a {kind} as metric {name!r}: it has to be Mean.of(values, tokens.mask)")
    return result


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
