"""The end of an online step: coefficients and averages move on, completions are counted, metrics are reported."""

from __future__ import annotations

from rlhf.tracking.metrics import Metrics
from rlhf.training.kl_control import update_coefficients
from rlhf.training.online_run import OnlineRun
from rlhf.training.rollout import Collected, live_tokens, sample_records
from rlhf.types import Rollout


def finish_step(run: OnlineRun, step: int, rollout: Rollout, collected: Collected, metrics: Metrics) -> None:
    """Update the KL coefficients and the moving average, count the completions, and report the step."""
    if run.queue is not None:
        metrics.merge(run.queue.finish(collected.failed, collected.rescued, collected.shares))
    update_coefficients(run, metrics, len(rollout), step)
    if run.ema is not None:
        run.ema.update()
    run.session.state.completions += len(rollout) + collected.extra
    if collected.score_moments is not None:
        run.session.state.score_moments = collected.score_moments
    run.session.report(metrics.values() | counts(run), tokens=live_tokens(rollout))
    if step % run.config.logging.every == 0:
        records = sample_records(
            rollout,
            run.decode,
            step=step,
            split="train",
            limit=run.config.logging.samples,
            has_reference=run.models.has_reference,
        )
        run.session.recorder.samples(records)


def counts(run: OnlineRun) -> dict[str, float]:
    """Return the run's counts of completions and of skipped steps."""
    state = run.session.state
    return {
        "completion/count": float(state.completions),
        "skipped/nonfinite": float(state.skipped),
        "skipped/zero_gradient": float(state.idle),
        "skipped/unscored": float(state.unscored),
    }
