"""The online loop of PPO, GRPO, online DPO and others: sample, score, annotate, compute advantages, update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from rlhf.algo.kl import next_kl_coef, next_penalty_coef
from rlhf.algo.objective import Coefs, Objective, compute_advantages, select_training_rows
from rlhf.config.algorithm import AdaptiveKl, Online, PenaltyLoss
from rlhf.config.sections import TrainConfig
from rlhf.errors import NonFiniteScores, RewardError
from rlhf.models.kernels.cast import weights_cast_once
from rlhf.models.policy_models import Ema, Models
from rlhf.rewards.source import RewardSource
from rlhf.runtime.engine import TrainableModel, lr_factor
from rlhf.runtime.micro_batch import AdaptiveMicroBatch
from rlhf.runtime.seeding import derive_seed, generator
from rlhf.sampling.sampler import Sampler
from rlhf.tracking.metrics import Metrics
from rlhf.training.collect import Collected, CompletionPrefetcher, Draw, collect, live_tokens, sample_and_score_in_parts
from rlhf.training.losses import DemonstrationLoss, count_tokens, online_losses
from rlhf.training.rollout import compute_logprobs_and_values, rollout_metrics, sample_records, selection_metrics
from rlhf.training.session import Session
from rlhf.training.step import LossBatch, optimizer_step
from rlhf.types import Completions, Demonstrations, Experience, Prompts, Rollout, Scores

NO_GRAD_BATCH_MULTIPLIER = 4  # size of a pass without gradient, in micro-batches


@dataclass(frozen=True, kw_only=True)
class OnlineRun:
    """The collaborators of an online run, made by rlhf.factory."""

    config: TrainConfig
    algorithm: Online
    session: Session
    prompts: Callable[[int], Prompts]  # the prompts of a step
    refill: Callable[[int], Prompts]  # as many other prompts; rounds count from 1 over the whole run
    ptx: Callable[[int], Demonstrations] | None  # the demonstrations mixed into a step (PPO-ptx)
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

    @property
    def coefs(self) -> Coefs:
        """Return the current KL coefficients."""
        return Coefs(kl=self.session.state.kl_coef, penalty=self.session.state.penalty_coef)


def train(run: OnlineRun) -> None:
    """Run the remaining training steps."""
    phase = run.session.recorder.phase
    for step in run.session.steps():
        collected = _collect(run, step)  # Completions [B, T], Scores [B]
        if collected is None:
            continue
        with phase("annotate"):
            rollout = _annotate(collected, run)  # + log-probs, values
        experience = compute_advantages(
            rollout, run.algorithm, run.coefs, ratio_cap=_ratio_cap(run)
        )  # + rewards, advantages, returns
        metrics = rollout_metrics(experience, collected.scores, run.models, coef=run.coefs.kl)
        metrics.merge(selection_metrics(experience, run.algorithm))
        metrics.merge(collected.metrics)
        with phase("update"):
            metrics.merge(update(experience, run, step))  # epochs x minibatches of optimizer steps
        _update_controllers(run, metrics, len(rollout), step)
        run.session.state.completions += len(rollout) + collected.extra
        _report(run, step, rollout, metrics, tokens=live_tokens(rollout))


def _collect(run: OnlineRun, step: int) -> Collected | None:
    """Sample and score the step's completions; None if a score is NaN or infinite, in which case the step is skipped.

    Raises:
        RewardError: the reward gave no scores; the run is saved as it was before the step.
    """
    size = run.config.sampling.completions_per_prompt
    try:
        return collect(run.prompts(step), _draw(run, step), partial(_refill, run, step), run.algorithm, group_size=size)
    except NonFiniteScores as error:
        run.session.skip_step(error)
        run.session.state.completions += len(run.prompts(step)) * size
        run.session.report(_counts(run), tokens=0)
        return None
    except RewardError as error:
        raise run.session.save_and_explain(error) from error


def _annotate(collected: Collected, run: OnlineRun) -> Rollout:
    return run.passes.run(
        lambda size: compute_logprobs_and_values(
            collected.completions,
            collected.scores,
            run.models,
            cut=lambda rows: run.passes.cut(rows, size),
            baselines=collected.baselines,
            old_log_probs=run.config.sampling.old_log_probs if run.ahead is None else "trainer",
        )
    )


def _draw(run: OnlineRun, step: int) -> Draw:
    """Return the function that samples and scores completions for this step."""
    phase = run.session.recorder.phase

    def draw(prompts: Prompts, *names: int | str, group_size: int, greedy: bool = False) -> tuple[Completions, Scores]:
        key = sampling_key(run.config, step, *names)

        def sample(part: Prompts) -> Completions:
            return run.sampler.sample(part, key=key, group_size=group_size, greedy=greedy)

        if run.config.overlap.reward_parts > 1:
            with phase("sample"):
                return sample_and_score_in_parts(prompts, sample, run.reward, parts=run.config.overlap.reward_parts)
        with phase("sample"):
            completions = sample(prompts) if run.ahead is None else run.ahead.take(step)
        with phase("score"):
            return completions, run.reward(completions)

    return draw


def sampling_key(config: TrainConfig, step: int, *names: int | str) -> int:
    """Derive the seed for sampling this step's completions."""
    return derive_seed(config.run.seed, "train", step, *names)


