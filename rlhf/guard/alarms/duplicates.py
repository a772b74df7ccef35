"""Alarms on prompts and completions that are repeated."""

from __future__ import annotations

from rlhf.guard.alarms.alarm import Above, Grown, Reading
from rlhf.guard.alarms.history import History


class DuplicatePrompts(Above):
    """More than half of the step's prompts are duplicates."""

    name = "duplicate-prompts"
    metrics = ("prompt/duplicates",)
    limit = 0.5
    patience = 2
    causes = "repeated rows in data.prompts, or fewer rows than batch.prompts_per_step"
    cure = "remove the duplicates; lower batch.prompts_per_step and raise sampling.completions_per_prompt"
    source = "Lee et al. 2022 (Deduplicating Training Data)"

    def read(self, history: History) -> Reading | None:
        """Read the share of repeated prompts, unless the data has fewer prompts than a step takes."""
        return None if history.facts.repeats_prompts else super().read(history)


class DuplicateCompletions(Grown):
    """The share of completions shared by several prompts rose by 40 percentage points."""

    name = "duplicate-completions"
    metrics = ("completion/duplicates",)
    factor = 1.0
    plus = 0.4
    patience = 3
    causes = "the policy gives the same answer to every prompt"
    cure = "more KL penalty, algorithm.policy_loss.entropy_coef=0.01, an earlier checkpoint, another reward"
    source = "Kirk et al. 2024 (diversity after RLHF)"
