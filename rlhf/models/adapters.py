"""Recognize the adapters of peft, imported only if a model has any: it takes a seventh of a run's start."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, cast

from torch import nn
from transformers import PreTrainedModel
from typing_extensions import TypeIs

if TYPE_CHECKING:
    from peft import PeftModel
else:
    PeftModel = nn.Module


def is_adapted(model: nn.Module) -> TypeIs[PeftModel]:
    """Return whether the model is one of peft's, adapters around a base model."""
    peft = sys.modules.get("peft")  # if nobody has imported it, no model is of it
    return peft is not None and isinstance(model, peft.PeftModel)


def base_model(model: nn.Module) -> PreTrainedModel:
    """Return the model within the adapters, or the model itself if it has none."""
    return cast(PreTrainedModel, model.get_base_model() if is_adapted(model) else model)


def is_lora_linear(module: nn.Module) -> bool:
    """Return whether the module is peft's linear layer with LoRA, and no subclass of it."""
    lora = sys.modules.get("peft.tuners.lora")
    return lora is not None and type(module) is lora.Linear


def lora_scales(model: nn.Module) -> dict[str, Any]:
    """Return the factor of the product B·A in each layer with LoRA, by adapter; r, alpha and rslora give it."""
    return {name: part.scaling for name, part in model.named_modules() if hasattr(part, "lora_A")}
