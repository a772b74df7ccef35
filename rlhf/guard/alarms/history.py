"""The metrics of a run as its alarms read them: the start and the recent past of each, and all evaluations."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean

KEPT = 40  # recent values of each metric
START = 5  # first values of a metric in training, whose mean is its start
HELD_OUT = "eval/"


@dataclass
class Track:
    """One metric: its first values and its recent ones."""

    first: list[float] = field(default_factory=list)
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    count: int = 0

    def add(self, value: float) -> None:
        """Append a value."""
        if len(self.first) < START:
            self.first.append(value)
        self.recent.append(value)
        self.count += 1


@dataclass(frozen=True)
class RunFacts:
    """The facts that a limit depends on besides the metrics."""

    kl_target: float | None = None  # of an adaptive controller, in nats per sequence
    is_rounded: bool = False  # arithmetic in bfloat16
    is_ahead: bool = False  # completions come from the policy of the step before
    reads_ratio: bool = True  # false: a pair loss with the sampler's log-probabilities, which no loss reads
    updates: int = 1  # optimizer steps on the same completions
    repeats_prompts: bool = False  # the data has fewer prompts than a step takes
    leaves_out_template: bool = False  # the model has a chat template that data.chat_template=none does not use
    evaluates_once: bool = False  # after training; the evaluation before it is the start
    has_other_signal: bool = False  # a teacher or rewards of steps, besides the scores
    on_data: bool = False  # nothing is sampled to train on: SFT, losses over pairs, reward models


class History:
    """The metrics of a run, line by line of metrics.jsonl. A value that is not finite counts as missing."""

    def __init__(self, facts: RunFacts | None = None) -> None:
        self.facts = facts or RunFacts()
        self._tracks: dict[str, Track] = {}
        self._latest: dict[str, float] = {}
        self._evaluations: list[dict[str, float]] = []  # held-out metrics, of the lines before the latest

    def add(self, metrics: Mapping[str, float | None]) -> None:
        """Append the metrics of a logged step."""
        if held_out := {name: value for name, value in self._latest.items() if name.startswith(HELD_OUT)}:
            self._evaluations.append(held_out)
        self._latest = {
            name: float(value) for name, value in metrics.items() if value is not None and math.isfinite(value)
        }
        for name, value in self._latest.items():
            self._tracks.setdefault(name, Track()).add(value)

    def now(self, name: str) -> float | None:
        """Return the value in the latest line; None if that has none."""
        return self._latest.get(name)

    def start(self, name: str) -> float | None:
        """Return the start of the metric: the mean of its first values, or the first evaluation; None before that."""
        track = self._tracks.get(name)
        if track is None:
            return None
        if name.startswith(HELD_OUT):
            return track.first[0]
        return fmean(track.first) if track.count > START else None

    def count(self, name: str) -> int:
        """Return how often the metric was logged."""
        return self._tracks[name].count if name in self._tracks else 0

    def before(self, name: str) -> list[float]:
        """Return the recent values before the latest line, oldest first."""
        track = self._tracks.get(name)
        if track is None:
            return []
        values = list(track.recent)
        return values[:-1] if name in self._latest else values

    def evaluations(self, *names: str) -> list[tuple[float, ...]]:
        """Return the values of held-out metrics in the evaluations before the latest line that have all of them."""
        return [tuple(line[name] for name in names) for line in self._evaluations if line.keys() >= set(names)]
