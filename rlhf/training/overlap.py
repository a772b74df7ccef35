"""Work done at the same time (overlap): sampling beside the update before, scoring a part while the next is sampled."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from rlhf.batching import concat
from rlhf.rewards.source import RewardSource
from rlhf.runtime.device import SideStream
from rlhf.training.rollout import concat_scores
from rlhf.training.session import TrainState
from rlhf.types import Completions, Prompts, Scores

Sample = Callable[[Prompts], Completions]


def sample_and_score_in_parts(
    prompts: Prompts, sample: Sample, reward: RewardSource, *, parts: int, device: torch.device | None = None
) -> tuple[Completions, Scores]:
    """Sample and score `prompts` in several parts, scoring each part while the next is sampled.

    A completion does not depend on what is sampled beside it, so the completions are the same as without parts; so are
    the scores if the reward source looks at one completion at a time.
    """
    pending: list[tuple[Completions, Future[Scores]]] = []
    side = SideStream(device or torch.device("cpu"))
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward") as pool:
        try:
            for part in prompts.split(-(-len(prompts) // parts)):
                completions = sample(part)
                pending.append((completions, pool.submit(_without_gradient, side.beside(partial(reward, completions)))))
            all_scores = [future.result() for _, future in pending]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    merged = concat([completions for completions, _ in pending])
    return merged, concat_scores(all_scores)


class CompletionPrefetcher:
    """Samples each step's completions during the update before it, from the policy before that update: one step behind.

    They come from a copy of the policy, made when sampling begins, so they do not depend on the update's timing.
    """

    def __init__(
        self,
        draw: Callable[[int], Completions],
        refresh: Callable[[], None],
        *,
        last_step: int,
        device: torch.device | None = None,
    ) -> None:
        """Set `draw`, which samples a step's completions from the copy, and `refresh`, which updates the copy.

        On a GPU the two take turns on streams of their own: sampling runs beside the update.
        """
        self._draw = draw
        self._refresh = refresh
        self._last_step = last_step
        self._drawn: dict[int, Future[Completions]] = {}
        self._streams = SideStream(device or torch.device("cpu"))
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ahead")

    def take(self, step: int) -> Completions:
        """Return the completions of `step`, and start sampling those of the next step."""
        if step not in self._drawn:
            self._begin(step)
        try:
            completions = self._drawn[step].result()
        except BaseException:
            del self._drawn[step]  # a checkpoint that is saved now has no completions of this step
            raise
        self._drawn = {step: self._drawn[step]}
        if step < self._last_step:
            self._begin(step + 1)
        return completions

    def _begin(self, step: int) -> None:
        self._refresh()
        self._drawn[step] = self._pool.submit(_without_gradient, self._streams.beside(partial(self._draw, step)))

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
