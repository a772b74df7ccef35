"""The guard section: which rules of `rlhf lint` a run may break, and what an alarm during the run does."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlhf.config.base import Section

Action = Literal["ignore", "warn", "stop", "lower_lr", "raise_kl"]


class GuardConfig(Section):
    """What is refused before a run, and what is done about trouble during it."""

    allow: list[str] = []
    """Rules of `rlhf lint` (docs/lint.md) that this run breaks on purpose, by name: they are neither errors nor
    warnings."""
    on_alarm: Action = "warn"
    """When an alarm (docs/health.md) goes off. warn: say so and continue; stop: save a checkpoint and end, to be
    continued by the same command; lower_lr: multiply the learning rates by lr_factor; raise_kl: multiply the KL
    penalty's coefficient by kl_factor (online); ignore: look for nothing."""
    alarms: dict[str, Action] = {}
    """Another action for single alarms, by name: {repetition: stop, length-grows: ignore}."""
    lr_factor: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """With lower_lr: the learning rates are multiplied by this from the next step on, at each alarm anew."""
    kl_factor: Annotated[float, Field(gt=1)] = 2.0
    """With raise_kl: kl.coef is multiplied by this from the next step on, at each alarm anew."""

    def action(self, alarm: str) -> Action:
        """Return what the alarm of this name does."""
        return self.alarms.get(alarm, self.on_alarm)
