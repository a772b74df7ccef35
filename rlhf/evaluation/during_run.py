"""Evaluation while a run trains: completions of held-out prompts, and the loss on held-out data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from math import nan
from typing import Any

from rlhf.config.sections import TrainConfig
from rlhf.data.datasets import RowSet, sequential_batches
from rlhf.evaluation.evaluate import evaluate_loss, evaluate_policy
from rlhf.models.policy_models import Ema, Models
from rlhf.rewards.source import RewardSource
from rlhf.runtime.distributed import Distributed
from rlhf.runtime.memory import AdaptiveMicroBatch
from rlhf.runtime.seeding import derive_seed
from rlhf.sampling.sampler import Sampler
from rlhf.training.online_run import NO_GRAD_BATCH_MULTIPLIER
from rlhf.training.session import Recorder
from rlhf.training.step import Loss
from rlhf.types import Prompts

RowTable = dict[str, list[float]]
"""The values of single held-out rows, by name."""
HeldOut = Callable[[RowTable], dict[str, float]]
"""Evaluates the current policy on held-out data; returns the metrics and fills in the values of single rows."""


def no_held_out(rows: RowTable) -> dict[str, float]:
    """Return no metrics: there are no held-out data."""
    return {}


class PromptEvaluator:
    """Evaluation of the policy on held-out prompts during a run; it does nothing if the run has none."""

    def __init__(
        self,
        config: TrainConfig,
        batches: Sequence[Prompts],
        models: Models,
        sampler: Sampler,
        *,
        judge: RewardSource,
        proxy: RewardSource | None,
        cost: RewardSource | None = None,
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        """Take the held-out prompts.

        `proxy` is the reward that is trained on, if the judge is another one; `cost` gives the costs, if the run has
        a source of them.
        """
        self.config, self.batches, self.models, self.sampler = config, batches, models, sampler
        self.judge, self.proxy, self.cost, self.decode = judge, proxy, cost, decode
        self.key = derive_seed(config.run.seed, "eval")
        self.record: Callable[[list[dict[str, object]]], None] = lambda _: None
        self.passes = AdaptiveMicroBatch(
            config.batch.micro_batch_size * NO_GRAD_BATCH_MULTIPLIER, what="an evaluation pass"
        )
        self.rows: RowTable = {}  # of the latest evaluation: the score of each prompt, NaN if no verifier applies

    def connect(self, recorder: Recorder) -> None:
        """Send the held-out samples, and messages about memory, to the recorder of the run."""
        self.record, self.passes.note = recorder.samples, recorder.note

    def __call__(self, step: int) -> dict[str, float]:
        """Evaluate the current policy, record samples of its completions, and return the metrics."""
        if not self.batches:
            return {}
        evaluation = evaluate_policy(
            self.batches,
            self.sampler,
            self.models,
            self.judge,
            proxy=self.proxy,
            cost=self.cost,
            key=self.key,
            greedy=self.config.eval.greedy,
            rows_per_pass=self.passes,
        )
        unjudged = evaluation.scores.values.isnan()
        self.rows = {"score": evaluation.rollout.scores.masked_fill(unjudged, nan).tolist()}
        self.record(evaluation.records(self.decode, step=step, split="eval", limit=self.config.eval.samples))
        return evaluation.metrics


def with_average(evaluate: PromptEvaluator, ema: Ema | None) -> Callable[[int], dict[str, float]]:
    """Make `evaluate` use the moving average of the weights, if there is one."""
    if ema is None:
        return evaluate

    def evaluate_average(step: int) -> dict[str, float]:
        with ema.applied():
            return evaluate(step)

    return evaluate_average


class OfflineEvaluation:
    """Evaluation during an offline run: the held-out loss and, with prompts and a judge, sampled completions.

    The moving average of the weights is evaluated, if there is one.
    """

    def __init__(self, held_out: HeldOut, prompts: PromptEvaluator | None, ema: Ema | None) -> None:
        """Take the evaluations on held-out data and on held-out prompts, and the average of the weights."""
        self.held_out, self.prompts, self.ema = held_out, prompts, ema
        self.rows: RowTable = {}  # of the latest evaluation

    def connect(self, recorder: Recorder) -> None:
        """Send the held-out samples to the recorder of the run."""
        if self.prompts is not None:
            self.prompts.connect(recorder)

    def __call__(self, step: int) -> dict[str, float]:
        """Evaluate the current policy; return the metrics."""
        self.rows = {}
        with self.ema.applied() if self.ema is not None else nullcontext():
            metrics = self.held_out(self.rows) | (self.prompts(step) if self.prompts is not None else {})
        self.rows |= self.prompts.rows if self.prompts is not None else {}
        return metrics


class PairEvaluation:
    """Evaluation of a reward model on held-out pairs or labelled steps during its run; nothing if the run has none."""

    def __init__(self, pairs: RowSet[Any] | None, loss: Loss, size: int, ranks: Distributed) -> None:
        """Take the pairs, `size` of which are read in one pass."""
        self.pairs, self.loss, self.size, self.ranks = pairs, loss, size, ranks
        self.rows: RowTable = {}  # of the latest evaluation

    def __call__(self, step: int) -> dict[str, float]:
        """Evaluate the current model; return the metrics."""
        if self.pairs is None:
            return {}
        return evaluate_loss(sequential_batches(self.pairs, self.size), self.loss, self.ranks, rows=self.rows)
