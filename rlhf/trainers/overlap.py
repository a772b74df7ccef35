"""What may be done at the same time, one process alone: scoring while sampling, sampling while updating."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from rlhf.rewards.source import RewardSource
from rlhf.runtime.session import TrainState
from rlhf.types import Completions, Prompts, Scores, concat

Sample = Callable[[Prompts], Completions]


def scored_in_parts(
    prompts: Prompts, sample: Sample, reward: RewardSource, *, parts: int
) -> tuple[Completions, Scores]:
    """Completions and scores of `prompts`, sampled in `parts` of which each is scored while the next is sampled.

    A completion does not depend on what is sampled beside it, so they are those of one part; a source that looks at
    one completion at a time gives the same scores.
    """
    found: list[tuple[Completions, Future[Scores]]] = []
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward") as pool:
        try:
            for part in prompts.split(-(-len(prompts) // parts)):
                completions = sample(part)
                found.append((completions, pool.submit(_without_gradient, partial(reward, completions))))
            scores = [future.result() for _, future in found]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    together = concat([completions for completions, _ in found])
    return together, Scores(
        values=torch.cat([each.values for each in scores]),
        parts={name: torch.cat([each.parts[name] for each in scores]) for name in scores[0].parts},
    )


class Ahead:
    """Completions of each step drawn while the step before it updates: by the policy as it then was, one step behind.

    They come from a copy of the policy, made when they begin, so they depend on nothing that happens meanwhile.
    """

    def __init__(self, draw: Callable[[int], Completions], refresh: Callable[[], None], *, last_step: int) -> None:
        """`draw` gives the completions of a step from the copy, and `refresh` copies the policy into it."""
        self._draw = draw
        self._refresh = refresh
        self._last_step = last_step
        self._drawn: dict[int, Future[Completions]] = {}
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ahead")

    def take(self, step: int) -> Completions:
        """Those of `step`; from here on those of the next step are being drawn."""
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
        """What a checkpoint after `state.step` steps must keep, since those weights are gone."""
        step = state.step + 1
        if step not in self._drawn:
            return {}
        found = self._drawn[step].result()
        return {
            "step": step,
            "completion_ids": found.completion_ids,
            "completion_mask": found.completion_mask,
            "sampler_logprobs": found.sampler_logprobs,
            "finished": found.finished,
            "group_size": found.group_size,
        }

    def put_back(self, step: int, completions: Completions) -> None:
        """Those of `step`, as they were saved."""
        self._drawn[step] = Future()
        self._drawn[step].set_result(completions)


@torch.no_grad()
def _without_gradient(work: Callable[[], Any]) -> Any:
    """`work` in this thread: gradients are on in every new one."""
    return work()
