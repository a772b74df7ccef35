"""An online run: its collaborators, and the parts of a step around the update. The loop is in online.py.

Among the collaborators: work done at the same time (scoring one part while the next is sampled, sampling during the
update before), and the prompts of a step where unsolved ones are replayed, kept as part of the run's state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from rlhf.algo.kl import Coefs
from rlhf.algorithms.online import Online
from rlhf.algorithms.rescue import ReplayConfig
from rlhf.algorithms.sft import Sft
from rlhf.batching import concat
from rlhf.config.sections import OnlineConfig
from rlhf.data.datasets import epoch_order
from rlhf.data.prompts import PromptSet
from rlhf.models.policy_models import Ema, Models
from rlhf.objective import Objective
from rlhf.rewards.source import RewardSource
from rlhf.runtime.device import SideStream
from rlhf.runtime.engine import TrainableModel, lr_factor
from rlhf.runtime.memory import AdaptiveMicroBatch
from rlhf.runtime.seeding import generator
from rlhf.sampling.sampler import Sampler
from rlhf.tracking.metrics import Metrics
from rlhf.training.losses import DemonstrationLoss, OnlineLoss, SampledPairLoss
from rlhf.training.rollout import Collected, compute_logprobs_and_values, live_tokens, sample_records
from rlhf.training.session import Session, TrainState
from rlhf.training.step import LossBatch, count_tokens
from rlhf.training.watch import WatchingJudge
from rlhf.types import Completions, Demonstrations, Experience, Prompts, Rollout, SampledPairs, Scores

NO_GRAD_BATCH_MULTIPLIER = 4  # size of a pass without gradient, in micro-batches


@dataclass(frozen=True, kw_only=True)
class OnlineRun:
    """The collaborators of an online run, made by rlhf.factory."""

    config: OnlineConfig
    session: Session
    prompts: Callable[[int], Prompts]  # the prompts of a step
    queue: PromptQueue | None  # replays unsolved prompts (algorithm.rescue), and has the prompts with hints
    refill: Callable[[int], Prompts]  # as many other prompts; rounds count from 1 over the whole run
    ptx: Callable[[int, int], Demonstrations] | None  # those mixed into an optimizer step (PPO-ptx), by step and number
    sampler: Sampler
    ahead: CompletionPrefetcher | None  # samples the next step's completions during the update
    reward: RewardSource
    models: Models
    policy: TrainableModel
    critic: TrainableModel | None  # None if there is none, or if it shares the policy's backbone
    objective: Objective
    ema: Ema | None
    rows: AdaptiveMicroBatch  # micro-batch of a pass with gradient
    passes: AdaptiveMicroBatch  # micro-batch of a pass without gradient
    decode: Callable[[Sequence[int]], str]  # token ids to text, for samples.jsonl
    export: Callable[[Path], None]  # writes the trained model as a standard model folder
    watch: WatchingJudge | None = None  # looks at the scored completions; nothing is trained on its scores

    @property
    def algorithm(self) -> Online:
        """Return the algorithm of the configuration."""
        return self.config.algorithm

    @property
    def coefs(self) -> Coefs:
        """Return the current KL coefficients."""
        return Coefs(kl=self.session.state.kl_coef, penalty=self.session.state.penalty_coef)

    @property
    def ratio_cap(self) -> float | None:
        """Return the cap of the importance weight of completions sampled by an older policy; None if none are."""
        return None if self.ahead is None else self.config.overlap.ratio_cap


def annotate(run: OnlineRun, collected: Collected) -> Rollout:
    """Add log-probabilities of policy and reference, and values, in passes as large as memory allows."""
    is_off_policy = run.ahead is not None or bool(collected.hinted.any())
    with run.session.recorder.phase("annotate"):
        return run.passes.run(
            lambda size: compute_logprobs_and_values(
                collected.completions,
                collected.scores,
                run.models,
                cut=lambda rows: run.passes.cut(rows, size),
                baselines=collected.baselines,
                hinted=collected.hinted,
                old_log_probs="trainer" if is_off_policy else run.config.sampling.old_log_probs,
            )
        )


def trained_models(run: OnlineRun, step: int, epoch: int) -> list[TrainableModel]:
    """Return the models to train: the critic alone during its warm-up, and once a step that is searched is taken."""
    stepped = epoch > 0 and run.algorithm.policy_loss.searches
    policy = [] if _is_warming_up(run, step) or stepped else [run.policy]
    return policy + ([run.critic] if run.critic is not None else [])


def demonstrations(run: OnlineRun, step: int, update: int) -> list[LossBatch]:
    """Return the demonstrations mixed into an optimizer step with their loss (PPO-ptx), or nothing.

    Args:
        run: the run.
        step: the training step, counted from 1.
        update: the number of the optimizer step in it, over all epochs, from 0.
    """
    if run.ptx is None:
        return []
    loss = DemonstrationLoss(run.models, Sft(), coef=run.algorithm.ptx_coef, name="ptx")
    return [LossBatch(run.ptx(step, update), loss)]


def row_order(run: OnlineRun, rows: int, step: int, epoch: int) -> Int[Tensor, " rows"]:
    """Return the order in which an epoch deals the rows to minibatches: a random one, or as they were sampled."""
    if not run.config.batch.shuffle:
        return torch.arange(rows)
    return torch.randperm(rows, generator=generator(run.config.run.seed, "order", step, epoch))


def lr_factor_at(run: OnlineRun, step: int) -> float:
    """Return the schedule's factor of the learning rates at this step."""
    schedule = run.config.schedule
    total = run.session.total_steps
    factor = lr_factor(step, steps=total, warmup_steps=schedule.warmup_steps, decay=schedule.decay)
    return factor * run.session.state.lr_scale


