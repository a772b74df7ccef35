"""Work done at the same time (overlap): sampling beside the update before, scoring a part while the next is sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from rlhf.batching import concat
from rlhf.errors import SamplingError
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

    A completion does not depend on others sampled beside it, so the completions are the same as without parts; so are
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


@dataclass(frozen=True)
class _Drawn:
    """The completions of a step: drawn, being drawn, or waiting to be drawn, by the policy after so many updates."""

    future: Future[Completions]
    updates: int

    @property
    def has_failed(self) -> bool:
        """Return whether drawing has ended with an error; it waits for the end."""
        return self.future.exception() is not None


class CompletionPrefetcher:
    """Samples each step's completions `behind` steps before its own update, from the policy as it is then.

    They come from a copy of the policy, made when sampling begins, so they do not depend on the update's timing. The
    first steps are all drawn by the policy of the start.
    """

    def __init__(
        self,
        draw: Callable[[int], Completions],
        refresh: Callable[[], None],
        *,
        last_step: int,
        behind: int = 1,
        keep: Callable[[], Callable[[], None]] | None = None,
        device: torch.device | None = None,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Set the draw and its copy of the policy. On a GPU it runs beside the update, on a stream of its own.

        Args:
            draw: samples a step's completions from the copy.
            refresh: puts the policy's weights into the copy.
            last_step: the last step of the run, after which nothing is sampled.
            behind: steps between a policy and the step whose completions it samples.
            keep: keeps the policy's weights apart while the copy is in use, and returns the function that puts them
                into it; needed if `behind` is more than 1.
            device: where the policy is; None: the CPU.
            note: called with a message if a stop changes the numbers of the run.
        """
        self._note = note
        self._draw, self._refresh, self._keep = draw, refresh, keep
        self._last_step, self._behind = last_step, behind
        self._drawn: dict[int, _Drawn] = {}
        self._streams = SideStream(device or torch.device("cpu"))
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ahead")

    def take(self, step: int) -> Completions:
        """Return the completions of `step`, and start sampling later steps that are not begun."""
        if step not in self._drawn:
            self._begin([step], updates=step - 1)
        try:
            completions = self._drawn[step].future.result()
        except BaseException as error:
            if isinstance(error, SamplingError):  # of which the run is saved
                self._note_loss(step, step - 1)
            del self._drawn[step]  # a checkpoint that is saved now has no completions of this step
            self._drawn = {number: drawn for number, drawn in self._drawn.items() if not drawn.future.cancel()}
            raise  # a step that waits to be drawn would fail likewise, after another wait for a server
        self._drawn = {number: drawn for number, drawn in self._drawn.items() if number >= step}
        coming = range(step + 1, min(step + self._behind, self._last_step) + 1)
        self._begin([number for number in coming if number not in self._drawn], updates=step - 1)
        return completions

    def age(self, step: int) -> int:
        """Return the number of updates since the policy that drew the completions of this step."""
        return step - 1 - self._drawn[step].updates

    def _begin(self, steps: Sequence[int], *, updates: int) -> None:
        """Let steps be drawn, one after the other, from the weights as they are now."""
        if not steps:
            return
        put = None
        if all(drawn.future.done() for drawn in self._drawn.values()):
            self._refresh()
        else:
            assert self._keep is not None, "one step ahead there is one draw at a time"
            put = self._keep()
        for number in steps:
            work = partial(self._drawn_from, put, number)
            self._drawn[number] = _Drawn(self._pool.submit(_without_gradient, self._streams.beside(work)), updates)
            put = None  # the next one is drawn from the same copy

    def _drawn_from(self, put: Callable[[], None] | None, step: int) -> Completions:
        if put is not None:
            put()
        return self._draw(step)

    def saved(self, state: TrainState) -> dict[str, Any]:
        """Return the next steps' completions for a checkpoint, as the weights that drew them are gone; {} if none.

        It waits for those that are being drawn. A draw that failed is begun again after the checkpoint is loaded.
        """
        coming = {n: d for n, d in sorted(self._drawn.items()) if n > state.step}
        drawn = {n: d for n, d in coming.items() if not d.has_failed}
        for number in coming.keys() - drawn.keys():
            self._note_loss(number, state.step)
        return {"drawn": [_as_saved(n, d.future.result(), d.updates) for n, d in drawn.items()]} if drawn else {}

    def _note_loss(self, step: int, saved_step: int) -> None:
        """Note that a run that continues after `saved_step` draws the completions of a step by other weights."""
        updates = self._drawn[step].updates
        if updates < saved_step:
            self._note(
                f"warning: overlap.ahead has no samples of step {step} by the weights of step {updates}, since "
                "sampling failed. If the run stops now, it continues with samples by the weights of step "
                f"{saved_step}, and with other numbers than without the stop"
            )

    def restore(self, step: int, completions: Completions, updates: int) -> None:
        """Restore the completions of `step`, drawn by the policy after so many updates, from a checkpoint."""
        self._drawn[step] = _Drawn(Future(), updates)
        self._drawn[step].future.set_result(completions)


def _as_saved(step: int, completions: Completions, updates: int) -> dict[str, Any]:
    """Return the parts of completions for a checkpoint: not their prompts, which are in the data set."""
    return {
        "step": step,
        "updates": updates,
        "completion_ids": completions.completion_ids,
        "completion_mask": completions.completion_mask,
        "sampler_logprobs": completions.sampler_logprobs,
        "finished": completions.finished,
        "group_size": completions.group_size,
        "sampler_support": completions.sampler_support,
    }


@torch.no_grad()
def _without_gradient(work: Callable[[], Any]) -> Any:
    """Run `work` in this thread without gradients, which are enabled in every new thread."""
    return work()
