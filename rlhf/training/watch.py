"""A judge that watches training completions: its scores are metrics, and nothing is trained on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf.algo.masked import Mean
from rlhf.errors import RewardError
from rlhf.rewards.source import RewardSource
from rlhf.runtime.seeding import generator
from rlhf.tracking.metrics import Metrics
from rlhf.types import Completions, Scores


def watch_metrics(proxy: Float[Tensor, " N"], watched: Float[Tensor, " N"]) -> dict[str, Mean]:
    """Compare the scores that are trained on with the watching judge's, on the same completions.

    watch/score is the judge's mean, watch/gap the proxy's mean less the judge's, and watch/correlation Pearson's
    correlation of the two, if both vary. The gap means something if both are on one scale, as with
    calibrated reward models; its changes do in any case. Completions without a score of the proxy (NaN) count in
    the first alone.
    """
    metrics = {"watch/score": Mean.of(watched)}
    known = ~proxy.isnan()
    proxy, watched = proxy[known].double(), watched[known].double()
    metrics["watch/gap"] = Mean.of(proxy - watched)
    if len(proxy) > 1 and bool(proxy.min() < proxy.max()) and bool(watched.min() < watched.max()):
        metrics["watch/correlation"] = Mean(float(torch.corrcoef(torch.stack([proxy, watched]))[0, 1]), 1.0)
    return metrics


@dataclass(frozen=True, kw_only=True)
class WatchingJudge:
    """Scores `rows` completions of every `every`-th step; `warn` receives a message when it could not."""

    source: RewardSource
    rows: int
    every: int
    seed: int
    warn: Callable[[str], None]
    raw: str = "raw"  # the part of the training scores to compare with: before shaping, and not standardized

    def __call__(self, completions: Completions, scores: Scores, step: int) -> Metrics:
        """Compute the metrics of a step; empty if it is not watched.

        The completions are drawn by the seed and the step alone, so that a resumed run watches the same ones. They are
        compared by the score before shaping. If the judge fails, training goes on and watch/failed is 1.
        """
        if step % self.every:
            return Metrics()
        order = torch.randperm(len(completions), generator=generator(self.seed, "watch", step))
        index = order[completions.counted[order]][: self.rows].sort().values
        metrics = Metrics()
        if not len(index):
            return metrics
        try:
            watched = self.source(_ungrouped(completions, index)).values
        except RewardError as error:
            self.warn(f"warning: reward.watch could not score step {step}: {error}")
            metrics.add("watch/failed", 1.0)
            return metrics
        metrics.add("watch/failed", 0.0)
        metrics.update(watch_metrics(scores.parts.get(self.raw, scores.values)[index], watched))
        return metrics


def _ungrouped(completions: Completions, index: Tensor) -> Completions:
    """Select rows, which are then no longer whole groups of a prompt."""
    return replace(completions.rows(index), group_size=1)