@dataclass
class UpdateRecord:
    """The metrics of one update, collected over its optimizer steps, and whether it is to stop early."""

    run: OnlineRun
    metrics: Metrics = field(default_factory=Metrics)
    steps: int = 0
    steps_taken: int = 0  # less those skipped for a NaN, or in which the policy had no gradient
    tokens: int = 0
    last_kl: float = 0.0
    should_stop: bool = False  # the policy has moved too far from the one that sampled (target_kl)

    def add(
        self, step_metrics: Metrics, minibatch: Experience | SampledPairs, policy_loss: OnlineLoss | SampledPairLoss
    ) -> None:
        """Count an optimizer step.

        Raises:
            DivergenceError: too many in a row could not be taken.
        """
        target_kl = self.run.algorithm.target_kl
        self.run.session.check_update(step_metrics)
        if self.steps == 0:
            ranks, deviation = self.run.session.ranks, policy_loss.ratio_deviation
            largest = deviation if ranks.world == 1 else ranks.largest(float(deviation))
            self.metrics.add("policy/first_ratio_deviation", largest)
        self.metrics.merge(step_metrics)
        self.steps += 1
        self.steps_taken += "policy/lr" in step_metrics
        self.tokens += count_tokens(minibatch)
        self.last_kl = step_metrics["kl/old"]
        self.should_stop = target_kl is not None and self.last_kl > 1.5 * target_kl

    def finish(self) -> Metrics:
        """Return the metrics of the whole update."""
        self.metrics.add("policy/optimizer_steps", float(self.steps_taken))
        self.metrics.add("completion/trained_tokens", float(self.tokens))
        if self.steps:
            self.metrics.add("kl/old_last", self.last_kl)
        if self.run.algorithm.target_kl is not None:
            self.metrics.add("policy/early_stop", float(self.should_stop))
        return self.metrics


def finish_step(run: OnlineRun, step: int, rollout: Rollout, collected: Collected, metrics: Metrics) -> None:
    """Update the KL coefficients and the moving average, count the completions, and report the step."""
    if run.queue is not None:
        metrics.merge(run.queue.finish(collected.failed, collected.rescued))
    _update_controllers(run, metrics, len(rollout), step)
    run.session.state.completions += len(rollout) + collected.extra
    run.session.report(metrics.values() | counts(run), tokens=live_tokens(rollout))
    if step % run.config.logging.every == 0:
        records = sample_records(rollout, run.decode, step=step, split="train", limit=run.config.logging.samples)
        run.session.recorder.samples(records)


def _is_warming_up(run: OnlineRun, step: int) -> bool:
    """Check whether this step trains the critic alone."""
    return run.critic is not None and step <= run.config.critic.warmup_steps


def _update_controllers(run: OnlineRun, metrics: Metrics, completions: int, step: int) -> None:
    """Update the KL coefficients for the next step, and the moving average of the weights.

    A controller reacts to how far the policy has moved. Coefficients stay as they are while the policy may not move (in
    the critic's warm-up), and that of the penalty also after a step without an optimizer step: both KLs are then 0
    by construction.
    """
    state = run.session.state
    metrics.add("kl/coef", state.kl_coef)
    controller, loss = run.algorithm.kl.controller, run.algorithm.policy_loss
    if controller.adapts and not _is_warming_up(run, step):
        state.kl_coef = controller.next_coef(state.kl_coef, kl=metrics["kl/reference"], completions=completions)
    if loss.coef_metric:
        metrics.add(loss.coef_metric, state.penalty_coef)
        if metrics["policy/optimizer_steps"] > 0:
            state.penalty_coef = loss.next_coef(state.penalty_coef, kl=metrics["kl/old_last"])
    if run.ema is not None:
        run.ema.update()


def counts(run: OnlineRun) -> dict[str, float]:
    """Return the run's counts of completions and of skipped steps."""
    state = run.session.state
    return {
        "completion/count": float(state.completions),
        "skipped/nonfinite": float(state.skipped),
        "skipped/zero_gradient": float(state.idle),
        "skipped/unscored": float(state.unscored),
    }


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
    return merged, Scores(
        values=torch.cat([scores.values for scores in all_scores]),
        parts={name: torch.cat([scores.parts[name] for scores in all_scores]) for name in all_scores[0].parts},
    )


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
        completions = self._drawn[step].result()
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
