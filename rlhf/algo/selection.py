"""Learning from a choice: the best of a prompt's completions, or the best against the worst."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf.types import Experience, SampledPairs


def kept(
    totals: Float[Tensor, " B"], group_size: int, *, keep: int, min_score: float | None = None
) -> Bool[Tensor, " B"]:
    """The `keep` best of each group, less those below `min_score` (RAFT, Dong et al. 2023, alg. 1, with keep = 1).

    Of equal ones the first are kept: completions of a prompt are drawn alike, so which comes first is chance.
    """
    groups = totals.view(-1, group_size)
    order = groups.argsort(dim=1, descending=True, stable=True)
    chosen = torch.zeros_like(groups, dtype=torch.bool).scatter(1, order[:, :keep], True)
    return (chosen if min_score is None else chosen & (groups >= min_score)).flatten()


def best_and_worst(scores: Float[Tensor, " B"], group_size: int) -> tuple[Int[Tensor, " N"], Int[Tensor, " N"]]:
    """The rows of the best and of the worst completion of each group, group by group; of equal ones the first.

    A group whose completions all scored alike has no pair (Guo et al. 2024 rank two; G > 2 makes the gap wider).
    """
    groups = scores.view(-1, group_size)
    best, worst = groups.argmax(dim=1, keepdim=True), groups.argmin(dim=1, keepdim=True)
    apart = (groups.gather(1, best) > groups.gather(1, worst)).flatten()
    first = torch.arange(0, len(scores), group_size, device=scores.device)
    return (first + best.flatten())[apart], (first + worst.flatten())[apart]


def pair_signs(scores: Float[Tensor, " B"], group_size: int) -> Float[Tensor, " B"]:
    """+1 for the best of a group, -1 for the worst, 0 for the others and where all scored alike."""
    best, worst = best_and_worst(scores, group_size)
    return torch.zeros_like(scores).index_fill(0, best, 1.0).index_fill(0, worst, -1.0)


def pairs_of(experience: Experience) -> SampledPairs:
    """The best and the worst completion of each prompt, as the offline pair losses read them; ties left out.

    The reference's log-probabilities are those of the rollout, summed in float64.
    """
    best, worst = best_and_worst(experience.scores, experience.group_size)
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
