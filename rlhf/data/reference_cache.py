"""Cache reference log-probabilities on disk: one number per completion, computed once per model and data set."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

VERSION = 1  # of the file format and of what the numbers mean; part of the key
_NAME = "logprobs"


def cache_folder(configured: str | None, environment: Mapping[str, str]) -> Path:
    """Return the cache folder for reference log-probabilities: `reference/` in `configured` or in the user's cache."""
    if configured is not None:
        return Path(configured).expanduser() / "reference"
    home = environment.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "rlhf" / "reference"


def rows_fingerprint(
    prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], learned: Sequence[Sequence[bool]] = ()
) -> str:
    """Compute the SHA-256 digest of token ids, row by row.

    Other rows, another order, another tokenizer or another template give another digest. `learned` marks the tokens of
    each completion whose log-probabilities are summed, if not all are.
    """
    digest = hashlib.sha256()
    for prompt, completion in zip(prompts, completions, strict=True):
        digest.update(f"{len(prompt)} {len(completion)}:{[*prompt, *completion]}".encode())
    for flags in learned:
        digest.update(bytes(flags) + b".")
    return digest.hexdigest()


def cache_key(*, weights: str, rows: str, dtype: str, temperature: float) -> str:
    """Compute the cache key for the log-probabilities of these rows under these weights."""
    parts = {"version": VERSION, "weights": weights, "rows": rows, "dtype": dtype, "temperature": temperature}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class ReferenceCache:
    """A folder with one file per key, each with a checksum of its numbers; `notes` collects warnings about files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes: list[str] = []

    def path(self, key: str) -> Path:
        """Return the path of the file for `key`."""
        return self.folder / f"{key}.safetensors"

    def read(self, key: str, *, count: int) -> Float[Tensor, " N"] | None:
        """Read the `count` numbers stored under `key`; return None if there are none or the file is damaged (noted)."""
        path = self.path(key)
        if not path.is_file():
            return None
        damage, values = _read_checked(path)
        if not damage and values.shape != (count,):
            damage = f"it holds {tuple(values.shape)} numbers instead of {count}"
        if damage:
            self.notes.append(f"{path} is damaged ({damage}): computed anew")
            return None
        return values

    def write(self, key: str, values: Float[Tensor, " N"]) -> None:
        """Store `values` under `key` atomically; a folder that cannot be written to is noted, not fatal."""
        values = values.detach().cpu().contiguous()
        content = save({_NAME: values}, metadata={"checksum": _checksum(values)})
        temporary = self.folder / f".{key}.{os.getpid()}.new"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(content)
            temporary.replace(self.path(key))
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            self.notes.append(
                f"reference log-probs could not be kept in {self.folder} ({error}): the next run computes them again; "
                "set run.cache_dir to a folder that can be written to"
            )


def _read_checked(path: Path) -> tuple[str, Tensor]:
    """Read a file's numbers; return what is wrong with it (empty if nothing), and the numbers."""
    try:
        with safe_open(path, framework="pt") as file:
            values, metadata = file.get_tensor(_NAME), file.metadata() or {}
    except (OSError, SafetensorError) as error:
        return str(error).splitlines()[0], torch.empty(0)
    return "" if metadata.get("checksum") == _checksum(values) else "its checksum does not match", values


def _checksum(values: Tensor) -> str:
    return hashlib.sha256(values.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
