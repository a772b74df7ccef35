"""Alarms on the coefficient of the KL penalty."""

from __future__ import annotations

from rlhf.guard.alarms.alarm import Grown


class KlCoefficientRunaway(Grown):
    """The controller has raised the coefficient to 20 times its initial value."""

    name = "kl-coefficient-runaway"
    metrics = ("kl/coef",)
    factor = 20.0
    plus = 1e-6
    patience = 3
    causes = "the penalty cannot hold the policy: the learning rate is too high, or the reward's scale is wrong"
    cure = "lower policy.lr, calibrate the reward, start with a larger algorithm.kl.coef"
    source = "Ziegler et al. 2019, sec. 2.2"
