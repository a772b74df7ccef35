"""Learning from selected completions: the best of each group, or the best against the worst."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf.config.algorithm import Best, BestAndWorst, Online
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

    A group has a pair where best > worst and best - worst >= `min_gap`, so N is at most the number of groups (Guo et
    al. 2024 rank two completions; G > 2 makes the gap wider).
    """
    groups = scores.view(-1, group_size)
    best, worst = groups.argmax(dim=1, keepdim=True), groups.argmin(dim=1, keepdim=True)
    gap = (groups.gather(1, best) - groups.gather(1, worst)).flatten()
    differs = (gap > 0) & (gap >= min_gap)
    first = torch.arange(0, len(scores), group_size, device=scores.device)
    return (first + best.flatten())[differs], (first + worst.flatten())[differs]


def pair_signs(scores: Float[Tensor, " B"], group_size: int, *, min_gap: float = 0.0) -> Float[Tensor, " B"]:
    """Return +1 for the best of each group, -1 for the worst, and 0 for the others and where there is no pair."""
    best, worst = best_and_worst(scores, group_size, min_gap=min_gap)
    return torch.zeros_like(scores).index_fill(0, best, 1.0).index_fill(0, worst, -1.0)


def best_worst_pairs(experience: Experience, *, min_gap: float = 0.0) -> SampledPairs:
    """Pair the best with the worst completion of each prompt for the pair losses, leaving out ties and narrow gaps.

    The reference log-probabilities are those of the rollout, summed over tokens in float64.
    """
    best, worst = best_and_worst(experience.scores, experience.group_size, min_gap=min_gap)
    chosen, rejected = experience.rows(best), experience.rows(worst)
    sides: dict[str, Any] = {}
    for side, rows in (("chosen", chosen), ("rejected", rejected)):
        sides[f"{side}_ids"], sides[f"{side}_mask"] = rows.completion_ids, rows.completion_mask
        sides[f"{side}_learned"] = rows.completion_mask
        sides[f"{side}_ref_logprobs"] = rows.ref_logprobs.double().sum(dim=1)
        sides[f"{side}_old_logprobs"] = rows.logprobs
    return SampledPairs(
        prompt_ids=chosen.prompt_ids, prompt_mask=chosen.prompt_mask, margins=chosen.scores - rejected.scores, **sides
    )


def select_training_rows(experience: Experience, algorithm: Online) -> Experience | SampledPairs:
    """Select what the update trains on: the rows with a token in the loss, or pairs of rows.

    A row of a dropped group, or one that was cut off and masked, adds nothing to any sum or denominator: it takes no
    forward pass, and minibatches are drawn from the others. A critic learns from every row. There may be no pairs and
    no kept rows; where a group algorithm has dropped everything, all rows are returned, and have a gradient of zero.
    """
    match algorithm.advantage:
        case BestAndWorst() as config:
            return best_worst_pairs(experience, min_gap=config.min_gap)
        case Best():
            return experience.rows(_rows_in_loss(experience))
        case _ if _drops_rows(algorithm) and len(_rows_in_loss(experience)):
            return experience.rows(_rows_in_loss(experience))
        case _:
            return experience


def _rows_in_loss(experience: Experience) -> Int[Tensor, " N"]:
    return experience.loss_mask.any(dim=1).nonzero().flatten()


def _drops_rows(algorithm: Online) -> bool:
    """Check whether some rows are in no loss at all; a critic learns from every row."""
    return algorithm.value_loss is None and (algorithm.drop_uniform_groups or algorithm.mask_truncated)
