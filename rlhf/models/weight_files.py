"""The safetensors files of a model's folder: what they hold, and any part of a tensor, read without the rest."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import try_to_load_from_cache
from torch import Tensor

from rlhf.data.tokenizer import ModelLocation
from rlhf.errors import ModelError

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class StoredTensor:
    """A weight as a safetensors header describes it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # of its bytes in the file
    end: int


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Read the tensors' names, dtypes and shapes from a safetensors file; empty if its header cannot be understood."""
    with path.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > path.stat().st_size:
            return {}
        try:
            header = json.loads(opened.read(length))
        except ValueError:
            return {}
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    if any(entry["dtype"] not in _DTYPES for entry in entries.values()):
        return {}
    start = 8 + length
    return {
        name: StoredTensor(
            _DTYPES[entry["dtype"]],
            tuple(entry["shape"]),
            start + entry["data_offsets"][0],
            start + entry["data_offsets"][1],
        )
        for name, entry in entries.items()
    }


def read_headers(folder: Path) -> dict[str, dict[str, StoredTensor]]:
    """Read what each safetensors file of a model's folder holds; empty if a file is missing."""
    index = folder / INDEX
    if not index.is_file():
        names = ["model.safetensors"]
    else:
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError):
            return {}
    if not all((folder / name).is_file() for name in names):
        return {}
    return {name: read_header(folder / name) for name in names}


def local_folder(location: ModelLocation, *names: str) -> Path | None:
    """Find the folder that holds the files: a local one, or the cached snapshot of a hub id; None without either."""
    if location.is_local:
        return Path(location.name)
    for name in names or (CONFIG,):
        cached = try_to_load_from_cache(location.name, name)
        if isinstance(cached, str):
            return Path(cached).parent
    return None


class NamedTensors(Mapping[str, Tensor]):
    """Some of the tensors in files by shorter names, each read whole whenever it is asked for, and not kept."""

    def __init__(self, files: WeightFiles, prefix: str) -> None:
        """Take the tensors whose names begin with `prefix`, which is left off."""
        self._files = files
        self._names = {name.removeprefix(prefix): name for name in files.names() if name.startswith(prefix)}

    def __getitem__(self, name: str) -> Tensor:
        """Read a tensor."""
        stored = self._names[name]
        return self._files.read(stored).reshape(self._files.describe(stored).shape)

    def __iter__(self) -> Iterator[str]:
        """Yield the names."""
        return iter(self._names)

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self._names)


class WeightFiles:
    """The weights in a model's folder by name; nothing is read before it is asked for, nor kept afterwards."""

    def __init__(self, folder: Path, files: Mapping[str, Mapping[str, StoredTensor]]) -> None:
        """Take the files of `folder` and what each holds, as `read_headers` returns it."""
        self._places = {
            name: (folder / file, tensor) for file, tensors in files.items() for name, tensor in tensors.items()
        }

    def __contains__(self, name: object) -> bool:
        """Return whether there is a tensor of this name."""
        return name in self._places

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._places)

    def describe(self, name: str) -> StoredTensor:
        """Return the dtype and the shape of a tensor."""
        return self._places[name][1]

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Read the elements [start, stop) of a tensor, counted in its flattened form.

        Raises:
            ModelError: the file ends before them.
        """
        path, stored = self._places[name]
        size = stored.dtype.itemsize
        last = stored.end if stop is None else stored.start + stop * size
        data = bytearray(last - stored.start - start * size)
        if not data:
            return torch.empty(0, dtype=stored.dtype)
        with path.open("rb") as opened:
            opened.seek(stored.start + start * size)
            if opened.readinto(data) != len(data):
                raise ModelError(f"{path} ends before the weight {name}: it was cut off; fetch or copy it again")
        return torch.frombuffer(data, dtype=stored.dtype)
