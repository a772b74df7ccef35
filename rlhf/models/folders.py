"""The folders of trained models: of a run, of a checkpoint, of an ensemble's members; and digests of their weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rlhf.data.paths import resolve_best
from rlhf.data.tokenizer import base_of_adapter, locate_model
from rlhf.errors import ModelError
from rlhf.models.weight_files import local_folder
from rlhf.tracking.checkpoint import Checkpoints
from rlhf.tracking.fingerprint import combine_digests, content_digest, weights_digest
from rlhf.tracking.run_folder import write_atomically

MODEL = "model"  # the trained model, in a run folder and in each checkpoint
CRITIC = "critic"
ADAPTER_FOLDER = "adapter"  # beside the model of a run that exports both
MEMBERS = "ensemble.json"  # in a folder of separate reward models: the paths of the members, relative to the folder


def model_folder(path: str) -> str:
    """Return the folder of the weights: a run folder's model or newest intact checkpoint, or `path` itself.

    Raises:
        ModelError: the run folder has neither.
    """
    path = resolve_best(path)
    folder = Path(path).expanduser()
    if not (folder / "checkpoints").is_dir() and not (folder / "config.yaml").is_file():
        return path
    if (folder / MODEL).is_dir():
        return str(folder / MODEL)
    newest = Checkpoints(folder / "checkpoints", keep=1).latest_intact(lambda _: None)
    if newest is None:
        raise ModelError(f"{path} is a run folder without a checkpoint: that run has not come far enough")
    return str(newest / MODEL)


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
