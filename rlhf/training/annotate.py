"""Annotate scored completions: log-probabilities of policy and reference, and values, before any update."""

from __future__ import annotations

from rlhf.training.online_run import OnlineRun
from rlhf.training.rollout import Collected, compute_logprobs_and_values
from rlhf.types import Rollout


def annotate(run: OnlineRun, collected: Collected) -> Rollout:
    """Add log-probabilities of policy and reference, and values, in passes as large as memory allows."""
    is_off_policy = run.ahead is not None or bool(collected.hinted.any()) or run.correction is not None
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
