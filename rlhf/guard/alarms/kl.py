"""Alarms on the distance from the sampling policy and from the reference."""

from __future__ import annotations

from rlhf.guard.alarms.alarm import Above, Alarm, Below, Reading
from rlhf.guard.alarms.history import History


class KlPerUpdate(Above):
    """Within one step the policy moves more than 0.1 nats per token away from the sampling policy."""

    name = "kl-per-update"
    metrics = ("kl/old",)
    limit = 0.1
    patience = 2
    causes = "a learning rate that is too high, or too many updates on the same completions"
    cure = "lower policy.lr, fewer batch.epochs or batch.minibatches, algorithm.target_kl=0.02"
    source = "Spinning Up's PPO ends a step at 0.015; Huang et al. 2022 (37 details): at 0.01 to 0.05"


class KlJump(Above):
    """Within one step the policy moves more than 1 nat per token away from the sampling policy."""

    name = "kl-jump"
    metrics = ("kl/old",)
    limit = 1.0
    patience = 1
    causes = "a learning rate that is far too high"
    cure = "divide policy.lr by 10; resume from an earlier checkpoint, or restart"
    source = "Spinning Up's PPO ends a step at 0.015; Huang et al. 2022 (37 details): at 0.01 to 0.05"


class KlToReference(Alarm):
    """The KL to the reference is above 0.5 nats per token of a completion."""

    name = "kl-to-reference"
    metrics = ("kl/reference",)
    reads = "kl/reference per token"
    limit = 0.5  # nats per token of a completion
    patience = 3
    causes = "a missing or weak KL penalty, a wrong sign, or a learning rate that is too high"
    cure = (
        "algorithm.kl.placement=reward algorithm.kl.estimator=k1 algorithm.kl.coef=0.05 (online_dpo: a larger "
        "algorithm.policy_loss.loss.beta), lower policy.lr; use the best checkpoint"
    )
    source = "Gao et al. 2023, sec. 3: the true score falls with the root of the KL; 0.5 from runs in the lab"

    def read(self, history: History) -> Reading | None:
        """Read the KL to the reference per token of a completion."""
        kl, length = history.now("kl/reference"), history.now("completion/length")
        if kl is None or not length:
            return None
        return Reading(kl / length, self.limit, kl / length > self.limit)


class KlAboveTarget(Alarm):
    """The KL to the reference exceeds three times the controller's target."""

    name = "kl-above-target"
    metrics = ("kl/reference",)
    targets = 3.0
    patience = 5
    causes = "the controller is too slow for the learning rate"
    cure = "lower policy.lr, lower algorithm.kl.controller.horizon, start with a larger algorithm.kl.coef"
    source = "Ziegler et al. 2019, sec. 2.2: the KL settles at its target"

    def read(self, history: History) -> Reading | None:
        """Read the KL to the reference against the target of the adaptive controller."""
        kl, target = history.now("kl/reference"), history.facts.kl_target
        if kl is None or target is None:
            return None
        return Reading(kl, self.targets * target, kl > self.targets * target)


class KlNegative(Below):
    """The estimated KL to the reference is below -0.5 nats, although a KL cannot be negative."""

    name = "kl-negative"
    metrics = ("kl/reference",)
    limit = -0.5
    patience = 3
    causes = "samples from another distribution: another temperature, stale log-probabilities, top-k or top-p"
    cure = "sampling.old_log_probs=trainer; use sampling.backend=hf policy.packing=off to find the cause"
    source = "Schulman 2020: k1 is unbiased on the policy's own samples"
