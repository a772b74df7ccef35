"""From a rollout to the input of the update: token rewards, advantages and returns, and the rows to train on."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf.algo.advantages import token_rewards, uniform_groups
from rlhf.algo.correction import token_ratios, truncated
from rlhf.algo.kl import Coefs, kl_estimate
from rlhf.algorithms.advantage import Advantage
from rlhf.algorithms.correction import Correction
from rlhf.algorithms.online import Online
from rlhf.batching import extend
from rlhf.errors import ConfigError
from rlhf.types import Experience, Rollout, SampledPairs
from rlhf.user_code import check_per_token


def compute_advantages(
    rollout: Rollout,
    algorithm: Online,
    coefs: Coefs,
    *,
    ratio_cap: float | None = None,
    trace_cap: float | None = None,
    correction: Correction | None = None,
) -> Experience:
    """Compute the rewards, advantages and returns of a whole step, with statistics over all of its rows.

    If `ratio_cap` is given, the completions come from an older policy, and the advantages are weighted by
    their ratios to it, truncated at that cap; if `trace_cap` is given too, V-trace with these two caps corrects
    advantages and returns instead; if `correction` is given, advantages have its weights. Advantages that a
    minibatch whitens stay unweighted, beside their weights. The advantages of rows that were sampled with a hint are
    weighted by algorithm.rescue.
    """
    mask = rollout.action_mask
    penalty = _reward_penalty(rollout, algorithm, coefs)
    turn_rewards = rollout.turn_rewards * rollout.turn_scale if rollout.has_episodes else None
    rewards = token_rewards(rollout.scores, penalty, mask, turn_rewards)
    if rollout.process_rewards is not None:
        rewards = rewards + torch.where(mask, rollout.process_rewards, 0.0)
    if algorithm.rescue is not None:
        hinted = mask & rollout.hinted[:, None]
        weights = algorithm.rescue.weights.weigh(rollout.logprobs, rollout.sampler_logprobs, hinted)
        rollout = replace(rollout, hint_weights=weights)
    stale = None
    if ratio_cap is not None and trace_cap is not None:
        stale, returns = algorithm.advantage.compute_stale(rollout, rewards, rho_cap=ratio_cap, trace_cap=trace_cap)
        advantages = algorithm.advantage.whitened(stale, rollout)
    else:
        advantages, returns = checked_advantages(algorithm.advantage, rollout, rewards)
    pending: Float[Tensor, "B T"] | None = None
    if ratio_cap is not None and trace_cap is None:
        pending = truncated(token_ratios(rollout.logprobs, rollout.sampler_logprobs, mask), ratio_cap)
    if correction is not None:
        pending = correction.weigh(rollout.logprobs, rollout.sampler_logprobs, mask)
    if pending is not None and not algorithm.advantage.whitens_minibatches:
        advantages, pending = advantages * pending, None
    if rollout.hint_weights is not None:
        advantages = advantages * rollout.hint_weights
    loss_mask = mask & _trainable_rows(rollout, advantages, algorithm)[:, None]
    return extend(
        Experience,
        rollout,
        loss_mask=loss_mask,
        rewards=rewards,
        advantages=torch.where(loss_mask, advantages, 0.0),
        returns=returns,
        value_weights=_value_weights(rollout, algorithm),
        stale_advantages=stale,
        pending_weights=pending,
    )


def checked_advantages(
    advantage: Advantage, rollout: Rollout, rewards: Float[Tensor, "B T"]
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Compute advantages and returns, and check what the class returned.

    Raises:
        ConfigError: it is no pair of tensors with a value for each token.
    """
    what, result = f"{type(advantage).__name__}.compute", cast(object, advantage.compute(rollout, rewards))
    if not isinstance(result, tuple | list) or len(result) != 2:
        kind = type(result).__name__
        raise ConfigError(f"{what} returned a {kind}: it has to return (advantages, returns), two tensors [B, T]")
    return check_per_token(result[0], rewards, what), check_per_token(result[1], rewards, what)


def select_training_rows(experience: Experience, algorithm: Online) -> Experience | SampledPairs:
    """Select the input of the update: the rows with a token in the loss, or pairs of rows.

    A row of a dropped group, or one that was cut off and masked, adds nothing to any sum or denominator: it takes no
    forward pass, and minibatches are drawn from the others. A critic learns from every row. There may be no pairs and
    no kept rows; if a group algorithm has dropped everything, all rows are returned, and have a gradient of zero.
    """
    is_in_no_loss = algorithm.value_loss is None and (algorithm.drop_uniform_groups or algorithm.leaves_out_cut)
    return algorithm.advantage.select(experience, drops_rows=is_in_no_loss)


def _trainable_rows(rollout: Rollout, advantages: Float[Tensor, "B T"], algorithm: Online) -> Bool[Tensor, " B"]:
    """Flag the rows that enter the loss."""
    eligible = rollout.whole if algorithm.leaves_out_cut else torch.ones_like(rollout.finished)
    if algorithm.advantage.chooses_rows:
        return eligible & (advantages != 0).any(dim=1)
    if algorithm.drop_uniform_groups:
        return eligible & ~uniform_groups(rollout.scores, rollout.group_size)
    return eligible


def _value_weights(rollout: Rollout, algorithm: Online) -> Float[Tensor, "B T"] | None:
    """Return the weights of hinted rows in the critic's loss; None without a critic or a hinted row."""
    if algorithm.rescue is None or algorithm.value_loss is None or not bool(rollout.hinted.any()):
        return None
    hinted = rollout.action_mask & rollout.hinted[:, None]
    return algorithm.rescue.weights.weigh_values(rollout.logprobs, rollout.sampler_logprobs, hinted)


def _reward_penalty(rollout: Rollout, algorithm: Online, coefs: Coefs) -> Float[Tensor, "B T"]:
    if algorithm.kl.placement != "reward":
        return torch.zeros_like(rollout.logprobs)
    return coefs.kl * kl_estimate(rollout.logprobs, rollout.ref_logprobs, algorithm.kl.estimator)
