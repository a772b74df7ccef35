"""The arithmetic that a run uses where its configuration does not say: float32 on a CPU, bfloat16 on a GPU."""

from __future__ import annotations

from typing import TypeVar

import torch

from rlhf.config.sections import OfflineConfig, OnlineConfig, RewardModelConfig, TrainConfig
from rlhf.runtime.device import choose_device

C = TypeVar("C", OnlineConfig, OfflineConfig, RewardModelConfig)


def with_default_precision(config: C) -> C:
    """Return the configuration with bfloat16 arithmetic on a GPU that has it, unless the file sets the dtype.

    The weights, their optimizer state, the residual stream, softmaxes and losses stay in float32.

    Raises:
        ConfigError: run.device names a device that torch does not see.
    """
    section = _section(config)
    trained = getattr(config, section)
    device = choose_device(config.run.device, key="run.device")
    if device.type != "cuda" or "dtype" in trained.model_fields_set or not torch.cuda.is_bf16_supported():
        return config
    return config.model_copy(update={section: trained.model_copy(update={"dtype": "bfloat16"})})


def precision_note(config: TrainConfig | RewardModelConfig, device: torch.device) -> list[str]:
    """Describe the arithmetic on a GPU in one line; nothing on a CPU."""
    if device.type != "cuda":
        return []
    section = _section(config)
    products = "TF32 (run.tf32)" if config.run.tf32 else "full float32"
    slow = "" if getattr(config, section).dtype == "bfloat16" else "; bfloat16 is several times as fast on a GPU"
    return [f"arithmetic: {section}.dtype={getattr(config, section).dtype}, products in float32 by {products}{slow}"]


def _section(config: TrainConfig | RewardModelConfig) -> str:
    return "model" if isinstance(config, RewardModelConfig) else "policy"
