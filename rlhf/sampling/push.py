"""Weights on their way to servers: the changed tensors, a folder of safetensors, written whole or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from rlhf.errors import SamplingError
from rlhf.models.adapters import is_adapted
from rlhf.models.backbone import CausalLM
from rlhf.models.export import write_tensors
from rlhf.models.policy_models import Models
from rlhf.tracking.run_folder import write_atomically

WEIGHTS = "model.safetensors"
ADAPTER = "adapter_model.safetensors"
ADAPTER_SETTINGS = "adapter_config.json"  # beside it
MANIFEST = "push.json"
VERSION = "VERSION"  # beside the folders: the newest that is complete
_CHUNK = 2**20  # elements hashed at a time
_ODD = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_AS_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def tensor_digest(tensor: Tensor) -> str:
    """Compute a digest of a tensor's dtype, shape and bits, on its device.

        sum_i (2 i + 1) c x_i  mod 2^64,   x_i the bits of element i as an integer, c odd

    Every factor is odd, so another value of one element always changes the sum.
    """
    flat = tensor.detach().contiguous().reshape(-1).view(_AS_INTEGER[tensor.element_size()])
    factors = (2 * torch.arange(min(_CHUNK, flat.numel()), dtype=torch.int64, device=flat.device) + 1) * _ODD
    total = 0
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK].to(torch.int64)
        total += int((factors[: len(part)] * part).sum()) + 2 * start * _ODD * int(part.sum())
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype}{list(tensor.shape)}:{total & (2**64 - 1):016x}"


def pushed_tensors(model: CausalLM) -> dict[str, Tensor]:
    """Return the tensors for a server, by name: the adapter's if there is one, else all weights.

    Tied weights are there once, by their first name, as in the files of published models.
    """
    if is_adapted(model):
        from peft import get_peft_model_state_dict

        adapter: dict[str, Tensor] = get_peft_model_state_dict(model, save_embedding_layers=False)
        return {name: tensor.detach() for name, tensor in adapter.items()}
    tensors: dict[str, Tensor] = {}
    seen: set[tuple[int, torch.Size]] = set()
    for name, tensor in model.state_dict().items():
        place = (tensor.data_ptr(), tensor.shape)
        if tensor.numel() and place not in seen:
            seen.add(place)
            tensors[name] = tensor.detach()
    return tensors


@torch.no_grad()
def load_tensors(model: CausalLM, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into a model, of which none is copied unless all of them fit.

    Raises:
        SamplingError: a name or a shape is not the model's.
    """
    own = pushed_tensors(model)
    unknown = sorted(tensors.keys() - own.keys())
    if unknown:
        raise SamplingError(f"the model has no weight {', '.join(unknown[:3])}: it is not the model that is trained")
    for name, tensor in tensors.items():
        if own[name].shape != tensor.shape:
            raise SamplingError(f"{name} has shape {list(tensor.shape)}, but the model's has {list(own[name].shape)}")
    for name, tensor in tensors.items():
        own[name].copy_(tensor)


@dataclass
class PushedPolicy:
    """The policy that servers sample for: its tensors, and the models with which the trainer computes."""

    models: Models

    @property
    def model(self) -> CausalLM:
        """Return the policy."""
        return self.models.policy

    @property
    def is_adapter(self) -> bool:
        """Return whether only an adapter is trained, and pushed."""
        return is_adapted(self.model)

    @property
    def is_frozen(self) -> bool:
        """Return whether no weight needs a gradient, as of a copy to sample ahead from."""
        return not any(weight.requires_grad for weight in self.model.parameters())

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors for a server, by name; no copies."""
        return pushed_tensors(self.model)

    def write_config(self, folder: Path) -> None:
        """Write the model's or the adapter's configuration beside its weights."""
        if is_adapted(self.model):
            self.model.peft_config[self.model.active_adapter].save_pretrained(str(folder))
        else:
            self.model.config.save_pretrained(folder)


@dataclass
class WeightFolders:
    """The folders of pushed weights below `root`: one a push, renamed to its name once it is complete."""

    root: Path
    written: float = 0.0  # MB since the metrics were taken
    places: dict[str, Path] = field(default_factory=dict)  # the folder that has each tensor's newest value
    before: dict[str, Path] = field(default_factory=dict)  # and the value before it

    def write(
        self,
        name: str,
        tensors: Mapping[str, Tensor],
        *,
        manifest: Mapping[str, Any],
        is_adapter: bool,
        write_config: Callable[[Path], None],
    ) -> Path:
        """Write a folder as a whole, then the file VERSION that names it; return the folder.

        Raises:
            SamplingError: there is no room, or the folder cannot be written.
        """
        folder, partial = self.root / name, self.root / f".{name}.partial"
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            file = partial / (ADAPTER if is_adapter else WEIGHTS)
            write_tensors({key: tensor.detach().cpu() for key, tensor in tensors.items()}, file)
            write_config(partial)
            (partial / MANIFEST).write_text(json.dumps(dict(manifest)), encoding="utf-8")
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
            write_atomically(self.root / VERSION, name + "\n")
        except (OSError, SafetensorError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise SamplingError(f"cannot write the weights for the servers into {folder}: {error}") from error
        self.written += (folder / file.name).stat().st_size / 1e6
        return folder

    def moved(self, names: Mapping[str, Tensor], folder: Path) -> None:
        """Remember that the newest values of these tensors are in `folder`."""
        self.before = dict(self.places)
        self.places |= dict.fromkeys(names, folder)

    def older(self) -> dict[str, Tensor]:
        """Read the values before the newest push, as far as they are still there."""
        tensors: dict[str, Tensor] = {}
        for folder in set(self.before.values()):
            for file in (folder / WEIGHTS, folder / ADAPTER):
                if file.is_file():
                    stored = load_file(file)
                    tensors |= {name: stored[name] for name, place in self.before.items() if place == folder}
        return tensors

    def prune(self, kept: set[Path]) -> None:
        """Delete the folders that hold neither a tensor's newest value nor the one before, and broken pushes."""
        needed = {*self.places.values(), *self.before.values(), *kept}
        for folder in self.root.iterdir() if self.root.is_dir() else ():
            if folder.is_dir() and folder not in needed:
                shutil.rmtree(folder, ignore_errors=True)

    def take_written(self) -> float:
        """Return the MB written since the last call."""
        written, self.written = self.written, 0.0
        return written


def read_push(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any], bool]:
    """Read a folder: its tensors, its manifest, and whether they are an adapter's.

    Raises:
        SamplingError: it is not complete or cannot be read.
    """
    adapter = folder / ADAPTER
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        tensors = load_file(adapter if adapter.is_file() else folder / WEIGHTS)
    except Exception as error:
        raise SamplingError(f"cannot read weights from {folder}: {error}") from error
    if sorted(manifest["tensors"]) != sorted(tensors):
        raise SamplingError(f"the weights in {folder} are not those that {MANIFEST} lists")
    return tensors, manifest, adapter.is_file()
