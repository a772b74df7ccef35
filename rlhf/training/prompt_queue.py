"""The prompts of a step where unsolved ones are replayed (algorithm.rescue), kept as part of the run's state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from rlhf.algorithms.rescue import ReplayConfig
from rlhf.data.datasets import epoch_order
from rlhf.data.prompts import PromptSet
from rlhf.tracking.metrics import Metrics
from rlhf.types import Prompts


@dataclass(frozen=True, kw_only=True)
class QueueState:
    """What the prompts of the next step follow from, besides the data and the seed."""

    fresh: int = 0  # prompts taken from the endless shuffled stream so far
    waiting: dict[int, int] = field(default_factory=dict)  # unsolved prompts, longest waiting first, and their replays
    given_up: int = 0  # prompts whose replays were used up, since the start


class PromptQueue:
    """Deals each step its prompts: unsolved ones that wait for a replay, then fresh ones in shuffled epochs.

    Fresh prompts that replays displace are not lost: they come in later steps. Without replays the prompts are those of
    rlhf.data.prompts.PromptStream with the same seed.
    """

    def __init__(self, prompts: PromptSet, prompts_per_step: int, seed: int, config: ReplayConfig) -> None:
        """Start at step 1."""
        self.prompt_set, self.prompts_per_step, self.seed, self.config = prompts, prompts_per_step, seed, config
        self.state = QueueState()

    def prompts(self) -> Prompts:
        """Return the prompts of the step at hand; the same until `finish`."""
        return self.prompt_set.collate(self._indices())

    def hinted(self, number: int) -> tuple[Prompts, Bool[Tensor, " B"]]:
        """Return the same prompts with hint `number` (from 1) in them, and which of them have it."""
        return self.prompt_set.collate_hinted(self._indices(), number)

    def finish(self, failed: Bool[Tensor, " N"], rescued: Bool[Tensor, " N"]) -> Metrics:
        """Finish the step: queue its unsolved prompts for a replay, or give them up; return the counts.

        Args:
            failed: the prompts of which no completion without a hint succeeded.
            rescued: those of them of which one with a hint did.
        """
        indices, replays = self._indices(), self._replays()
        solved = ~failed | rescued if self.config.until == "hinted" else ~failed
        outcomes: dict[int, bool] = {}  # a small data set may have a prompt twice in a step
        for index, is_solved in zip(indices, solved.tolist(), strict=True):
            outcomes[index] = outcomes.get(index, False) or is_solved
        waiting, given_up = dict(self.state.waiting), self.state.given_up
        for index, is_solved in outcomes.items():
            tries = waiting.pop(index, -1) + (index in replays or index not in self.state.waiting)
            if is_solved:
                continue
            if tries < self.config.limit:
                waiting[index] = tries
            else:
                given_up += 1
        self.state = QueueState(fresh=self._next_fresh(), waiting=waiting, given_up=given_up)
        metrics = Metrics()
        metrics.add("rescue/replayed", float(len(replays)))
        metrics.add("rescue/replays_solved", float(sum(outcomes[index] for index in replays)))
        metrics.add("rescue/waiting", float(len(waiting)))
        metrics.add("rescue/given_up", float(given_up))
        return metrics

    def skip(self) -> None:
        """Skip a step that had no usable scores: its fresh prompts are passed over, and replays wait on."""
        self.state = QueueState(
            fresh=self._next_fresh(), waiting=dict(self.state.waiting), given_up=self.state.given_up
        )

    def saved(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        waiting = torch.tensor(list(self.state.waiting.items()), dtype=torch.long).view(-1, 2)
        return {"fresh": self.state.fresh, "waiting": waiting, "given_up": self.state.given_up}

    def restore(self, saved: dict[str, Any] | None, *, step: int) -> None:
        """Restore the state of a checkpoint after `step` steps; None: of a run that had no queue until then."""
        if saved is None:
            self.state = QueueState(fresh=step * self.prompts_per_step)
            return
        known = len(self.prompt_set)
        waiting = {index: tries for index, tries in saved["waiting"].tolist() if index < known}  # the data may differ
        self.state = QueueState(fresh=saved["fresh"], waiting=waiting, given_up=saved["given_up"])

    def _replays(self) -> list[int]:
        return list(self.state.waiting)[: self.config.per_step(self.prompts_per_step)]

    def _indices(self) -> list[int]:
        replays, first = self._replays(), self.state.fresh
        fresh = range(first, first + self.prompts_per_step - len(replays))
        return replays + [epoch_order(len(self.prompt_set), 1, self.seed, position + 1)[0] for position in fresh]

    def _next_fresh(self) -> int:
        return self.state.fresh + self.prompts_per_step - len(self._replays())
