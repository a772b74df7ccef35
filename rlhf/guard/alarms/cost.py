"""Alarms on the cost that a Lagrange multiplier limits."""

from __future__ import annotations

from rlhf.guard.alarms.alarm import Alarm, Reading
from rlhf.guard.alarms.history import History


class CostAboveLimit(Alarm):
    """The Lagrange multiplier is the largest allowed, and the cost is above its limit."""

    name = "cost-above-limit"
    metrics = ("lagrange/violation", "lagrange/at_limit")
    patience = 5
    causes = "a limit that no policy near the reference can meet, a KL penalty that is too strong, a wrong sign"
    cure = (
        "a higher algorithm.lagrange.cost_limit or algorithm.lagrange.highest, less algorithm.kl.coef; "
        "check the sign of reward.cost"
    )
    source = "Dai et al. 2023: a cost above its limit raises the multiplier"

    def read(self, history: History) -> Reading | None:
        """Read the violation while the multiplier cannot rise any further."""
        violation, at_limit = history.now("lagrange/violation"), history.now("lagrange/at_limit")
        if violation is None or at_limit is None:
            return None
        return Reading(violation, 0.0, at_limit == 1.0 and violation > 0.0)
