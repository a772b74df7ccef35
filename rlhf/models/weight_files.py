"""The safetensors files of a model's folder: their headers, and any part of a tensor, read without the rest.

Under ZeRO-3 a model is never whole in any process. It is built without memory for its weights (on torch's meta device);
then, weight after weight, each rank reads from the files the elements that are its share, and nothing else.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from accelerate import init_empty_weights
from huggingface_hub import try_to_load_from_cache
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from rlhf.data.tokenizer import ModelLocation
from rlhf.errors import ModelError
from rlhf.model_files import CONFIG, read_header
from rlhf.runtime.engine import Engine

INDEX = "model.safetensors.index.json"
_SPLIT: WeakSet[nn.Module] = WeakSet()
READ_AS_THEY_ARE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
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


def read_tensors(path: Path) -> dict[str, StoredTensor]:
    """Read the tensors' names, dtypes and shapes from a safetensors file; empty if its header cannot be understood."""
    entries, start = read_header(path)
    if any(entry["dtype"] not in _DTYPES for entry in entries.values()):
        return {}
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
    """Read the header of each safetensors file of a model's folder; empty if a file is missing."""
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
    return {name: read_tensors(folder / name) for name in names}


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
        """Take the files of `folder` and their headers, from `read_headers`."""
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


def load_split(
    make: Callable[[], PreTrainedModel], folder: Path | None, engine: Engine, *, new: Sequence[str] = ()
) -> PreTrainedModel | None:
    """Load a model's weights split over the ranks; None if only the whole model can be loaded, which is noted.

    Every rank calls this. If one of them cannot load its part, none loads any.

    Args:
        make: builds the model from its configuration; called with parameters that get no memory.
        folder: the folder of its configuration and safetensors files; None if it is not on this machine.
        engine: splits the weights.
        new: the parameters that are not in the files and get zeros, whole in every process: the caller sets them.

    Raises:
        ModelError: a file ends too early.
    """
    model, stored, names = _without_weights(make, folder, new)
    reasons = engine.ranks.gather(names if isinstance(names, str) else "")  # of several machines one may lack the files
    if isinstance(names, str) or any(reasons):
        engine.notes.append(_whole_note(folder, next(filter(None, reasons))))
        return None
    for name in new:
        _set_parameter(model, name)
    _load_buffers(model, stored)
    engine.partition(model, lambda name, start, stop: stored.read(names[name], start, stop))
    _prepare(model, folder)
    _SPLIT.add(model)
    return model


def load_by_module(
    make: Callable[[], PreTrainedModel], folder: Path | None, finish: Callable[[PreTrainedModel, str, nn.Module], None]
) -> PreTrainedModel | None:
    """Load a model a module at a time, in the dtypes of its files; None if only the whole model can be loaded.

    Args:
        make: builds the model from its configuration; called with parameters that get no memory.
        folder: the folder of its safetensors files; None if it is not on this machine.
        finish: gets the model and each module with its name, as soon as the module's own weights are there.

    Raises:
        ModelError: a file ends too early.
    """
    model, stored, names = _without_weights(make, folder)
    if isinstance(names, str):
        return None
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    stored_as = {id(parameter): names[name] for name, parameter in model.named_parameters()}
    tied: dict[int, nn.Parameter] = {}
    for name in [name for name, _ in model.named_modules()]:  # names alone: a module that is replaced has to go
        module = model.get_submodule(name)
        for own, empty in module._parameters.items():
            if empty is None:
                continue
            loaded = tied.get(id(empty))
            if loaded is None:
                numbers = stored.read(stored_as[id(empty)]).reshape(empty.shape)
                loaded = nn.Parameter(numbers, requires_grad=False)
            if uses[id(empty)] > 1:
                tied[id(empty)] = loaded
            module._parameters[own] = loaded
        finish(model, name, module)
    _load_buffers(model, stored)
    _prepare(model, folder)
    return model


def _without_weights(
    make: Callable[[], PreTrainedModel], folder: Path | None, new: Sequence[str] = ()
) -> tuple[PreTrainedModel, WeightFiles, Mapping[str, str] | str]:
    """Build a model without memory for its weights; return also its files, and each weight's name there or why not."""
    files = {} if folder is None else read_headers(folder)
    with init_empty_weights(include_buffers=False):
        model = make()
    model.tie_weights()  # the context makes new parameters, and separates the tied ones
    stored = WeightFiles(folder or Path(), files)
    names = _stored_names(model, stored, new) if files else "it has no safetensors files on this machine yet"
    return model, stored, names


def _prepare(model: PreTrainedModel, folder: Path | None) -> None:
    """Give a model that has its weights the generation settings of its folder, and put it in evaluation mode."""
    if folder is not None and model.can_generate():
        model.generation_config = _generation_config(folder) or model.generation_config
    model.eval()


def is_split(model: nn.Module) -> bool:
    """Return whether `load_split` has loaded the model: its weights then have the same names as in its files."""
    return model in _SPLIT


def _whole_note(folder: Path | None, reason: str) -> str:
    return (
        f"warning: {folder or 'a model'} is loaded whole by every process and split afterwards: {reason}. Processes on "
        "one machine need memory for as many copies"
    )


def _stored_names(model: PreTrainedModel, files: WeightFiles, new: Sequence[str]) -> Mapping[str, str] | str:
    """Map each parameter to its name in the files, which differs for tied ones; or explain why that cannot be done."""
    if getattr(model.config, "quantization_config", None) is not None:
        return "its weights are quantized"
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    names: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        if name in new:
            continue
        present = [alias for alias in aliases[id(parameter)] if alias in files]
        reason = _unreadable_reason(name, parameter, present, files)
        if reason:
            return reason
        names[name] = present[0]
    return names


def _unreadable_reason(name: str, parameter: Tensor, present: Sequence[str], files: WeightFiles) -> str:
    if len(present) != 1:
        return f"its files have the weight {name} {len(present)} times"
    stored = files.describe(present[0])
    if stored.shape != tuple(parameter.shape):
        return f"its files have the weight {name} in another shape"
    if stored.dtype not in READ_AS_THEY_ARE:
        return f"its files have the weight {name} in {stored.dtype}"
    return ""


def _set_parameter(model: PreTrainedModel, name: str) -> None:
    """Give the parameter memory of its own, in every process."""
    module = model.get_submodule(name.rpartition(".")[0])
    old = model.get_parameter(name)
    module.register_parameter(name.rpartition(".")[2], torch.nn.Parameter(torch.zeros_like(old, device="cpu")))


def _load_buffers(model: PreTrainedModel, files: WeightFiles) -> None:
    for name, buffer in model.named_buffers():
        if name in files:
            buffer.copy_(files.read(name).reshape(buffer.shape))


def _generation_config(folder: Path) -> Any:
    try:
        return GenerationConfig.from_pretrained(str(folder))
    except OSError:
        return None
