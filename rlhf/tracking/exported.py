"""The share of a run's training that its exported weights keep: export.json, beside the folder of the model.

The run writes it with the model. All later readers of the model (rlhf eval, sample, chat and push, the reward model
of a PPO run, the report, the model card) get the same figure from `read_export`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from rlhf.tracking.run_folder import write_atomically

EXPORT = "export.json"
MODEL_FOLDER = "model"
TOLERATED_LOSS = 0.05
"""The largest share of the change by training that an export may lose: more is avoided, or reported."""


@dataclass(frozen=True, kw_only=True)
class ExportRecord:
    """The dtype of exported weights, and the share of the change by training that they keep; None: not known."""

    key: str
    """The setting that decided it, policy.export_dtype or model.export_dtype."""
    asked: str
    """The value of the setting."""
    dtype: str
    """The dtype that most weights were written in."""
    change_kept: float | None
    start_dtype: str | None = None
    """The dtype of the start model, if `asked` is auto and another one was written."""
    start_dtype_keeps: float | None = None
    """The share that `start_dtype` would have kept."""
    rank: int | None = None
    """The rank of the adapters that were trained, if any were."""

    @property
    def is_rounded_away(self) -> bool:
        """Return whether the weights lost more of the training than is tolerated."""
        return self.change_kept is not None and 1 - self.change_kept > TOLERATED_LOSS

    def write(self, folder: Path) -> None:
        """Write export.json into the folder that has the model's folder."""
        write_atomically(folder / EXPORT, json.dumps(asdict(self), indent=2) + "\n")

    def summary(self) -> str | None:
        """Describe at the end of a run the effect of the dtype on the training; None if there is nothing to tell."""
        if self.is_rounded_away:
            return (
                f"warning: {self.key}={self.asked} loses {self._lost} of the change that training made to the weights. "
                f"To keep it, run the same command with {self.key}=auto, which exports the last checkpoint again"
            )
        if self.start_dtype is None:
            return None
        if self.start_dtype_keeps is None:
            return (
                f"the model is exported in {self.dtype}: the start weights cannot be read one by one, so how much of "
                f"the training {self.start_dtype} would lose is not known ({self.key}={self.start_dtype} exports it)"
            )
        return (
            f"the model is exported in {self.dtype}: {self.start_dtype}, the dtype of the start model, would lose "
            f"{1 - self.start_dtype_keeps:.1%} of the change that training made to the weights "
            f"({self.key}=auto allows {TOLERATED_LOSS:.0%})"
        )

    def warning(self, model: str) -> str:
        """Describe the loss to the user who reads the model."""
        return (
            f"{model}: {self.dtype} has lost {self._lost} of the change that training made to these weights. To export "
            f"them again, run the training command with {self.key}=auto"
        )

    @property
    def _lost(self) -> str:
        assert self.change_kept is not None
        return f"{1 - self.change_kept:.1%}"


def read_export(path: str | Path) -> ExportRecord | None:
    """Read the record of an exported model; None without one, as for published models.

    Args:
        path: a run folder, the folder of a best checkpoint, or the folder of the model in it.
    """
    folder = Path(path).expanduser()
    if folder.name == MODEL_FOLDER and not (folder / EXPORT).is_file():
        folder = folder.parent
    if not (folder / MODEL_FOLDER).is_dir():
        return None
    try:
        return ExportRecord(**json.loads((folder / EXPORT).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def rounding_warnings(models: Mapping[str, str | Path]) -> list[str]:
    """Return a warning for each model, by its name, whose exported weights have lost their training to rounding."""
    records = {name: read_export(path) for name, path in models.items()}
    return [record.warning(name) for name, record in records.items() if record is not None and record.is_rounded_away]
