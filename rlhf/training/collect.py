"""Sample and score the completions of a step, in parts or ahead of time if the configuration says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf.algo.advantages import uniform_groups
from rlhf.algo.masked import Mean
from rlhf.batching import concat
from rlhf.config.algorithm import Greedy, Online
from rlhf.rewards.source import RewardSource
from rlhf.tracking.metrics import Metrics
from rlhf.training.session import TrainState
from rlhf.types import Completions, Prompts, Scores

Sample = Callable[[Prompts], Completions]


def sample_and_score_in_parts(
    prompts: Prompts, sample: Sample, reward: RewardSource, *, parts: int
) -> tuple[Completions, Scores]:
    """Sample and score `prompts` in several parts, scoring each part while the next is sampled.

    A completion does not depend on what is sampled beside it, so the completions are the same as without parts; so are
    the scores if the reward source looks at one completion at a time.
    """
    pending: list[tuple[Completions, Future[Scores]]] = []
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward") as pool:
        try:
            for part in prompts.split(-(-len(prompts) // parts)):
                completions = sample(part)
                pending.append((completions, pool.submit(_without_gradient, partial(reward, completions))))
            all_scores = [future.result() for _, future in pending]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    merged = concat([completions for completions, _ in pending])
    return merged, Scores(
        values=torch.cat([scores.values for scores in all_scores]),
        parts={name: torch.cat([scores.parts[name] for scores in all_scores]) for name in all_scores[0].parts},
    )


class CompletionPrefetcher:
    """Samples each step's completions during the update before it, from the policy before that update: one step behind.

    They come from a copy of the policy, made when sampling begins, so they do not depend on the update's timing.
    """

    def __init__(self, draw: Callable[[int], Completions], refresh: Callable[[], None], *, last_step: int) -> None:
        """Set `draw`, which samples a step's completions from the copy, and `refresh`, which updates the copy."""
        self._draw = draw
        self._refresh = refresh
        self._last_step = last_step
        self._drawn: dict[int, Future[Completions]] = {}
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ahead")

    def take(self, step: int) -> Completions:
        """Return the completions of `step`, and start sampling those of the next step."""
        if step not in self._drawn:
            self._begin(step)
        completions = self._drawn[step].result()
        self._drawn = {step: self._drawn[step]}
        if step < self._last_step:
            self._begin(step + 1)
        return completions

    def _begin(self, step: int) -> None:
        self._refresh()
        self._drawn[step] = self._pool.submit(_without_gradient, partial(self._draw, step))

    def saved(self, state: TrainState) -> dict[str, Any]:
        """Return the next step's completions for a checkpoint, as the weights that drew them are gone; {} if none."""
        step = state.step + 1
        if step not in self._drawn:
            return {}
        completions = self._drawn[step].result()
        return {
            "step": step,
            "completion_ids": completions.completion_ids,
            "completion_mask": completions.completion_mask,
            "sampler_logprobs": completions.sampler_logprobs,
            "finished": completions.finished,
            "group_size": completions.group_size,
        }

    def restore(self, step: int, completions: Completions) -> None:
        """Restore the completions of `step` from a checkpoint."""
        self._drawn[step] = Future()
        self._drawn[step].set_result(completions)


@torch.no_grad()
def _without_gradient(work: Callable[[], Any]) -> Any:
    """Run `work` in this thread without gradients, which are enabled in every new thread."""
    return work()


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
