"""A hash of what a model computes, for caches that must not outlive the weights they were made with."""

from __future__ import annotations

import hashlib
import json

import torch
from peft import PeftModel
from torch import Tensor

from rlhf.models.backbone import CausalLM

_NOT_ARITHMETIC = {"_name_or_path", "transformers_version", "use_cache", "dtype", "torch_dtype"}


def weights_fingerprint(model: CausalLM, state: dict[str, Tensor] | None = None) -> str:
    """Compute a digest (SHA-256, hex) of the configuration and all weights; of an adapted model, those of its base.

    `state` holds the whole weights where this process has only a part of them.
    """
    base = model.get_base_model() if isinstance(model, PeftModel) else model
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
