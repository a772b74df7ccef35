"""The online loop of PPO, GRPO, online DPO and others: sample, score, annotate, compute advantages, update.

The differences between algorithms are in rlhf.algorithms, chosen by configuration; the use of devices, ranks and the
run folder is in the files beside this one and in session.py.
"""

from __future__ import annotations

from rlhf.errors import RewardError
from rlhf.experience import compute_advantages, select_training_rows
from rlhf.models.kernels.cast import weights_cast_once
from rlhf.tracking.metrics import Metrics
from rlhf.training.annotate import annotate
from rlhf.training.backtracking import Backtracking, start_backtracking
from rlhf.training.collect import sample_and_score
from rlhf.training.finish import finish_step
from rlhf.training.losses import CriticLoss, OnlineLoss, SampledPairLoss, online_losses
from rlhf.training.online_run import OnlineRun, demonstrations, epochs_together, lr_factor_at, minibatches_of
from rlhf.training.rollout import correction_metrics, rollout_metrics, selection_metrics
from rlhf.training.step import LossBatch, optimizer_step
from rlhf.training.update_record import UpdateRecord
from rlhf.types import Experience, SampledPairs


def train(run: OnlineRun) -> None:
    """Run the remaining training steps."""
    try:
        _train(run)
    finally:
        if run.episodes is not None:
            run.episodes.pool.stop()
        if run.servers is not None:
            run.servers.close()


def _train(run: OnlineRun) -> None:
    for step in run.session.steps():
        # 1. Sample completions of the step's prompts. 2. Score them.
        collected = sample_and_score(run, step)  # Completions [B, T], Scores [B]
        if collected is None:  # a score was NaN or infinite
            continue
        # 3. Annotate: log-probabilities of policy and reference, values of the critic, before any update.
        rollout = annotate(run, collected)  # Rollout [B, T]
        # 4. Compute rewards, advantages and returns.
        experience = compute_advantages(
            rollout, run.algorithm, run.coefs, correction=run.correction, **run.stale_caps
        )  # [B, T]
        metrics = rollout_metrics(experience, collected.scores, run.models, run.algorithm)
        metrics.merge(selection_metrics(experience, run.algorithm))
        metrics.merge(correction_metrics(experience, run.correction))
        metrics.merge(collected.metrics)
        # 5. Update the policy and the critic: epochs x minibatches of optimizer steps.
        with run.session.recorder.phase("update"), run.offload.update():
            metrics.merge(update(experience, run, step))
        finish_step(run, step, rollout, collected, metrics)


def update(experience: Experience, run: OnlineRun, step: int) -> Metrics:
    """Train for several epochs on one experience, stopping early if the policy moves too far (target_kl).

    If there is nothing to train on (all groups tied, no completion above the threshold, all of them masked), the
    policy does not change, nor does a critic that has nothing to train on either.

    Raises:
        RewardError: the teacher of the loss does not answer; the run is saved if no weight has changed in this step.
    """
    record = UpdateRecord(run)
    training_rows = select_training_rows(experience, run.algorithm)  # rows, or pairs of them
    backtracking = start_backtracking(run, experience, step)
    losses = online_losses(run.models, run.objective, run.coefs)  # the policy's, then a separate critic's
    update_together(training_rows, losses, record, step)
    if isinstance(training_rows, Experience) and isinstance(losses[-1], CriticLoss):
        update_critic(training_rows, losses[-1], record, step)
    return finish_update(record, losses[0], backtracking, step)


def update_together(
    training_rows: Experience | SampledPairs,
    losses: tuple[OnlineLoss | SampledPairLoss] | tuple[OnlineLoss, CriticLoss],
    record: UpdateRecord,
    step: int,
) -> None:
    """Train policy and critic for as many epochs as the policy has, or until it has moved too far (target_kl)."""
    run = record.run
    trained = [run.policy] if run.critic is None else [run.policy, run.critic]
    for epoch in range(epochs_together(run, step)):
        for number, minibatch in enumerate(minibatches_of(training_rows, run, step, epoch)):
            if isinstance(minibatch, Experience):  # not pairs of completions
                minibatch = run.algorithm.advantage.of_minibatch(minibatch)
            mixed = demonstrations(run, step, epoch * run.config.batch.minibatches + number)
            try:
                with weights_cast_once():
                    step_metrics = optimizer_step(  # forward, ratio, loss, backward, clip, step
                        [*(LossBatch(minibatch, loss) for loss in losses), *mixed],
                        trained,
                        micro_batch_size=run.rows,
                        lr_factor=lr_factor_at(run, step),
                        ranks=run.session.ranks,
                    )
            except RewardError as error:  # of a teacher
                raise run.session.explain_update(error, changed=record.steps > 0) from error
            record.add(step_metrics, minibatch, losses[0], mixed)
            if record.should_stop:
                return


def update_critic(training_rows: Experience, loss: CriticLoss, record: UpdateRecord, step: int) -> None:
    """Train the critic alone in its epochs after the policy's, even if target_kl ended those early."""
    run = record.run
    assert run.critic is not None
    epochs = max(run.config.batch.epochs, run.config.critic.epochs or 0)
    for epoch in range(epochs_together(run, step), epochs):
        for minibatch in minibatches_of(training_rows, run, step, epoch):
            with weights_cast_once():
                step_metrics = optimizer_step(
                    [LossBatch(minibatch, loss)],
                    [run.critic],
                    micro_batch_size=run.rows,
                    lr_factor=lr_factor_at(run, step),
                    ranks=run.session.ranks,
                )
            record.add_critic(step_metrics, minibatch)


def finish_update(
    record: UpdateRecord, loss: OnlineLoss | SampledPairLoss, backtracking: Backtracking | None, step: int
) -> Metrics:
    """Return the metrics of an update, after moving the policy back if it went too far; keep its ratios."""
    metrics, run = record.finish(), record.run
    if isinstance(loss, OnlineLoss) and loss.ratios is not None and step % run.config.logging.every == 0:
        figure = loss.ratios.figure(loss.objective.policy_loss, loss.coefs, run.session.ranks)
        run.session.recorder.ratios({"step": step, **figure})
    if backtracking is not None:
        backtracking.finish(metrics)
    return metrics
