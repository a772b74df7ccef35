"""What a step learns from: completions and their scores, groups refilled where asked for, greedy baselines."""

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
    """Samples and scores: `names` tell this draw's random numbers from those of the step's other draws."""

    def __call__(
        self, prompts: Prompts, *names: int | str, group_size: int, greedy: bool = False
    ) -> tuple[Completions, Scores]:
        """As Sampler.sample, then RewardSource."""


@dataclass(frozen=True, kw_only=True)
class Collected:
    """A step's scored completions, and what was sampled besides."""

    completions: Completions
    scores: Scores
    baselines: Float[Tensor, " B"]  # score of the prompt's greedy completion; zero where none was sampled
    extra: int  # completions sampled and not learned from
    metrics: Metrics


def collect(
    prompts: Prompts, draw: Draw, refill: Callable[[int], Prompts], algorithm: Online, *, group_size: int
) -> Collected:
    """`group_size` scored completions of every prompt, or of prompts in their place.

    Args:
        prompts: of the step.
        draw: samples and scores.
        refill: other prompts for the refilling round of this number, from 1; as many as `prompts`.
        algorithm: says whether groups are refilled (refill_rounds) and whether there are greedy baselines.
        group_size: completions a prompt.
    """
    batch = draw(prompts, group_size=group_size)
    metrics = Metrics()
    unused: list[Completions] = []
    if algorithm.refill_rounds > 0:
        metrics.update({"score/first_draw": Mean.of(batch[1].values)})
        batch, unused, replaced = _refilled(batch, draw, refill, algorithm.refill_rounds)
        metrics.add("group/refilled", replaced / len(prompts))
    completions, scores = batch
    baselines = torch.zeros_like(scores.values)
    if isinstance(algorithm.advantage, Greedy):
        best, best_scores = draw(prompts, "greedy", group_size=1, greedy=True)
        baselines = best_scores.values.repeat_interleave(group_size)
        metrics.update({"score/greedy": Mean.of(best_scores.values)})
        unused = [best]
    extra = sum(len(each) for each in unused)
    if algorithm.refill_rounds > 0 or unused:
        metrics.add("completion/extra", float(extra))
        metrics.add("completion/extra_tokens", float(sum(live_tokens(each) for each in unused)))
    return Collected(
        completions=completions,
        scores=scores,
        baselines=baselines,
        extra=extra,
        metrics=metrics,
    )


def live_tokens(completions: Completions) -> int:
    """Live tokens, of prompts and completions."""
    return int(completions.prompt_mask.sum() + completions.completion_mask.sum())


Batch = tuple[Completions, Scores]


def _refilled(
    batch: Batch, draw: Draw, refill: Callable[[int], Prompts], rounds: int
) -> tuple[Batch, list[Completions], int]:
    """Uniform groups replaced by those of other prompts, for at most `rounds` rounds (DAPO, Yu et al. 2025, sec. 3.2).

    A prompt that stands in takes the row id of the one it replaces, so its rows have their numbers. What is uniform
    after the last round stays (the loss leaves it out).

    Returns the batch, every completion that was sampled and thrown away, and how many groups were replaced.
    """
    size, unused, replaced = batch[0].group_size, [], 0
    for number in range(1, rounds + 1):
        uniform = uniform_groups(batch[1].values, size)
        if not uniform.any():
            break
        slots = uniform.nonzero().flatten()[::size]  # the first row of each uniform group
        others = replace(refill(number).rows(slice(0, len(slots))), row_ids=batch[0].row_ids[slots] // size)
        found = draw(others, "refill", number, group_size=size)
        good = ~uniform_groups(found[1].values, size)
        rows = torch.arange(len(uniform))
        rows[uniform] = torch.where(good, len(uniform) + torch.arange(len(good)), rows[uniform])
        everything = _together([batch, found])
        thrown = torch.ones(len(everything[0]), dtype=torch.bool)
        thrown[rows] = False
        unused.append(everything[0].rows(thrown.nonzero().flatten()))
        batch = _rows(everything, rows)
        replaced += int(good.sum()) // size
    return batch, unused, replaced


def _together(batches: Sequence[Batch]) -> Batch:
    """The rows of all of them; of the scores' parts those that all have."""
    scores = [batch[1] for batch in batches]
    names = [name for name in scores[0].parts if all(name in each.parts for each in scores)]
    return concat([batch[0] for batch in batches]), Scores(
        values=torch.cat([each.values for each in scores]),
        parts={name: torch.cat([each.parts[name] for each in scores]) for name in names},
    )


def _rows(batch: Batch, index: Tensor) -> Batch:
    completions, scores = batch
    parts = {name: part[index] for name, part in scores.parts.items()}
    return completions.rows(index), Scores(values=scores.values[index], parts=parts)
