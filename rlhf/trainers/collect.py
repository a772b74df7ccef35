"""Collects a step's scored completions; refills groups and samples greedy baselines where the algorithm asks for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf.algo.advantages import uniform_groups
from rlhf.config.algorithm import Greedy, Online
from rlhf.masked import Mean
from rlhf.runtime.metrics import Metrics
from rlhf.types import Completions, Prompts, Scores, concat


@runtime_checkable
class Draw(Protocol):
    """Samples and scores; `names` distinguish this draw's random numbers from those of the step's other draws."""

    def __call__(
        self, prompts: Prompts, *names: int | str, group_size: int, greedy: bool = False
    ) -> tuple[Completions, Scores]:
        """Sample completions of `prompts` as Sampler.sample does, then score them by the RewardSource."""


@dataclass(frozen=True, kw_only=True)
class Collected:
    """A step's scored completions, and a count of those sampled besides."""

    completions: Completions
    scores: Scores
    baselines: Float[Tensor, " B"]  # score of the prompt's greedy completion; zero if none was sampled
    extra: int  # completions that were sampled but are not trained on
    metrics: Metrics


def collect(
    prompts: Prompts, draw: Draw, refill: Callable[[int], Prompts], algorithm: Online, *, group_size: int
) -> Collected:
    """Collect `group_size` scored completions of every prompt, or of other prompts that replace it.

    Args:
        prompts: the prompts of the step.
        draw: samples and scores.
        refill: returns other prompts, as many as `prompts`, for the refill round of the given number (from 1).
        algorithm: decides whether groups are refilled (refill_rounds) and whether there are greedy baselines.
        group_size: completions per prompt.
    """
    batch = draw(prompts, group_size=group_size)
    metrics = Metrics()
    unused: list[Completions] = []
    if algorithm.refill_rounds > 0:
        metrics.update({"score/first_draw": Mean.of(batch[1].values)})
        batch, unused, replaced = _refill_uniform_groups(batch, draw, refill, algorithm.refill_rounds)
        metrics.add("group/refilled", replaced / len(prompts))
    completions, scores = batch
    baselines = torch.zeros_like(scores.values)
    if isinstance(algorithm.advantage, Greedy):
        best, best_scores = draw(prompts, "greedy", group_size=1, greedy=True)
        baselines = best_scores.values.repeat_interleave(group_size)
        metrics.update({"score/greedy": Mean.of(best_scores.values)})
        unused = [best]
    extra = sum(len(rows) for rows in unused)
    if algorithm.refill_rounds > 0 or unused:
        metrics.add("completion/extra", float(extra))
        metrics.add("completion/extra_tokens", float(sum(live_tokens(rows) for rows in unused)))
    return Collected(
        completions=completions,
        scores=scores,
        baselines=baselines,
        extra=extra,
        metrics=metrics,
    )


def live_tokens(completions: Completions) -> int:
    """Count the live tokens of prompts and completions."""
    return int(completions.prompt_mask.sum() + completions.completion_mask.sum())


Batch = tuple[Completions, Scores]


def _refill_uniform_groups(
    batch: Batch, draw: Draw, refill: Callable[[int], Prompts], rounds: int
) -> tuple[Batch, list[Completions], int]:
    """Replace uniform groups by groups of other prompts, in at most `rounds` rounds (DAPO, Yu et al. 2025, sec. 3.2).

    A replacing prompt takes the row id of the one it replaces, so its rows have that prompt's random numbers. Groups
    that are still uniform after the last round stay (the loss leaves them out).

    Returns:
        The batch, the completions that were sampled and discarded, and how many groups were replaced.
    """
    size, unused, replaced = batch[0].group_size, [], 0
    for number in range(1, rounds + 1):
        uniform = uniform_groups(batch[1].values, size)
        if not uniform.any():
            break
        slots = uniform.nonzero().flatten()[::size]  # the first row of each uniform group
        others = replace(refill(number).rows(slice(0, len(slots))), row_ids=batch[0].row_ids[slots] // size)
        drawn = draw(others, "refill", number, group_size=size)
        varied = ~uniform_groups(drawn[1].values, size)
        rows = torch.arange(len(uniform))
        rows[uniform] = torch.where(varied, len(uniform) + torch.arange(len(varied)), rows[uniform])
        combined = _concat_batches([batch, drawn])
        discarded = torch.ones(len(combined[0]), dtype=torch.bool)
        discarded[rows] = False
        unused.append(combined[0].rows(discarded.nonzero().flatten()))
        batch = _select_rows(combined, rows)
        replaced += int(varied.sum()) // size
    return batch, unused, replaced


def _concat_batches(batches: Sequence[Batch]) -> Batch:
    """Concatenate the rows of the batches; of the scores' parts, those that all of them have."""
    all_scores = [batch[1] for batch in batches]
    names = [name for name in all_scores[0].parts if all(name in scores.parts for scores in all_scores)]
    return concat([batch[0] for batch in batches]), Scores(
        values=torch.cat([scores.values for scores in all_scores]),
        parts={name: torch.cat([scores.parts[name] for scores in all_scores]) for name in names},
    )


def _select_rows(batch: Batch, index: Tensor) -> Batch:
    completions, scores = batch
    parts = {name: part[index] for name, part in scores.parts.items()}
    return completions.rows(index), Scores(values=scores.values[index], parts=parts)
