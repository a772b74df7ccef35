"""The KL coefficients from step to step: of the KL penalty, and of the loss with an adaptive penalty."""

from __future__ import annotations

from rlhf.tracking.metrics import Metrics
from rlhf.training.online_run import OnlineRun, is_warming_up


def update_coefficients(run: OnlineRun, metrics: Metrics, completions: int, step: int) -> None:
    """Update the KL coefficients for the next step.

    A controller reacts to how far the policy has moved. Coefficients stay as they are while the policy may not move (in
    the critic's warm-up), and that of the penalty also after a step without an optimizer step: both KLs are then 0
    by construction.
    """
    state = run.session.state
    metrics.add("kl/coef", state.kl_coef)
    controller, loss = run.algorithm.kl.controller, run.algorithm.policy_loss
    if controller.adapts and not is_warming_up(run, step):
        state.kl_coef = controller.next_coef(state.kl_coef, kl=metrics["kl/reference"], completions=completions)
    if loss.coef_metric:
        metrics.add(loss.coef_metric, state.penalty_coef)
        if metrics["policy/optimizer_steps"] > 0:
            state.penalty_coef = loss.next_coef(state.penalty_coef, kl=metrics["kl/old_last"])