def _ratio_cap(run: OnlineRun) -> float | None:
    return None if run.ahead is None else run.config.overlap.ratio_cap


def _refill(run: OnlineRun, step: int, number: int) -> Prompts:
    """Return prompts that no other refill round of any step gets (until an epoch of them ends)."""
    return run.refill((step - 1) * run.algorithm.refill_rounds + number)


def update(experience: Experience, run: OnlineRun, step: int) -> Metrics:
    """Train for several shuffled epochs on one experience, stopping early if the policy moves too far (target_kl).

    Where there is nothing to train on (all groups tied, no completion above the threshold, all of them masked), the
    policy does not change, nor does a critic that has nothing to train on either.
    """
    batch, metrics = run.config.batch, Metrics()
    training_rows = select_training_rows(experience, run.algorithm)  # rows, or pairs of them
    losses = online_losses(run.models, run.objective, run.coefs)
    trained = _trained(run, step)
    minibatch_size = max(1, -(-len(training_rows) // batch.minibatches))
    steps, steps_taken, tokens, stopped = 0, 0, 0, False
    for epoch in range(batch.epochs):
        order = torch.randperm(len(training_rows), generator=generator(run.config.run.seed, "order", step, epoch))
        for indices in order.split(minibatch_size) if len(order) else ():
            minibatch = training_rows.rows(indices.sort().values)  # keeps rows of one prompt together: they share it
            parts = [*(LossBatch(minibatch, loss) for loss in losses), *_ptx(run, step)]
            with weights_cast_once():
                step_metrics = optimizer_step(
                    parts, trained, micro_batch_size=run.rows, lr_factor=_lr_factor(run, step), ranks=run.session.ranks
                )
            run.session.check_update(step_metrics)
            if steps == 0:
                deviation = run.session.ranks.largest(losses[0].ratio_deviation)
                metrics.add("policy/first_ratio_deviation", deviation)
            metrics.merge(step_metrics)
            steps += 1
            steps_taken += "policy/lr" in step_metrics
            tokens += count_tokens(minibatch)
            stopped = run.algorithm.target_kl is not None and step_metrics["kl/old"] > 1.5 * run.algorithm.target_kl
            if stopped:
                break
        if stopped:
            break
    metrics.add("policy/optimizer_steps", float(steps_taken))
    metrics.add("completion/trained_tokens", float(tokens))
    if steps:
        metrics.add("kl/old_last", step_metrics["kl/old"])
    if run.algorithm.target_kl is not None:
        metrics.add("policy/early_stop", float(stopped))
    return metrics


def _trained(run: OnlineRun, step: int) -> list[TrainableModel]:
    """Return the models that this step trains: the critic alone during its warm-up."""
    policy = [] if _is_warming_up(run, step) else [run.policy]
    return policy + ([run.critic] if run.critic is not None else [])


def _is_warming_up(run: OnlineRun, step: int) -> bool:
    """Check whether this step trains the critic alone."""
    return run.critic is not None and step <= run.config.critic.warmup_steps


def _ptx(run: OnlineRun, step: int) -> list[LossBatch]:
    if run.ptx is None:
        return []
    loss = DemonstrationLoss(run.models, aggregate="token_mean", coef=run.algorithm.ptx_coef, name="ptx")
    return [LossBatch(run.ptx(step), loss)]


def _lr_factor(run: OnlineRun, step: int) -> float:
    schedule = run.config.schedule
    total = run.session.total_steps
    return lr_factor(step, steps=total, warmup_steps=schedule.warmup_steps, decay=schedule.decay)


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


def _report(run: OnlineRun, step: int, rollout: Rollout, metrics: Metrics, *, tokens: int) -> None:
    run.session.report(metrics.values() | _counts(run), tokens=tokens)
    if step % run.config.logging.every == 0:
        records = sample_records(rollout, run.decode, step=step, split="train", limit=run.config.logging.samples)
        run.session.recorder.samples(records)


def _counts(run: OnlineRun) -> dict[str, float]:
    state = run.session.state
    return {
        "completion/count": float(state.completions),
        "skipped/nonfinite": float(state.skipped),
        "skipped/zero_gradient": float(state.idle),
        "skipped/unscored": float(state.unscored),
    }
