"""Adapters on a model: their settings for peft, the modules that get one, and the modules trained whole beside them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf.config.weights import LoraConfig
from rlhf.errors import ConfigError, did_you_mean
from rlhf.models.kernels.quantized import QuantizedLinear, shapes_alone
from rlhf.models.stored import make_dense

HALVES = {"attention": ("attn", "attention"), "mlp": ("mlp", "ffn", "feed_forward")}
"""The parts of names that mark a layer's halves, by the preset of target_modules."""


def peft_settings(model: nn.Module, config: LoraConfig, task: str | None) -> Any:
    """Return the settings as peft takes them.

    Args:
        task: peft's name of the model's task, CAUSAL_LM or SEQ_CLS.

    Raises:
        ConfigError: a module that is named is not there, or shares its weight.
    """
    from peft import LoraConfig as Settings

    target = config.target_modules
    _check_named(model, config)
    _check_shared(model, config)
    return Settings(
        r=config.r,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # any number will do
        lora_dropout=config.dropout,
        target_modules=_of_half(model, target) if isinstance(target, str) and target in HALVES else target,
        modules_to_save=config.modules_to_save or None,
        use_rslora=config.rslora,
        use_dora=config.dora,
        task_type=task,
    )


PEFT_NAMES = {"alpha": "lora_alpha", "dropout": "lora_dropout", "rslora": "use_rslora", "dora": "use_dora"}


def overruled_settings(base: nn.Module, config: LoraConfig, folder: Path) -> list[str]:
    """Describe each given setting that differs from the adapter in `folder`, which is trained further."""
    own = settings_in(folder)
    if isinstance(own.target_modules, set):
        own.target_modules = sorted(own.target_modules)
    asked = peft_settings(base, config, None)

    def value(settings: Any, name: str) -> Any:
        if name == "target_modules":
            return _targeted(base, settings)
        return getattr(settings, PEFT_NAMES.get(name, name)) or None

    return [
        f"lora.{name}={getattr(config, name)} has no effect (it has {getattr(own, PEFT_NAMES.get(name, name))})"
        for name in sorted(config.model_fields_set - {"start"})
        if value(asked, name) != value(own, name)
    ]


def settings_in(folder: Path) -> Any:
    """Read peft's settings of an adapter; the head, which is ours, is left out of the modules that it saves."""
    from peft import PeftConfig

    settings: Any = PeftConfig.from_pretrained(str(folder))
    settings.modules_to_save = [n for n in settings.modules_to_save or [] if n not in ("score", "classifier")] or None
    settings.task_type = None
    return settings


def _targeted(base: nn.Module, settings: Any) -> list[str]:
    """List the modules of `base` that get an adapter by peft's settings."""
    from peft.tuners.tuners_utils import check_target_module_exists

    if settings.target_modules != "all-linear":
        return [path for path, _ in base.named_modules() if check_target_module_exists(settings, path)]
    head = base.get_output_embeddings() if isinstance(base, PreTrainedModel) else None
    linear = nn.Linear, Conv1D
    return [path for path, part in base.named_modules() if isinstance(part, linear) and part is not head]


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


def _check_named(model: nn.Module, config: LoraConfig) -> None:
    """Check that each module that is named is there: peft leaves out missing ones, if it finds another.

    Raises:
        ConfigError: one is not.
    """
    paths = [path for path, _ in model.named_modules()]
    last = sorted({path.rpartition(".")[2] for path in paths})
    targets = config.target_modules if isinstance(config.target_modules, list) else []
    for key, names in (("target_modules", targets), ("modules_to_save", config.modules_to_save)):
        for name in names:
            if not any(f".{path}".endswith(f".{name}") for path in paths):
                raise ConfigError(
                    f"lora.{key} has {name!r}, and {type(model).__name__} has no such module{did_you_mean(name, last)}"
                )


def _check_shared(model: nn.Module, config: LoraConfig) -> None:
    """Check that a module that gets an adapter by its name, or is trained whole, shares its weight with no other.

    Raises:
        ConfigError: one does; merged into its weight, the change would reach the other as well.
    """
    targets = config.target_modules if isinstance(config.target_modules, list) else []
    for key, names in (("target_modules", targets), ("modules_to_save", config.modules_to_save)):
        for paths in shared_weights(model):
            mine = [path for path in paths if any(f".{path}".endswith(f".{name}") for name in names)]
            if mine:
                other = next(path for path in paths if path != mine[0])
                raise ConfigError(
                    f"lora.{key} has {mine[0].rpartition('.')[2]}, which shares its weight with {other} in this model, "
                    "so that one cannot change without the other: leave it out, or train all weights (no lora)"
                )


def shared_weights(model: nn.Module) -> list[list[str]]:
    """List groups of module paths; the modules of a group share one weight."""
    holders: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is not None:
            holders.setdefault(id(weight), []).append(path)
    return [paths for paths in holders.values() if len(paths) > 1]


def shared_adapted(adapted: nn.Module) -> list[str]:
    """List the LoRA layers whose weight another layer shares: a merge would change both layers."""
    paths = [path for paths in shared_weights(adapted) for path in paths if path.endswith(".base_layer")]
    layers = [path.removesuffix(".base_layer").removeprefix("base_model.model.") for path in paths]
    return [layer for layer in layers if not layer.endswith(".token_adapter")]


def train_saved_modules(model: nn.Module) -> None:
    """Keep in float32 the modules that are trained whole beside adapters, for a base in any dtype."""
    for module in list(model.modules()):
        copies = getattr(module, "modules_to_save", None)
        if not isinstance(copies, nn.ModuleDict):
            continue
        for name, part in list(copies.items()):
            dense = part.as_linear() if isinstance(part, QuantizedLinear) else make_dense(part)
            copies[name] = dense.requires_grad_(True)


class _StepDropout(nn.Dropout):
    """Dropout with a switch of its own: sampling and evaluation put models into training mode again."""

    is_on = False

    def forward(self, input: Tensor) -> Tensor:
        return functional.dropout(input, self.p, training=self.is_on)


class Dropout:
    """The dropout of a model's adapters: off, except within an optimizer step, with draws from a seed."""

    def __init__(self, model: nn.Module) -> None:
        """Switch it off."""
        self._layers: list[_StepDropout] = []
        for part in model.modules():
            if isinstance(part, nn.Dropout) and part.p > 0:
                part.__class__ = _StepDropout
                assert isinstance(part, _StepDropout)
                self._layers.append(part)

    def _switch(self, *, on: bool) -> None:
        for layer in self._layers:
            layer.is_on = on

    @contextmanager
    def drawn(self, seed: int) -> Iterator[None]:
        """Switch it on within this context, with draws that depend on `seed` alone."""
        if not self._layers:
            yield
            return
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self._switch(on=True)
            try:
                yield
            finally:
                self._switch(on=False)


def adding(settings: Any) -> AbstractContextManager[None]:
    """Return the context in which peft adds an adapter; it widens quantized weights only to read their numbers."""
    reads_numbers = settings.use_dora or settings.init_lora_weights is not True
    return nullcontext() if reads_numbers else shapes_alone()


@contextmanager
def quiet_peft() -> Iterator[None]:
    """Silence peft 0.21's warnings about a renamed property and the weight layout of GPT-2."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`", category=FutureWarning)
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False", category=UserWarning)
        yield
