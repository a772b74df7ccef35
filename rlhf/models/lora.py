"""Adapters on a model: their settings for peft, which modules get one, and what may be trained whole beside them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from rlhf.config.weights import LoraConfig
from rlhf.errors import ConfigError
from rlhf.models.kernels.quantized import QuantizedLinear
from rlhf.models.stored import make_dense

HALVES = {"attention": ("attn", "attention"), "mlp": ("mlp", "ffn", "feed_forward")}
"""What the names of a layer's halves contain, by the preset of target_modules."""


def peft_settings(model: nn.Module, config: LoraConfig, task: str | None) -> Any:
    """Return the settings as peft takes them.

    Args:
        model: the model that gets the adapters.
        config: the section.
        task: peft's name of what the model does, CAUSAL_LM or SEQ_CLS.

    Raises:
        ConfigError: a preset of target_modules names no module, or a module to save shares its weight.
    """
    from peft import LoraConfig as Settings

    target = config.target_modules
    _check_saved(model, config.modules_to_save)
    return Settings(
        r=config.r,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # any number will do
        lora_dropout=config.dropout,
        target_modules=_of_half(model, target) if isinstance(target, str) and target in HALVES else target,
        modules_to_save=config.modules_to_save or None,
        use_rslora=config.rslora,
        use_dora=config.dora,
        task_type=task,  # type: ignore[arg-type]  # its name will do
    )


def _of_half(model: nn.Module, half: str) -> list[str]:
    """List the names of the linear layers in the attention halves, or in the feed-forward halves, of a model."""
    names = {
        path.rpartition(".")[2]
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and any(word in _parent(path) for word in HALVES[half])
    }
    if not names:
        raise ConfigError(
            f"lora.target_modules is {half}, but no linear layer of {type(model).__name__} is in a module of such a "
            "name: list the names of the layers, as in [q_proj, v_proj]"
        )
    return sorted(names)


def _parent(path: str) -> str:
    return path.rpartition(".")[0].rpartition(".")[2].lower()


def _check_saved(model: nn.Module, names: list[str]) -> None:
    """Check that a module that is trained whole shares its weight with no other, which would stay as it was."""
    holders: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is not None:
            holders.setdefault(id(weight), []).append(path)
    for shared in (paths for paths in holders.values() if len(paths) > 1):
        mine = [path for path in shared if path.rpartition(".")[2] in names]
        if mine:
            other = next(path for path in shared if path != mine[0])
            raise ConfigError(
                f"lora.modules_to_save has {mine[0].rpartition('.')[2]}, whose weight is also that of {other} in this "
                "model, which would stay as it was: leave it out, or train all weights (no lora)"
            )


def train_saved_modules(model: nn.Module) -> None:
    """Keep in float32 the modules that are trained whole beside adapters, whatever the base is kept in."""
    for module in list(model.modules()):
        copies = getattr(module, "modules_to_save", None)
        if not isinstance(copies, nn.ModuleDict):
            continue
        for name, part in list(copies.items()):
            dense = part.as_linear() if isinstance(part, QuantizedLinear) else make_dense(part)
            copies[name] = dense.requires_grad_(True)


@contextmanager
def quiet_peft() -> Iterator[None]:
    """Silence peft 0.21's warnings about a renamed property and the weight layout of GPT-2."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`", category=FutureWarning)
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False", category=UserWarning)
        yield
