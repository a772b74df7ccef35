"""Load a model under ZeRO-3 without ever holding it whole: each rank reads its own part of every weight.

The model is built without memory for its weights (on torch's meta device). Then, weight after weight, each rank reads
from the safetensors files the elements that are its share, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from rlhf.models.weight_files import WeightFiles, read_headers
from rlhf.runtime.engine import Engine

_SPLIT: WeakSet[nn.Module] = WeakSet()
_READ_AS_THEY_ARE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def load_split(
    make: Callable[[], PreTrainedModel], folder: Path | None, engine: Engine, *, new: Sequence[str] = ()
) -> PreTrainedModel | None:
    """Load a model's weights split over the ranks; None where only the whole model can be loaded, which is noted.

    Every rank calls this. Where one of them cannot load its part, none does.

    Args:
        make: builds the model from its configuration; called where parameters get no memory.
        folder: the folder of its configuration and safetensors files; None where it is not on this machine.
        engine: splits the weights.
        new: the parameters that are not in the files and get zeros, whole in every process: the caller sets them.

    Raises:
        ModelError: a file ends too early.
    """
    files = {} if folder is None else read_headers(folder)
    with init_empty_weights(include_buffers=False):
        model = make()
    model.tie_weights()  # the context has made parameters anew, and parted those that were one
    stored = WeightFiles(folder or Path(), files)
    names = _stored_names(model, stored, new) if files else "it has no safetensors files on this machine yet"
    reasons = engine.ranks.gather(names if isinstance(names, str) else "")  # of several machines one may lack the files
    if isinstance(names, str) or any(reasons):
        engine.notes.append(_whole_note(folder, next(filter(None, reasons))))
        return None
    for name in new:
        _set_parameter(model, name)
    _load_buffers(model, stored)
    engine.partition(model, lambda name, start, stop: stored.read(names[name], start, stop))
    if folder is not None and model.can_generate():
        model.generation_config = _generation_config(folder) or model.generation_config
    _SPLIT.add(model)
    model.eval()
    return model


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
    if stored.dtype not in _READ_AS_THEY_ARE:
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
