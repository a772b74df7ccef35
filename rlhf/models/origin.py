"""What a model was loaded from, so that an export can repeat it; fingerprints of weights."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf.data.tokenizer import TOKENIZER_FILES, ModelLocation, base_of_adapter, locate_model, locate_tokenizer
from rlhf.errors import ModelError
from rlhf.models.adapters import base_model
from rlhf.models.backbone import CausalLM, published_config
from rlhf.models.weight_files import CONFIG, INDEX, StoredTensor, local_folder, read_header, read_headers

GENERATION = "generation_config.json"
GGUF_DTYPE = torch.bfloat16  # a quantized file has no dtype of its own; bfloat16 keeps its precision


@dataclass(frozen=True)
class Origin:
    """The published model that a run started from, as far as an export repeats it."""

    dtype: torch.dtype
    """The dtype of weights that `weights` does not list."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """config.json, parsed; empty where it is unknown."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Files to repeat byte for byte: config.json, generation_config.json, code, licence."""
    tokenizer_files: Mapping[str, bytes] = field(default_factory=dict)
    """The tokenizer's files; empty where there are none, so that it must be saved anew."""
    weights: Mapping[str, Mapping[str, StoredTensor]] = field(default_factory=dict)
    """The tensors of each safetensors file."""
    folder: Path | None = None
    """The folder of the weights; None for a GGUF file, or where they are not on this machine."""

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        """Return every stored weight by its name."""
        return {name: tensor for stored in self.weights.values() for name, tensor in stored.items()}

    def stored(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the published weights one by one; files that have changed or gone are skipped."""
        for file, tensors in self.weights.items():
            path = self.folder / file if self.folder is not None else None
            if path is None or not path.is_file() or read_header(path) != tensors:
                continue
            with path.open("rb") as opened:
                for name, tensor in tensors.items():
                    opened.seek(tensor.start)
                    data = bytearray(opened.read(tensor.end - tensor.start))
                    if data:
                        yield name, torch.frombuffer(data, dtype=tensor.dtype).reshape(tensor.shape)


def read_origin(
    model: str, tokenizer_path: str, tokenizer: PreTrainedTokenizerBase, *, trust_remote_code: bool = False
) -> Origin:
    """Read what an export of the model at `model` repeats; nothing is downloaded.

    Args:
        model: folder, GGUF file, adapter's folder (then its base is read) or hub id.
        tokenizer_path: the same for the tokenizer.
        tokenizer: the tokenizer, whose class names further files.
        trust_remote_code: run code that comes with the model to read its configuration.

    Raises:
        ModelError: the model cannot be found.
    """
    location = locate_model(model)
    while location.is_adapter:
        location = locate_model(base_of_adapter(Path(location.name)))
    tokenizer_files = _tokenizer_files(locate_tokenizer(tokenizer_path), tokenizer)
    if location.gguf is not None:
        config = json.loads(published_config(location).to_json_string())
        config.pop("_model_name_or_path", None)  # names a checkpoint that nobody can get
        return Origin(GGUF_DTYPE, config=config, tokenizer_files=tokenizer_files)
    folder = local_folder(location)
    if folder is None:
        config = json.loads(published_config(location, trust_remote_code=trust_remote_code).to_json_string())
        return Origin(_config_dtype(config), config=config, tokenizer_files=tokenizer_files)
    files = {name: (folder / name).read_bytes() for name in _repeated(folder)}
    try:
        config = json.loads(files[CONFIG])
    except (KeyError, ValueError) as error:
        raise ModelError(f"cannot load a model from {model!r}: {folder / CONFIG}: {error}") from error
    weights = read_headers(folder)
    return Origin(_config_dtype(config), config, files, tokenizer_files, weights, folder)


def rounding_loss(origin: Origin, trained: Mapping[str, Tensor], written: Mapping[str, Tensor]) -> float:
    """Compute the share of training's change that is lost to the written dtype: |w' − w| / |w − w0|, or 0."""
    lost = changed = 0.0
    for name, start in origin.stored():
        if name not in trained or not start.is_floating_point() or trained[name].shape != start.shape:
            continue
        now = trained[name].detach().cpu()
        if written[name].dtype == now.dtype:
            continue
        now = now.float()
        lost += float((written[name].cpu().float() - now).square().sum(dtype=torch.float64))
        changed += float((now - start.float()).square().sum(dtype=torch.float64))
    return math.sqrt(lost / changed) if changed else 0.0


def _repeated(folder: Path) -> list[str]:
    names = [CONFIG, GENERATION, INDEX]
    patterns = ("*.py", "LICENSE*", "LICENCE*", "NOTICE*")
    matching = {path.name for pattern in patterns for path in folder.glob(pattern)}
    return [name for name in (*names, *sorted(matching)) if (folder / name).is_file()]


def _tokenizer_files(location: ModelLocation, tokenizer: PreTrainedTokenizerBase) -> dict[str, bytes]:
    folder = local_folder(location, "tokenizer_config.json", "tokenizer.json") if location.gguf is None else None
    if folder is None:
        return {}
    names = dict.fromkeys((*TOKENIZER_FILES, *tokenizer.vocab_files_names.values()))
    paths = [folder / name for name in names if isinstance(name, str)]
    paths += sorted((folder / "additional_chat_templates").glob("*.jinja"))
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths if path.is_file()}


def _config_dtype(config: Mapping[str, Any]) -> torch.dtype:
    dtype = getattr(torch, str(config.get("dtype") or config.get("torch_dtype") or "float32"), None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


_NOT_ARITHMETIC = {"_name_or_path", "transformers_version", "use_cache", "dtype", "torch_dtype"}


def weights_fingerprint(model: CausalLM, state: dict[str, Tensor] | None = None) -> str:
    """Compute a digest (SHA-256, hex) of the configuration and all weights; of an adapted model, those of its base.

    `state` holds the whole weights where this process has only a part of them.
    """
    base = base_model(model)
    if state is not None:
        state = {name.removeprefix("base_model.model.") if base is not model else name: w for name, w in state.items()}
    settings = {name: value for name, value in base.config.to_dict().items() if name not in _NOT_ARITHMETIC}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    for name, tensor in sorted((base.state_dict() if state is None else state).items()):
        if "lora_" in name:
            continue
        digest.update(f"{name.replace('.base_layer', '')} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().reshape(-1).view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()
