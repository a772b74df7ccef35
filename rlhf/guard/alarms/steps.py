"""Alarms on gradients, and steps that were skipped."""

from __future__ import annotations

from statistics import median

from rlhf.guard.alarms.alarm import Alarm, Reading, Rose
from rlhf.guard.alarms.history import History


class GradientSpike(Alarm):
    """The gradient norm is ten times the median of the previous steps."""

    name = "gradient-spike"
    metrics = ("policy/grad_norm",)
    factor, after = 10.0, 10
    patience = 2
    causes = "an unusual batch, a diverging loss, or a reward on another scale"
    cure = "lower policy.max_grad_norm and policy.lr, schedule.warmup_steps, larger batch.prompts_per_step"
    source = "Huang et al. 2022 (37 details), detail 11"

    def read(self, history: History) -> Reading | None:
        """Read the gradient norm against the median of those before it."""
        norm, before = history.now("policy/grad_norm"), history.before("policy/grad_norm")
        if norm is None or len(before) < self.after:
            return None
        limit = self.factor * max(median(before), 0.1)
        return Reading(norm, limit, norm > limit)


class StepsNotFinite(Rose):
    """An optimizer step was skipped because the loss or a gradient was NaN or infinite."""

    name = "steps-not-finite"
    metrics = ("skipped/nonfinite",)
    patience = 1
    causes = "a learning rate that is too high, an overflow in low precision, or a custom loss"
    cure = "lower policy.lr (model.lr), policy.dtype=float32 (model.dtype=float32); inspect the preceding step"
    source = "docs/reliability.md"


class ScoresNotFinite(Rose):
    """A step was skipped because a score was NaN or infinite."""

    name = "scores-not-finite"
    metrics = ("skipped/unscored",)
    patience = 1
    causes = "a reward that divides by zero or fails on unusual completions"
    cure = "fix the reward; notes.jsonl names the completion"
    source = "docs/reliability.md"
