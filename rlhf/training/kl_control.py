"""The coefficients from step to step: of the KL penalty, of an adaptive penalty in the loss, of a limited cost."""

from __future__ import annotations

import math

from rlhf.tracking.metrics import Metrics
from rlhf.training.online_run import OnlineRun, is_warming_up


def update_coefficients(run: OnlineRun, metrics: Metrics, completions: int, step: int) -> None:
    """Update the coefficients for the next step.

    A controller reacts to how far the policy has moved. Coefficients stay as they are while the policy may not move (in
    the critic's warm-up), and the penalty's also after a step without an optimizer step: both KLs are then 0
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
    _update_multiplier(run, metrics, step)


def _update_multiplier(run: OnlineRun, metrics: Metrics, step: int) -> None:
    """Update the Lagrange multiplier of the cost.

    It stays as it is while the policy may not move, as no cost can change then, and after a step of unknown cost (NaN).
    """
    lagrange, state = run.algorithm.lagrange, run.session.state
    if lagrange is None:
        return
    cost, multiplier = metrics["cost/mean"], lagrange.in_use(state.multiplier, violation=state.violation)
    violation = cost - lagrange.cost_limit
    metrics.add("lagrange/multiplier", multiplier)
    metrics.add("lagrange/violation", violation)
    metrics.add("lagrange/at_limit", float(lagrange.is_at_limit(multiplier)))
    if not (is_warming_up(run, step) or math.isnan(cost)):
        state.multiplier = lagrange.next_multiplier(state.multiplier, cost=cost)
        state.violation = violation
