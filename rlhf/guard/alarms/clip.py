"""Alarms on how often the clip of the policy loss acts."""

from __future__ import annotations

from rlhf.guard.alarms.alarm import Above, Below, Reading
from rlhf.guard.alarms.history import History


class ClipFraction(Above):
    """The clip stops the gradient of more than two tokens in five."""

    name = "clip-fraction"
    metrics = ("policy/clip_fraction",)
    limit = 0.4
    patience = 3
    causes = "update steps that are too large, or too many updates on the same completions"
    cure = "lower policy.lr, fewer batch.epochs or batch.minibatches"
    source = (
        "Huang et al. 2022 (37 details), detail 12, count ratios outside 1 ± eps: 0.1 to 0.3, here "
        "policy/outside_clip; on the same ratios about half of these lose their gradient"
    )


class NeverClipped(Below):
    """For twenty steps fewer than one ratio in ten thousand was outside the clip range."""

    name = "never-clipped"
    metrics = ("policy/outside_clip",)
    limit = 1e-4
    patience = 20
    causes = "a learning rate that is too low for the policy to move, or a clip range that is too wide"
    cure = "raise policy.lr until kl/old is near 0.01, or lower batch.epochs: the later ones change nothing"
    source = "Huang et al. 2022 (37 details), detail 12: the clip is active in 0.1 to 0.3 of the ratios"

    def read(self, history: History) -> Reading | None:
        """Read the share of ratios outside the clip range, if several updates share the same completions."""
        return None if history.facts.updates == 1 else super().read(history)
