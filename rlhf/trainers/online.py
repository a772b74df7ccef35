"""The online loop: sample, score, annotate, credit, update; then again. PPO, GRPO, RLOO and kin by configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from rlhf.algo.kl import next_kl_coef, next_penalty_coef
from rlhf.algo.objective import Coefs, Objective, credit
from rlhf.config.algorithm import AdaptiveKl, Online, PenaltyLoss
from rlhf.config.sections import TrainConfig
from rlhf.models.bundle import Ema, Models
from rlhf.rewards.source import RewardSource
from rlhf.rollout import annotate, sample_records
from rlhf.runtime.engine import Trained, lr_factor
from rlhf.runtime.metrics import Metrics
from rlhf.runtime.seeding import derive, generator
from rlhf.runtime.session import Session
from rlhf.runtime.step import Part, optimizer_step
from rlhf.sampling.sampler import Sampler
from rlhf.trainers.collect import Draw, collect, live_tokens
from rlhf.trainers.losses import DemonstrationLoss, OnlineLoss
from rlhf.trainers.observe import observe
from rlhf.types import Completions, Demonstrations, Experience, Prompts, Rollout, Scores

ROWS_PER_PASS = 4  # micro-batches that fit where no gradient is kept


@dataclass(frozen=True, kw_only=True)
class OnlineRun:
    """The collaborators of an online run, made by rlhf.build."""

    config: TrainConfig
    algorithm: Online
    session: Session
    prompts: Callable[[int], Prompts]  # the prompts of a step
    refill: Callable[[int], Prompts]  # as many others, counted from 1 over all refilling rounds of the run
    ptx: Callable[[int], Demonstrations] | None  # the demonstrations mixed into a step (PPO-ptx)
    sampler: Sampler
    reward: RewardSource
    models: Models
    policy: Trained
    critic: Trained | None  # None without one, and where it shares the policy's backbone
    objective: Objective
    ema: Ema | None
    decode: Callable[[Sequence[int]], str]  # token ids to text, for samples.jsonl
    export: Callable[[Path], None]  # writes the trained model as an ordinary folder

    @property
    def coefs(self) -> Coefs:
        """The coefficients of this step."""
        return Coefs(kl=self.session.state.kl_coef, penalty=self.session.state.penalty_coef)


def train(run: OnlineRun) -> None:
    """Every step of the run, from where it stands."""
    phase = run.session.recorder.phase
    rows = run.config.batch.micro_batch_size * ROWS_PER_PASS
    for step in run.session.steps():
        found = collect(  # Completions [B, T], Scores [B]
            run.prompts(step),
            _draw(run, step),
            partial(_refill, run, step),
            run.algorithm,
            group_size=run.config.sampling.completions_per_prompt,
        )
        with phase("annotate"):
            rollout = annotate(  # + log-probs, values
                found.completions, found.scores, run.models, rows_per_pass=rows, baselines=found.baselines
            )
        experience = credit(rollout, run.algorithm, run.coefs)  # + rewards, advantages, returns
        metrics = observe(experience, found.scores, run.models, coef=run.coefs.kl)
        metrics.merge(found.metrics)
        with phase("update"):
            metrics.merge(update(experience, run, step))  # epochs x minibatches of optimizer steps
        _control(run, metrics, len(rollout))
        run.session.state.completions += len(rollout) + found.extra
        _report(run, step, rollout, metrics, tokens=live_tokens(rollout))


def _draw(run: OnlineRun, step: int) -> Draw:
    """Sampling and scoring in one step's name."""
    phase = run.session.recorder.phase

    def draw(prompts: Prompts, *names: int | str, group_size: int, greedy: bool = False) -> tuple[Completions, Scores]:
        key = derive(run.config.run.seed, "train", step, *names)
        with phase("sample"):
            completions = run.sampler.sample(prompts, key=key, group_size=group_size, greedy=greedy)
        with phase("score"):
            return completions, run.reward(completions)

    return draw


