"""Alarms on held-out completions that repeat themselves or each other."""

from __future__ import annotations

from rlhf.guard.alarms.alarm import Grown, Reading, Shrunk
from rlhf.guard.alarms.history import History


class Repetition(Grown):
    """The share of repeated 4-grams in held-out completions rose by 20 percentage points."""

    name = "repetition"
    metrics = ("eval/repetition",)
    factor = 1.0
    plus = 0.2
    patience = 2
    causes = "the policy raises the reward by repeating itself"
    cure = "more KL penalty, lower policy.lr, a repetition rule in the reward; use the best checkpoint"
    source = "Holtzman et al. 2020, sec. 4; Gao et al. 2023"


class DiversityFalls(Shrunk):
    """Held-out completions have less than half as many distinct bigrams as before training."""

    name = "diversity-falls"
    metrics = ("eval/distinct_2",)
    share = 0.5
    patience = 2
    causes = "the policy has collapsed onto a few phrases"
    cure = "more KL penalty, lower policy.lr, algorithm.policy_loss.entropy_coef=0.01; use the best checkpoint"
    source = "Kirk et al. 2024 (diversity after RLHF)"

    def read(self, history: History) -> Reading | None:
        """Read the distinct bigrams against the start; a run on data imitates texts less diverse than noise."""
        return None if history.facts.on_data else super().read(history)
