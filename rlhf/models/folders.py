"""The folders of trained models: of a run, of a checkpoint, of an ensemble's members; and digests of their weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf.data.paths import best_checkpoint, resolve_best
from rlhf.data.tokenizer import base_of_adapter, locate_model
from rlhf.errors import ModelError
from rlhf.models.weight_files import local_folder
from rlhf.tracking.checkpoint import MANIFEST, Checkpoints, find_damage
from rlhf.tracking.fingerprint import combine_digests, content_digest, weights_digest
from rlhf.tracking.run_folder import RunFolder, completed_step, write_atomically

MODEL = "model"  # the trained model, in a run folder and in each checkpoint
CRITIC = "critic"
ADAPTER_FOLDER = "adapter"  # beside the model of a run that exports both
SCORE_SETTINGS = ("score_mean", "score_std", "ensemble_size")  # in the config.json of reward models
MEMBERS = "ensemble.json"  # in a folder of separate reward models: the paths of the members, relative to the folder


def model_folder(path: str) -> str:
    """Return the folder of the weights: a run folder's model or newest intact checkpoint, or `path` itself.

    A run that has ended and lost its model stands for a checkpoint: the best one if it exports that, otherwise the
    last. The last one of a run with an average of the weights has others than the export, and is refused; so are those
    of a reward model, which is calibrated after its last step.

    Raises:
        ModelError: the run folder has none of them.
    """
    path = resolve_best(path)
    folder = Path(path).expanduser()
    if not (folder / "checkpoints").is_dir() and not (folder / "config.yaml").is_file():
        return path
    if (folder / MODEL).is_dir():
        return str(folder / MODEL)
    run = RunFolder(folder)
    step = completed_step(run)
    if step is not None:
        return str(_exported_checkpoint(run, step) / MODEL)
    newest = Checkpoints(run.checkpoints, keep=1).latest_intact(lambda _: None)
    if newest is None:
        raise ModelError(f"{path} is a run folder without a checkpoint: that run has not come far enough")
    return str(newest / MODEL)


def _exported_checkpoint(run: RunFolder, step: int) -> Path:
    """Return the checkpoint with the weights that a run exported when it ended at `step`.

    Raises:
        ModelError: it is gone or damaged.
    """
    config = run.read_config()
    best = config.get("checkpoint", {}).get("best")
    exports_best = best is not None and best.get("restore", True)
    folder = best_checkpoint(run.path) if exports_best else run.checkpoints / f"step-{step:06d}"
    lacks = None
    if _is_calibrated(config):
        lacks = "is not calibrated"
    elif not exports_best and config.get("policy", {}).get("ema_decay") is not None:
        lacks = "does not have the averaged weights"
    if lacks or folder is None or find_export_damage(folder) is not None:
        what = lacks or "is gone or damaged"
        raise ModelError(
            f"the run in {run.path} has ended, but its {MODEL}/ is gone, and the {'best' if exports_best else 'last'} "
            f"checkpoint {what}: put {MODEL}/ back, or train the run again"
        )
    return folder


def scoring_folder(path: str) -> str:
    """Return the folder of a reward model's weights, as `model_folder`, to score with.

    Raises:
        ModelError: there is none, or `path` is RUN@best of a run that calibrates its model after its last step.
    """
    folder, run = model_folder(path), path.removesuffix("@best")
    config = {} if path == run else RunFolder(Path(resolve_best(path))).read_config()
    if not _is_calibrated(config):
        return folder
    best = config.get("checkpoint", {}).get("best") or {}
    which = "this checkpoint" if best.get("restore", True) else "the last checkpoint"
    raise ModelError(f"{path}: this checkpoint is not calibrated. Name {run}, whose model is {which}, calibrated")


def _is_calibrated(config: Mapping[str, Any]) -> bool:
    return config.get("calibration", {}).get("data", "none") != "none" and config.get("process") is None


def find_export_damage(folder: Path) -> str | None:
    """Describe the damage to the folder of a best checkpoint; runs of earlier versions have no checksums in it."""
    if not (folder / MODEL).is_dir():
        return "it is gone"
    return find_damage(folder) if (folder / MANIFEST).is_file() else None


def write_members(folder: Path, members: Sequence[str]) -> None:
    """Record in `folder` that it holds an ensemble with a member in each of these subfolders."""
    write_atomically(folder / MEMBERS, json.dumps({"members": list(members)}, indent=2) + "\n")


def digest_of_model(path: str) -> str | None:
    """Compute a digest of the weight files of a run, model folder, GGUF file, adapter, ensemble or cached hub id.

    None if there are no such files on this machine.
    """
    members = member_folders(path)
    if members:
        return combine_digests(digest_of_model(str(member)) or "" for member in members)
    location = locate_model(model_folder(path))
    if location.gguf is not None:
        return content_digest(Path(location.path))
    folder = local_folder(location)
    digest = None if folder is None else weights_digest(folder)
    if digest is None or folder is None or not location.is_adapter:
        return digest
    return combine_digests([digest, digest_of_model(base_of_adapter(folder)) or ""])


def digest_of_calibration(path: str) -> str | None:
    """Compute a digest of the settings that change a reward model's scores beside its weights; None without any."""
    members = member_folders(path)
    if members:
        return combine_digests(digest_of_calibration(str(member)) or "" for member in members)
    folder = local_folder(locate_model(model_folder(path)))
    file = None if folder is None else folder / "config.json"
    settings = json.loads(file.read_text(encoding="utf-8")) if file is not None and file.is_file() else {}
    parts = [f"{name} {settings[name]}" for name in (*SCORE_SETTINGS, "step_separator") if name in settings]
    return combine_digests(parts) if parts else None


def member_folders(path: str) -> list[Path]:
    """Return the run folders of an ensemble of separate reward models; empty if `path` is no such ensemble.

    Raises:
        ModelError: a member is missing.
    """
    folder = Path(path).expanduser()
    if not (folder / MEMBERS).is_file():
        return []
    members = [folder / name for name in json.loads((folder / MEMBERS).read_text(encoding="utf-8"))["members"]]
    missing = [str(member) for member in members if not member.is_dir()]
    if missing:
        raise ModelError(f"{path} is an ensemble without its member {missing[0]}: train it again")
    return members
