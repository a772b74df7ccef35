"""Alarms on the critic's predictions."""

from __future__ import annotations

from rlhf.guard.alarms.alarm import Alarm, Below, Reading
from rlhf.guard.alarms.history import History

SETTLED = 15  # steps in which a critic may be wrong


class CriticExplainsNothing(Below):
    """After step 15 the critic predicts no better than a constant for ten steps."""

    name = "critic-explains-nothing"
    metrics = ("critic/explained_variance",)
    limit = 0.05
    after = SETTLED
    patience = 10
    causes = "a critic that learns too slowly, too fast, or not at all; too few steps; an unpredictable reward"
    cure = (
        "raise or lower critic.lr, critic.init=reward if the reward is a model, algorithm.advantage.gae_lambda=1, or "
        "algorithm.preset=rloo"
    )
    source = "Schulman et al. 2016, sec. 3: the variance of GAE comes from the critic's errors"


class CriticWorseThanConstant(Below):
    """The critic's error variance is 1.5 times the variance of the returns."""

    name = "critic-worse-than-constant"
    metrics = ("critic/explained_variance",)
    limit = -0.5
    after = SETTLED
    patience = 3
    causes = "value targets on a different scale than the values, critic.lr too high, clipped values"
    cure = "lower critic.lr, critic.warmup_steps=10, algorithm.value_loss.clip_eps=null"
    source = "Huang et al. 2022 (37 details), detail 9; Andrychowicz et al. 2021"


class ValueOffset(Alarm):
    """The mean value differs from the mean return by more than 1.5 standard deviations of the score."""

    name = "value-offset"
    metrics = ("critic/value", "critic/return")
    reads = "|critic/value - critic/return|"
    spreads = 1.5  # standard deviations of the score
    after = SETTLED
    patience = 5
    causes = "shifted value targets, a change in the reward's scale, a new value head"
    cure = "critic.warmup_steps=10, raise critic.lr, algorithm.value_loss.clip_eps=null, calibrate the reward model"
    source = "explained variance ignores a constant offset: 1 - Var(return - value) / Var(return)"

    def read(self, history: History) -> Reading | None:
        """Read the distance of the mean value from the mean return, which explained variance does not see."""
        value, returned, spread = history.now("critic/value"), history.now("critic/return"), history.start("score/std")
        if value is None or returned is None or not spread or history.count("critic/value") <= self.after:
            return None
        return Reading(abs(value - returned), self.spreads * spread, abs(value - returned) > self.spreads * spread)
