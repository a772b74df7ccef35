"""Preference data with the reference's log-probabilities, and the file that keeps them between runs."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf.batching import extend
from rlhf.config.data import ChatFormat, PreferencesConfig
from rlhf.data.files import load_rows
from rlhf.data.formats import LABELLED, PAIRS
from rlhf.data.pairs import CompletionRows, LabelledSet, PairSet, load_labelled, load_pairs
from rlhf.data.rows import RowCounts
from rlhf.types import AnnotatedLabelledCompletions, AnnotatedPairs

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


@dataclass(frozen=True)
class AnnotatedPairSet:
    """Preference pairs with reference log-probabilities of both sides; zero for a loss without a reference model."""

    pairs: PairSet
    chosen_ref_logprobs: Float[Tensor, " N"]
    rejected_ref_logprobs: Float[Tensor, " N"]

    def __len__(self) -> int:
        return len(self.pairs)

    def collate(self, indices: Sequence[int]) -> AnnotatedPairs:
        """Collate the pairs at `indices` into one batch."""
        rows = torch.tensor(list(indices), dtype=torch.long)
        return extend(
            AnnotatedPairs,
            self.pairs.collate(indices),
            chosen_ref_logprobs=self.chosen_ref_logprobs[rows],
            rejected_ref_logprobs=self.rejected_ref_logprobs[rows],
        )


@dataclass(frozen=True)
class AnnotatedLabelledSet:
    """Single completions, each with its label and its reference log-probability."""

    rows: CompletionRows
    desirable: tuple[bool, ...]
    ref_logprobs: Float[Tensor, " N"]

    def __len__(self) -> int:
        return len(self.rows)

    def collate(self, indices: Sequence[int]) -> AnnotatedLabelledCompletions:
        """Collate the completions at `indices` into one batch."""
        return extend(
            AnnotatedLabelledCompletions,
            self.rows.collate(indices),
            desirable=torch.tensor([self.desirable[i] for i in indices], dtype=torch.bool),
            ref_logprobs=self.ref_logprobs[torch.tensor(list(indices), dtype=torch.long)],
        )


def completion_rows(dataset: PairSet | LabelledSet) -> CompletionRows:
    """Return one row per completion; for pairs, all chosen completions first, then all rejected ones."""
    if isinstance(dataset, LabelledSet):
        return CompletionRows(dataset.prompts, dataset.completions, dataset.pad_id)
    learned = dataset.chosen_learned + dataset.rejected_learned
    return CompletionRows(dataset.prompts * 2, dataset.chosen + dataset.rejected, dataset.pad_id, learned)


def completion_labels(dataset: PairSet | LabelledSet) -> tuple[bool, ...]:
    """Return the label of each row of `rows_of`: chosen completions are desirable, rejected ones are not."""
    if isinstance(dataset, LabelledSet):
        return tuple(text.desirable for text in dataset.texts)
    return (True,) * len(dataset) + (False,) * len(dataset)


def load_preference_data(
    config: PreferencesConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    chat_template: str | ChatFormat,
    context: int | None = None,
) -> PairSet | LabelledSet:
    """Load labelled completions if the columns of the data set say so, otherwise preference pairs."""
    columns = {name for row in load_rows(config, RowCounts(config.path)) for name in row.values}
    is_pairs, is_labelled = (any(set(shape.columns) <= columns for shape in use.shapes) for use in (PAIRS, LABELLED))
    load = load_labelled if is_labelled and not is_pairs else load_pairs
    return load(config, tokenizer, chat_template=chat_template, context=context)


__all__ = [
    "AnnotatedLabelledSet",
    "AnnotatedPairSet",
    "CompletionRows",
    "completion_labels",
    "completion_rows",
    "load_preference_data",
]
