"""Alarms on the entropy of the policy."""

from __future__ import annotations

from rlhf.guard.alarms.alarm import Grown, Shrunk


class EntropyCollapse(Shrunk):
    """The entropy has fallen below 30 % of its initial value."""

    name = "entropy-collapse"
    metrics = ("policy/entropy",)
    share = 0.3
    patience = 3
    causes = "the policy has collapsed onto a few phrases: weak KL penalty, high learning rate, or too many steps"
    cure = (
        "algorithm.policy_loss.entropy_coef=0.01, more KL penalty; with a clip of each token's ratio (ppo, grpo) "
        "algorithm.policy_loss.clip_eps_high=0.28"
    )
    source = "Yu et al. 2025 (DAPO), sec. 3.1; Cui et al. 2025 (The Entropy Mechanism)"


class EntropyExplosion(Grown):
    """The entropy exceeds 1.5 times its initial value."""

    name = "entropy-explosion"
    metrics = ("policy/entropy",)
    factor = 1.5
    plus = 0.3
    patience = 3
    causes = "the policy is degrading: a learning rate or an entropy bonus that is too high"
    cure = "lower policy.lr, algorithm.policy_loss.entropy_coef=0, continue from an earlier checkpoint"
    source = "Huang et al. 2022 (37 details), detail 10"
