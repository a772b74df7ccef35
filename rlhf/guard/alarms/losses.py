"""Alarms on the losses on data, in training and held out."""

from __future__ import annotations

from rlhf.guard.alarms.alarm import Alarm, Reading, WorseThanBest, read_growth
from rlhf.guard.alarms.history import History


class HeldOutLossRises(WorseThanBest):
    """The held-out loss is 5 % above its minimum."""

    name = "held-out-loss-rises"
    metrics = ("eval/loss",)
    factor = 1.05
    patience = 2
    causes = "the model memorizes the rows, or the learning rate is too high"
    cure = "fewer schedule.epochs, lower policy.lr, schedule.decay=cosine; checkpoint.best keeps the lowest"
    source = "Ouyang et al. 2022, sec. 3.5: after one epoch"


class HeldOutPreferenceLossRises(WorseThanBest):
    """The loss on held-out pairs is 10 % above its minimum."""

    name = "held-out-preference-loss-rises"
    metrics = ("eval/preference_loss",)
    factor = 1.1
    patience = 2
    causes = "the model memorizes the pairs, or the learning rate is too high"
    cure = "fewer schedule.epochs, lower policy.lr, larger algorithm.loss.beta; checkpoint.best keeps the lowest"
    source = "Rafailov et al. 2024 (over-optimization in direct alignment)"


class HeldOutPairsRise(WorseThanBest):
    """The reward model's loss on held-out pairs is 10 % above its minimum."""

    name = "held-out-pairs-rise"
    metrics = ("eval/rm_loss",)
    factor = 1.1
    patience = 2
    causes = "the model memorizes the pairs, or the learning rate is too high"
    cure = "schedule.epochs=1, lower model.lr; checkpoint.best keeps the lowest"
    source = "Ouyang et al. 2022, app. C: reward models overfit after one epoch"


class LossExplodes(Alarm):
    """The loss exceeds three times its initial value."""

    name = "loss-explodes"
    metrics = ("loss/total",)
    reads = "the loss on the data"
    losses = ("loss/sft", "loss/rm", "loss/process", "loss/preference")  # a policy-gradient loss has no scale
    patience = 3
    causes = "a learning rate that is too high"
    cure = "lower the learning rate, set schedule.warmup_steps, lower max_grad_norm"
    source = "docs/troubleshooting.md"

    def read(self, history: History) -> Reading | None:
        """Read the loss of a run on data against its start."""
        name = next((name for name in self.losses if history.now(name) is not None), None)
        return None if name is None else read_growth(history, name, 3.0, plus=0.5)
