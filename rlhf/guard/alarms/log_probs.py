"""Alarms on log-probabilities that have to be the same and are not."""

from __future__ import annotations

from rlhf.guard.alarms.alarm import Alarm, Reading
from rlhf.guard.alarms.history import History


class FirstRatio(Alarm):
    """Before the first update the importance ratio is not 1."""

    name = "first-ratio"
    metrics = ("policy/first_ratio_deviation",)
    limits = {False: 0.02, True: 0.5}  # of float32 and of bfloat16, whose log-probabilities are rounded
    patience = 2
    causes = "old log-probabilities that are stale, or computed at another temperature or precision"
    cure = "sampling.old_log_probs=trainer; use policy.packing=off sampling.backend=hf to find the cause"
    source = "Huang et al. 2022 (37 details): the ratio of the first minibatch must be 1"

    def read(self, history: History) -> Reading | None:
        """Read how far the importance ratio is from 1 before any update, if a loss may read it."""
        deviation, limit = history.now("policy/first_ratio_deviation"), self.limits[history.facts.is_rounded]
        if deviation is None or not history.facts.reads_ratio:
            return None
        return Reading(deviation, limit, deviation > limit)


class SamplerMismatch(Alarm):
    """Sampler and trainer compute different log-probabilities for the sampled tokens."""

    name = "sampler-mismatch"
    metrics = ("kl/sampler_mismatch",)
    limits = {False: 0.01, True: 0.1}  # nats, of float32 and of bfloat16
    patience = 2
    causes = "the sampler uses another temperature, precision or weights than the trainer"
    cure = "sampling.old_log_probs=trainer, policy.head_dtype=float32, sampling.backend=hf"
    source = "Yao et al. 2025 (Your efficient RL framework secretly brings you off-policy RL)"

    def read(self, history: History) -> Reading | None:
        """Read how far the sampler's log-probabilities are from the trainer's; a sampler one step behind may differ."""
        mismatch, limit = history.now("kl/sampler_mismatch"), self.limits[history.facts.is_rounded]
        return None if mismatch is None or history.facts.is_ahead else Reading(mismatch, limit, mismatch > limit)
