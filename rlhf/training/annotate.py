"""Annotate scored completions: log-probabilities of policy and reference, and values, before any update."""

from __future__ import annotations

from dataclasses import replace

from rlhf.algo.masked import Mean
from rlhf.errors import RewardError
from rlhf.training.online_run import OnlineRun
from rlhf.training.rollout import Collected, compute_logprobs_and_values
from rlhf.types import Rollout


def annotate(run: OnlineRun, collected: Collected) -> Rollout:
    """Add log-probabilities of policy and reference, and values, in passes as large as memory allows."""
    is_off_policy = run.ahead is not None or bool(collected.hinted.any()) or run.correction is not None
    with run.session.recorder.phase("annotate"):
        rollout = run.passes.run(
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
    return rollout if run.process is None else add_process_rewards(rollout, run, collected)


def add_process_rewards(rollout: Rollout, run: OnlineRun, collected: Collected) -> Rollout:
    """Add the rewards of steps; rank 0 grades for all.

    Raises:
        RewardError: the grader fails; the run is saved as it was before the step.
    """
    assert run.process is not None
    grade = run.process
    try:
        with run.session.recorder.phase("score"):
            rewards, _ = run.models.engine.ranks.on_main(lambda: (grade(rollout), {}))
    except RewardError as error:
        raise run.session.save_and_explain(error) from error
    rewards = rewards.to(rollout.scores.dtype)
    collected.metrics.update({"process/reward": Mean.of(rewards.sum(dim=1))})
    collected.metrics.update({"process/steps": Mean.of((rewards != 0).sum(dim=1))})
    return replace(rollout, process_rewards=rewards)