def _refill(run: OnlineRun, step: int, number: int) -> Prompts:
    """Prompts that no other round of any step has (until an epoch of them ends)."""
    return run.refill((step - 1) * run.algorithm.refill_rounds + number)


def update(experience: Experience, run: OnlineRun, step: int) -> Metrics:
    """Several shuffled epochs over one experience; ended early where the policy has moved too far (target_kl)."""
    batch, metrics = run.config.batch, Metrics()
    loss = OnlineLoss(run.models, run.objective, run.coefs)
    trained = _trained(run, step)
    rows = -(-len(experience) // batch.minibatches)
    steps, stopped = 0, False
    for epoch in range(batch.epochs):
        order = torch.randperm(len(experience), generator=generator(run.config.run.seed, "order", step, epoch))
        for minibatch in experience.split(rows, order):
            parts = [Part(minibatch, loss), *_ptx(run, step)]
            seen = optimizer_step(
                parts,
                trained,
                micro_batch_size=batch.micro_batch_size,
                lr_factor=_lr_factor(run, step),
                ranks=run.session.ranks,
            )
            if steps == 0:
                deviation = run.session.ranks.largest(loss.ratio_deviation)
                metrics.add("policy/first_ratio_deviation", deviation)
            metrics.merge(seen)
            steps += 1
            stopped = run.algorithm.target_kl is not None and seen["kl/old"] > 1.5 * run.algorithm.target_kl
            if stopped:
                break
        if stopped:
            break
    metrics.add("policy/optimizer_steps", float(steps))
    metrics.add("kl/old_last", seen["kl/old"])
    if run.algorithm.target_kl is not None:
        metrics.add("policy/early_stop", float(stopped))
    return metrics


def _trained(run: OnlineRun, step: int) -> list[Trained]:
    """The models that step now: the critic alone during its warm-up."""
    warming = run.critic is not None and step <= run.config.critic.warmup_steps
    return ([] if warming else [run.policy]) + ([run.critic] if run.critic is not None else [])


def _ptx(run: OnlineRun, step: int) -> list[Part]:
    if run.ptx is None:
        return []
    loss = DemonstrationLoss(run.models, aggregate="token_mean", coef=run.algorithm.ptx_coef, name="ptx")
    return [Part(run.ptx(step), loss)]


def _lr_factor(run: OnlineRun, step: int) -> float:
    schedule = run.config.schedule
    total = run.session.total_steps
    return lr_factor(step, steps=total, warmup_steps=schedule.warmup_steps, decay=schedule.decay)


def _control(run: OnlineRun, metrics: Metrics, completions: int) -> None:
    """Move the coefficients for the next step, and count what was skipped."""
    state = run.session.state
    metrics.add("kl/coef", state.kl_coef)
    controller = run.algorithm.kl.controller
    if isinstance(controller, AdaptiveKl):
        state.kl_coef = next_kl_coef(
            state.kl_coef,
            kl=metrics["kl/reference"],
            target=controller.target,
            horizon=controller.horizon,
            completions=completions,
        )
    if isinstance(run.algorithm.policy_loss, PenaltyLoss):
        metrics.add("kl/penalty_coef", state.penalty_coef)
        state.penalty_coef = next_penalty_coef(
            state.penalty_coef, kl=metrics["kl/old_last"], target=run.algorithm.policy_loss.target
        )
    if "skipped/nonfinite" in metrics:
        state.skipped += round(metrics.means()["skipped/nonfinite"].total)
    if run.ema is not None:
        run.ema.update()


def _report(run: OnlineRun, step: int, rollout: Rollout, metrics: Metrics, *, tokens: int) -> None:
    state = run.session.state
    values = metrics.values() | {
        "completion/count": float(state.completions),
        "skipped/nonfinite": float(state.skipped),
    }
    run.session.report(values, tokens=tokens)
    if step % run.config.logging.every == 0:
        records = sample_records(rollout, run.decode, step=step, split="train", limit=run.config.logging.samples)
        run.session.recorder.samples(records)
