"""The prompts of a step that depend on their earlier outcomes: replays, hints that are due, a curriculum.

The queue (algorithm.rescue, algorithm.curriculum) is a part of the run's state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf.algorithms.curriculum import Curriculum
from rlhf.algorithms.rescue import ReplayConfig, Rescue
from rlhf.data.datasets import epoch_order
from rlhf.data.prompts import PromptSet
from rlhf.runtime.seeding import derive_seed
from rlhf.tracking.metrics import Metrics
from rlhf.types import Prompts

NO_REPLAYS = ReplayConfig(limit=0)


@dataclass(frozen=True)
class PromptHistory:
    """The outcome of a prompt in earlier steps, by its completions without a hint."""

    failures: int = 0  # steps in a row in which none succeeded
    rate: float | None = None  # of success; None without a curriculum


@dataclass(frozen=True, kw_only=True)
class QueueState:
    """The state that decides the prompts of the next step, besides the data and the seed."""

    fresh: int = 0  # places of the endless shuffled stream that were dealt or passed over so far
    waiting: dict[int, int] = field(default_factory=dict)  # unsolved prompts, longest waiting first, and their replays
    given_up: int = 0  # prompts whose replays were used up, since the start
    records: dict[int, PromptHistory] = field(default_factory=dict)  # of the prompts that were dealt


@dataclass(frozen=True)
class Deal:
    """The prompts of a step."""

    replays: list[int]
    fresh: list[int]
    passed_over: int
    next_fresh: int  # the place of the stream at which the next step goes on

    @property
    def indices(self) -> list[int]:
        """Return the rows of all prompts, replays first."""
        return self.replays + self.fresh


class PromptQueue:
    """Deals each step its prompts: unsolved ones that wait for a replay, then fresh ones in shuffled epochs.

    Fresh prompts that replays displace are not lost: they come in later steps. Without replays and curriculum the
    prompts are as of rlhf.data.prompts.PromptStream with the same seed. A curriculum passes over some of them; at
    most one epoch is passed over in a step, then those worth most are dealt.
    """

    def __init__(
        self,
        prompts: PromptSet,
        prompts_per_step: int,
        seed: int,
        *,
        rescue: Rescue | None = None,
        curriculum: Curriculum | None = None,
    ) -> None:
        """Start at step 1."""
        self.prompt_set, self.prompts_per_step, self.seed = prompts, prompts_per_step, seed
        self.rescue, self.curriculum = rescue, curriculum
        self.replay = NO_REPLAYS if rescue is None else rescue.replay
        self.state = QueueState()
        self._dealt: tuple[QueueState, Deal] | None = None  # of the state that it was dealt from

    def prompts(self) -> Prompts:
        """Return the prompts of the step at hand; the same until `finish`."""
        return self.prompt_set.collate(self._deal().indices)

    def hinted(self, number: int) -> tuple[Prompts, Bool[Tensor, " B"]]:
        """Return the same prompts with hint `number` (from 1) in them, and which of them have it."""
        return self.prompt_set.collate_hinted(self._deal().indices, number)

    def due(self) -> Int[Tensor, " B"]:
        """Return the number of the hint that each of the prompts is due, decided by earlier steps; 0: none."""
        failures = [self.state.records.get(index, PromptHistory()).failures for index in self._deal().indices]
        return torch.tensor([0 if self.rescue is None else self.rescue.due(times) for times in failures])

    def finish(
        self, failed: Bool[Tensor, " N"], rescued: Bool[Tensor, " N"], shares: Float[Tensor, " N"] | None = None
    ) -> Metrics:
        """Finish the step: queue its unsolved prompts for a replay, or give them up; return the counts.

        Args:
            failed: the prompts of which no completion without a hint succeeded.
            rescued: the prompts of which one with a hint succeeded.
            shares: of each prompt's completions without a hint, those that succeeded; NaN if none has a score. None:
                not known.
        """
        deal = self._deal()
        solved = ~failed | rescued if self.replay.until == "hinted" else ~failed
        outcomes: dict[int, bool] = {}  # a small data set may have a prompt twice in a step
        for index, is_solved in zip(deal.indices, solved.tolist(), strict=True):
            outcomes[index] = outcomes.get(index, False) or is_solved
        waiting, given_up = dict(self.state.waiting), self.state.given_up
        for index, is_solved in outcomes.items():
            tries = waiting.pop(index, -1) + (index in deal.replays or index not in self.state.waiting)
            if is_solved or self.rescue is None:
                continue
            if tries < self.replay.limit:
                waiting[index] = tries
            else:
                given_up += 1
        records = self.state.records
        if shares is not None and (self.curriculum is not None or (self.rescue is not None and self.rescue.after)):
            records = self._updated(deal.indices, shares.tolist())
        self.state = QueueState(fresh=deal.next_fresh, waiting=waiting, given_up=given_up, records=records)
        metrics = Metrics()
        if self.rescue is not None:
            metrics.add("rescue/replayed", float(len(deal.replays)))
            metrics.add("rescue/replays_solved", float(sum(outcomes[index] for index in deal.replays)))
            metrics.add("rescue/waiting", float(len(waiting)))
            metrics.add("rescue/given_up", float(given_up))
        if self.curriculum is not None:
            metrics.add("curriculum/passed_over", float(deal.passed_over))
            rates = [record.rate for record in records.values() if record.rate is not None]
            metrics.add("curriculum/known", len(rates) / len(self.prompt_set))
            if rates:
                metrics.add("curriculum/rate", math.fsum(rates) / len(rates))
        return metrics

    def skip(self) -> None:
        """Skip a step that had no usable scores: its fresh prompts are passed over, and replays wait on."""
        state = self.state
        self.state = QueueState(
            fresh=self._deal().next_fresh, waiting=dict(state.waiting), given_up=state.given_up, records=state.records
        )

    def saved(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        waiting = torch.tensor(list(self.state.waiting.items()), dtype=torch.long).view(-1, 2)
        saved = {"fresh": self.state.fresh, "waiting": waiting, "given_up": self.state.given_up}
        if not self.state.records:
            return saved
        rows = [
            (index, record.failures, math.nan if record.rate is None else record.rate)
            for index, record in self.state.records.items()
        ]
        return saved | {"records": torch.tensor(rows, dtype=torch.float64)}

    def restore(self, saved: dict[str, Any] | None, *, step: int) -> None:
        """Restore the state of a checkpoint after `step` steps; None: it knows nothing about these prompts."""
        if saved is None:
            self.state = QueueState(fresh=step * self.prompts_per_step)
            return
        waiting = dict(saved["waiting"].tolist())
        rows = saved["records"].tolist() if "records" in saved else []
        records = {
            int(index): PromptHistory(int(failures), None if math.isnan(rate) else rate)
            for index, failures, rate in rows
        }
        self.state = QueueState(fresh=saved["fresh"], waiting=waiting, given_up=saved["given_up"], records=records)

    def _deal(self) -> Deal:
        if self._dealt is not None and self._dealt[0] is self.state:
            return self._dealt[1]
        replays = list(self.state.waiting)[: self.replay.per_step(self.prompts_per_step)]
        wanted, start = self.prompts_per_step - len(replays), self.state.fresh
        most = max(len(self.prompt_set), wanted)
        fresh: list[int] = []
        passed: list[tuple[float, int]] = []  # chance and row of those that the curriculum passed over
        for place in count(start):
            if len(fresh) == wanted or len(passed) == most:
                break
            index = epoch_order(len(self.prompt_set), 1, self.seed, place + 1)[0]
            chance = self._chance(index)
            if chance < 1 and derive_seed(self.seed, "curriculum", place) / 2**63 >= chance:
                passed.append((chance, index))
            else:
                fresh.append(index)
        missing = wanted - len(fresh)
        fresh += [index for _, index in sorted(passed, key=lambda entry: -entry[0])[:missing]]
        deal = Deal(replays, fresh, len(passed) - missing, start + wanted - missing + len(passed))
        self._dealt = (self.state, deal)
        return deal

    def _chance(self, index: int) -> float:
        if self.curriculum is None:
            return 1.0
        return self.curriculum.chance(self.state.records.get(index, PromptHistory()).rate)

    def _updated(self, indices: list[int], shares: list[float]) -> dict[int, PromptHistory]:
        """Return the records after a step; one that is in it twice is counted twice, in order."""
        records = dict(self.state.records)
        for index, share in zip(indices, shares, strict=True):
            if math.isnan(share):
                continue
            old = records.get(index, PromptHistory())
            rate = None if self.curriculum is None else self.curriculum.updated(old.rate, share)
            records[index] = PromptHistory(0 if share > 0 else old.failures + 1, rate)
        return records
