"""Learning from some of the completions: the best, the best against the worst, or those sampled with a hint.

A group whose completions all fail has advantages of zero. Sampled once more with a hint h, the same prompt x may give
a success y ~ pi_old(. | x, h). The policy has to learn pi(. | x), without the hint, so y is off-policy there, and the
weights correct for that. Nath et al. 2025 (Guide, arXiv:2506.13923) do this for groups that fail; Yan et al. 2025
(LUFFY, arXiv:2504.14945) mix completions of a teacher into groups.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf.algo.policy_loss import LARGEST_LOG_RATIO
from rlhf.batching import widen
from rlhf.types import Experience, SampledPairs


def select_best(
    totals: Float[Tensor, " B"], group_size: int, *, keep: int, min_score: float | None = None
) -> Bool[Tensor, " B"]:
    """Flag the `keep` best of each group, except those below `min_score` (RAFT, Dong et al. 2023, alg. 1: keep = 1).

    Of equal totals the first are kept: the completions of a prompt are drawn independently, so their order is chance.
    """
    groups = totals.view(-1, group_size)
    order = groups.argsort(dim=1, descending=True, stable=True)
    chosen = torch.zeros_like(groups, dtype=torch.bool).scatter(1, order[:, :keep], True)
    return (chosen if min_score is None else chosen & (groups >= min_score)).flatten()


def best_and_worst(
    scores: Float[Tensor, " B"], group_size: int, *, min_gap: float = 0.0
) -> tuple[Int[Tensor, " N"], Int[Tensor, " N"]]:
    """Return the rows of the best and of the worst completion of each group; of equal scores the first.

    A group has a pair if best > worst and best - worst >= `min_gap`, so N is at most the number of groups (Guo et
    al. 2024 rank two completions; G > 2 makes the gap wider).
    """
    groups = scores.view(-1, group_size)
    best, worst = groups.argmax(dim=1, keepdim=True), groups.argmin(dim=1, keepdim=True)
    gap = (groups.gather(1, best) - groups.gather(1, worst)).flatten()
    differs = (gap > 0) & (gap >= min_gap)
    first = torch.arange(0, len(scores), group_size, device=scores.device)
    return (first + best.flatten())[differs], (first + worst.flatten())[differs]


def pair_signs(scores: Float[Tensor, " B"], group_size: int, *, min_gap: float = 0.0) -> Float[Tensor, " B"]:
    """Return +1 for the best of each group, -1 for the worst, and 0 for the others and in groups without a pair."""
    best, worst = best_and_worst(scores, group_size, min_gap=min_gap)
    return torch.zeros_like(scores).index_fill(0, best, 1.0).index_fill(0, worst, -1.0)


def best_worst_pairs(experience: Experience, *, min_gap: float = 0.0) -> SampledPairs:
    """Pair the best with the worst completion of each prompt for the pair losses, leaving out ties and narrow gaps.

    The reference log-probabilities come from the rollout, summed over tokens in float64.
    """
    best, worst = best_and_worst(experience.scores, experience.group_size, min_gap=min_gap)
    chosen, rejected = experience.rows(best), experience.rows(worst)
    sides: dict[str, Any] = {}
    for side, rows in (("chosen", chosen), ("rejected", rejected)):
        sides[f"{side}_ids"], sides[f"{side}_mask"] = rows.completion_ids, rows.completion_mask
        sides[f"{side}_learned"] = rows.action_mask
        sides[f"{side}_ref_logprobs"] = rows.ref_logprobs.double().sum(dim=1)
        sides[f"{side}_old_logprobs"] = rows.logprobs
    return SampledPairs(
        prompt_ids=chosen.prompt_ids, prompt_mask=chosen.prompt_mask, margins=chosen.scores - rejected.scores, **sides
    )


def failed_groups(scores: Float[Tensor, " B"], group_size: int, *, solved_above: float) -> Bool[Tensor, " N"]:
    """Flag the groups that have a score, and none above `solved_above`; a NaN is no score."""
    return success_shares(scores, group_size, solved_above=solved_above) == 0


def rest_importance(
    logprobs: Float[Tensor, "B T"],
    sampler_logprobs: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    cap: float,
) -> Float[Tensor, "B T"]:
    """Compute for every token the truncated ratio of the completion from it on; 1 outside the mask.

        c_t = min(prod_{s >= t} pi_old(y_s | x, y_<s) / pi_old(y_s | x, h, y_<s), cap)

    Without the cap E[c_t R | y_<t; x, h] = E[R | y_<t; x] for a return R of the rest: the critic's target without hint.
    """
    ratios = widen(torch.where(mask, logprobs - sampler_logprobs, 0.0))
    rest = ratios.flip(1).cumsum(1).flip(1)
    weights = rest.clamp(max=LARGEST_LOG_RATIO).exp().clamp(max=cap)
    return torch.where(mask, weights.to(logprobs.dtype), 1.0)


def success_shares(scores: Float[Tensor, " B"], group_size: int, *, solved_above: float) -> Float[Tensor, " N"]:
    """Compute the share of each group's scores that are above `solved_above`; NaN if a group has no score.

    Scores and limit are compared in the scores' own dtype: a float32 score of 0.1 is not above a limit of 0.1.
    """
    groups = scores.view(-1, group_size)
    known = (~groups.isnan()).sum(dim=1).double()
    return (groups > solved_above).sum(dim=1) / known.masked_fill(known == 0, torch.nan)


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
    policy that sampled. It is 1/4 at r = gamma and falls on both sides: a token that the plain prompt makes unlikely
    weighs more than by its ratio (w / r -> 1 / gamma), one that it makes likely already weighs less. The paper sets the
    denominator to 1, having no probabilities of its teacher; here it is known.
    """
    ratio = torch.where(mask, logprobs - sampler_logprobs, 0.0).clamp(max=LARGEST_LOG_RATIO).exp()
    return torch.where(mask, gamma * ratio / (ratio + gamma) ** 2, 1.0)


def effective_sample_share(weights: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> float:
    """Compute the effective sample size of the live weights as a share of their number (Kish 1965); 0 if none is live.

    (sum w)^2 / (n sum w^2):  1 if all are equal, 1 / n if one has all the weight
    """
    live = widen(weights[mask])
    squares = float((live**2).sum())
    return float(live.sum()) ** 2 / (len(live) * squares) if squares > 0 else 0.0
