"""An online run: its collaborators, and the parts of a step around the update. The loop is in online.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from rlhf.algo.functions import AdvantageFunction
from rlhf.algo.kl import Coefs, next_kl_coef, next_penalty_coef
from rlhf.algo.objective import Objective
from rlhf.config.algorithm import AdaptiveKl, Online, PenaltyLoss, TrustRegionLoss
from rlhf.config.sections import OnlineConfig
from rlhf.models.policy_models import Ema, Models
from rlhf.rewards.source import RewardSource
from rlhf.rewards.watch import WatchingJudge
from rlhf.runtime.engine import TrainableModel, lr_factor
from rlhf.runtime.micro_batch import AdaptiveMicroBatch
from rlhf.runtime.seeding import generator
from rlhf.sampling.sampler import Sampler
from rlhf.tracking.metrics import Metrics
from rlhf.training.losses import DemonstrationLoss, OnlineLoss, SampledPairLoss
from rlhf.training.overlap import CompletionPrefetcher
from rlhf.training.replay import PromptQueue
from rlhf.training.rollout import Collected, compute_logprobs_and_values, live_tokens, sample_records
from rlhf.training.session import Session
from rlhf.training.step import LossBatch, count_tokens
from rlhf.types import Demonstrations, Experience, Prompts, Rollout, SampledPairs

NO_GRAD_BATCH_MULTIPLIER = 4  # size of a pass without gradient, in micro-batches


@dataclass(frozen=True, kw_only=True)
class OnlineRun:
    """The collaborators of an online run, made by rlhf.factory."""

    config: OnlineConfig
    session: Session
    prompts: Callable[[int], Prompts]  # the prompts of a step
    queue: PromptQueue | None  # replays unsolved prompts (algorithm.rescue), and has the prompts with hints
    refill: Callable[[int], Prompts]  # as many other prompts; rounds count from 1 over the whole run
    ptx: Callable[[int], Demonstrations] | None  # the demonstrations mixed into a step (PPO-ptx)
    sampler: Sampler
    ahead: CompletionPrefetcher | None  # samples the next step's completions during the update
    reward: RewardSource
    models: Models
    policy: TrainableModel
    critic: TrainableModel | None  # None if there is none, or if it shares the policy's backbone
    objective: Objective
    advantage_function: AdvantageFunction | None  # where advantage.type is function
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
    """Return the models to train: the critic alone during its warm-up, and once a trust region's one step is taken."""
    stepped = epoch > 0 and isinstance(run.algorithm.policy_loss, TrustRegionLoss)
    policy = [] if _is_warming_up(run, step) or stepped else [run.policy]
    return policy + ([run.critic] if run.critic is not None else [])


def demonstrations(run: OnlineRun, step: int) -> list[LossBatch]:
    """Return the demonstrations mixed into this step with their loss (PPO-ptx), or nothing."""
    if run.ptx is None:
        return []
    loss = DemonstrationLoss(run.models, aggregate="token_mean", coef=run.algorithm.ptx_coef, name="ptx")
    return [LossBatch(run.ptx(step), loss)]


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
    controller = run.algorithm.kl.controller
    if isinstance(controller, AdaptiveKl) and not _is_warming_up(run, step):
        state.kl_coef = next_kl_coef(
            state.kl_coef,
            kl=metrics["kl/reference"],
            target=controller.target,
            horizon=controller.horizon,
            completions=completions,
        )
    if isinstance(run.algorithm.policy_loss, PenaltyLoss):
        metrics.add("kl/penalty_coef", state.penalty_coef)
        if metrics["policy/optimizer_steps"] > 0:
            state.penalty_coef = next_penalty_coef(
                state.penalty_coef, kl=metrics["kl/old_last"], target=run.algorithm.policy_loss.target
            )
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
