"""Learning a prompt from completions that were sampled with a hint in it: which groups need it, and the weights.

A group whose completions all fail has advantages of zero. Sampled once more with a hint h, the same prompt x may give
a success y ~ pi_old(. | x, h). What is to be learned is pi(. | x), without the hint, so y is off-policy there, and the
weights correct for that. Nath et al. 2025 (Guide, arXiv:2506.13923) do this for groups that fail; Yan et al. 2025
(LUFFY, arXiv:2504.14945) mix completions of a teacher into groups.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf.algo.policy_loss import LARGEST_LOG_RATIO, truncated_importance
from rlhf.batching import widen
from rlhf.config.rescue import HintWeights, SequenceWeights, ShapedWeights, TokenWeights


def failed_groups(scores: Float[Tensor, " B"], group_size: int, *, solved_above: float) -> Bool[Tensor, " N"]:
    """Flag the groups in which no score is above `solved_above`."""
    return (scores.view(-1, group_size) <= solved_above).all(dim=1)


def sequence_importance(
    logprobs: Float[Tensor, "B T"],
    sampler_logprobs: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    cap: float,
) -> Float[Tensor, "B T"]:
    """Compute the truncated importance weight of every completion, at each of its live tokens; 1 outside the mask.

        w(y) = min(pi_old(y | x) / pi_old(y | x, h), cap)

    Without the cap it is exact: E_{y | x, h}[w f(y)] = E_{y | x}[f(y)] for any f. So the expected gradient is the one
    that plain sampling has, and as small: w is about as small as a success without the hint is rare. Truncated
    importance sampling is Ionides 2008. The ratio is computed in the widest type, from a sum over tokens.
    """
    total = widen(torch.where(mask, logprobs - sampler_logprobs, 0.0)).sum(dim=1, keepdim=True)
    weights = total.clamp(max=LARGEST_LOG_RATIO).exp().clamp(max=cap).to(logprobs.dtype)
    return torch.where(mask, weights, 1.0)


def shaped_importance(
    logprobs: Float[Tensor, "B T"],
    sampler_logprobs: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    gamma: float,
) -> Float[Tensor, "B T"]:
    """Compute the weight of every token that LUFFY's policy shaping gives its gradient; 1 outside the mask.

        r_t = pi_old(y_t | x, y_<t) / pi_old(y_t | x, h, y_<t),   f(r) = r / (r + gamma)
        w_t = r_t f'(r_t) = gamma r_t / (r_t + gamma)^2

    The objective f(r) A of Yan et al. 2025 (gamma 0.1) has the gradient f'(r) r A grad log pi; w is its factor at the
    policy that sampled. It is 1/4 where r = gamma and falls on both sides: a token that the plain prompt makes unlikely
    weighs more than by its ratio (w / r -> 1 / gamma), one that it makes likely already weighs less. The paper sets the
    denominator to 1, having no probabilities of its teacher; here it is known.
    """
    ratio = torch.where(mask, logprobs - sampler_logprobs, 0.0).clamp(max=LARGEST_LOG_RATIO).exp()
    return torch.where(mask, gamma * ratio / (ratio + gamma) ** 2, 1.0)


def hint_weights(
    logprobs: Float[Tensor, "B T"],
    sampler_logprobs: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    hinted: Bool[Tensor, " B"],
    config: HintWeights,
) -> Float[Tensor, "B T"]:
    """Compute the weights of the tokens sampled with a hint, as `config` says; 1 for all others.

    Token weights are policy_loss.truncated_importance: each corrects the choice of its own token, given those before
    it, which stay the hinted ones; that is their bias.
    """
    live = mask & hinted[:, None]
    match config:
        case TokenWeights():
            return truncated_importance(logprobs, sampler_logprobs, live, cap=config.cap)
        case SequenceWeights():
            return sequence_importance(logprobs, sampler_logprobs, live, cap=config.cap)
        case ShapedWeights():
            return shaped_importance(logprobs, sampler_logprobs, live, gamma=config.gamma)


def effective_sample_share(weights: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> float:
    """Compute the effective sample size of the live weights as a share of their number (Kish 1965); 0 if none is live.

    (sum w)^2 / (n sum w^2):  1 where all are equal, 1 / n where one has it all
    """
    live = widen(weights[mask])
    squares = float((live**2).sum())
    return float(live.sum()) ** 2 / (len(live) * squares) if squares > 0 else 0.0
