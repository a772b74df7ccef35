"""The changes for a run that does not fit, the cheapest first, each with its saving."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from rlhf.config.sections import OnlineConfig, RewardModelConfig, RunConfiguration
from rlhf.config.weights import LoraConfig
from rlhf.model_files import adapter_at, path_of_base
from rlhf.planning.shapes import continued_adapter
from rlhf.section import Section

S = TypeVar("S", bound=Section)
CureSettings = Callable[[RunConfiguration], dict[str, Any]]
"""Returns the settings that a cure sets, by their full key; none if it does not apply."""

RANK = 16
DECODED = 16  # rows decoded together
SCORED = 4  # rows scored together


@dataclass(frozen=True)
class Cure:
    """A change that saves memory."""

    name: str
    cost: str
    settings: CureSettings

    def applied(self, config: RunConfiguration) -> RunConfiguration:
        """Return the configuration with this cure."""
        return with_settings(config, self.settings(config))


def with_settings(config: S, settings: dict[str, Any]) -> S:
    """Return a section with values set by dotted keys, without validation: settings that were not set stay so."""
    for key, value in settings.items():
        config = _with(config, key.split("."), value)
    return config


def _with(section: Any, names: list[str], value: Any) -> Any:
    name, *rest = names
    inner = value if not rest else _with(getattr(section, name), rest, value)
    return section.model_copy(update={name: inner})


def written(settings: dict[str, Any]) -> str:
    """Write settings as `key=value`, as on a command line."""
    return " ".join(
        f"{key}.r={RANK}" if isinstance(value, LoraConfig) else _word(key, value) for key, value in settings.items()
    )


def _word(key: str, value: Any) -> str:
    return f"{key.removesuffix('.mode')}={str(value).lower() if isinstance(value, bool) else value}"


def _sections(config: RunConfiguration) -> dict[str, Any]:
    """Return the sections of the models that are trained, the policy first."""
    if isinstance(config, RewardModelConfig):
        return {"model": config.model}
    if isinstance(config, OnlineConfig) and config.algorithm.value_loss is not None and not config.critic.shared:
        return {"policy": config.policy, "critic": config.critic}
    return {"policy": config.policy}


def _takes(section: Any, name: str) -> bool:
    return name in type(section).model_fields


def _checkpointing(config: RunConfiguration) -> dict[str, Any]:
    return {
        f"{name}.gradient_checkpointing": True
        for name, section in _sections(config).items()
        if not section.gradient_checkpointing
    }


def _adapter_alone(config: RunConfiguration) -> dict[str, Any]:
    name, section = next(iter(_sections(config).items()))
    if section.lora is None or section.export != "merged":
        return {}
    is_reward_model = isinstance(config, RewardModelConfig)
    continues = continued_adapter(section.model, section.lora, head=not is_reward_model)
    is_over_adapter = adapter_at(path_of_base(section.model) if continues else section.model)
    return {} if is_over_adapter else {f"{name}.export": "adapter"}


def _micro_batch(config: RunConfiguration) -> dict[str, Any]:
    batch = config.batch
    if batch.micro_batch_tokens is not None:
        return {"batch.micro_batch_tokens": 1} if batch.micro_batch_tokens > 1 else {}
    return {"batch.micro_batch_size": 1} if batch.micro_batch_size > 1 else {}


def _small_moments(config: RunConfiguration) -> dict[str, Any]:
    if config.sharding.uses_deepspeed:
        return {}
    return {
        f"{name}.optimizer": "adamw_8bit" for name, section in _sections(config).items() if section.optimizer == "adamw"
    }


def _adapters(config: RunConfiguration) -> dict[str, Any]:
    return {f"{name}.lora": LoraConfig(r=RANK) for name, section in _sections(config).items() if section.lora is None}


def _frozen_in(kept: str) -> CureSettings:
    def change(config: RunConfiguration) -> dict[str, Any]:
        if config.sharding.uses_deepspeed:
            return {}
        return {key: kept for key, now in _frozen_weights(config) if now in ("auto", "float32") or kept == "nf4"}

    return change


def _frozen_weights(config: RunConfiguration) -> Iterator[tuple[str, str]]:
    """Yield the keys that say how frozen weights are kept, with their values."""
    for name, section in _sections(config).items():
        if section.lora is not None:
            yield f"{name}.weights", section.weights
    if isinstance(config, RewardModelConfig):
        return
    if config.policy.lora is None or config.reference_model is not None:
        yield "reference.weights", config.reference.weights
    source = None if config.reward is None else config.reward.source
    if source is not None and _takes(source, "weights"):
        yield "reward.source.weights", getattr(source, "weights")  # noqa: B009


def _one_base(config: RunConfiguration) -> dict[str, Any]:
    if not isinstance(config, OnlineConfig) or config.algorithm.value_loss is None or config.critic.shared:
        return {}
    if config.policy.lora is None or config.critic.lora is None or config.critic.init == "policy":
        return {}
    return {"critic.init": "policy"}


def _live_weights(config: RunConfiguration) -> dict[str, Any]:
    if not isinstance(config, OnlineConfig) or config.sampling.backend not in ("auto", "fast"):
        return {}
    return {"sampling.copy_weights": False} if config.sampling.copy_weights else {}


def _fewer_decoded(config: RunConfiguration) -> dict[str, Any]:
    is_larger = isinstance(config, OnlineConfig) and config.sampling.batch_size > DECODED
    return {"sampling.batch_size": DECODED} if is_larger else {}


def _fewer_scored(config: RunConfiguration) -> dict[str, Any]:
    source = config.reward.source if isinstance(config, OnlineConfig) else None
    if source is None or not _takes(source, "micro_batch_size"):
        return {}
    return {"reward.source.micro_batch_size": SCORED} if getattr(source, "micro_batch_size") > SCORED else {}  # noqa: B009


def _offload(name: str) -> CureSettings:
    def change(config: RunConfiguration) -> dict[str, Any]:
        if not isinstance(config, OnlineConfig) or getattr(config.offload, name) or config.sharding.uses_deepspeed:
            return {}
        is_free = name == "frozen_models" or not config.overlap.ahead
        is_alone = name != "frozen_models" or config.overlap.reward_parts == 1
        return {f"offload.{name}": True} if is_free and is_alone else {}

    return change


def _zero(mode: str) -> CureSettings:
    def change(config: RunConfiguration) -> dict[str, Any]:
        later = config.sharding.mode.startswith("zero") and config.sharding.mode >= mode
        sections = _sections(config).values()
        if later or any(section.weights not in ("auto", "float32") for section in sections):
            return {}
        if any(section.optimizer == "adamw_8bit" for section in sections):
            return {}
        return {"sharding.mode": mode}

    return change


CURES = (
    Cure("recompute activations", "about a third more time in the update", _checkpointing),
    Cure("smaller micro-batches", "slower passes; the result does not change", _micro_batch),
    Cure("fewer rows decoded together", "slower sampling; the result does not change", _fewer_decoded),
    Cure("fewer rows scored together", "slower scoring; the result does not change", _fewer_scored),
    Cure("frozen models off the GPU between their uses", "copies twice a step", _offload("frozen_models")),
    Cure("sampler off the GPU between rollouts", "it is made again at every rollout", _offload("sampler")),
    Cure("moments off the GPU between updates", "copies twice a step", _offload("optimizer")),
    Cure("moments in 8 bits", "none to speak of; needs bitsandbytes", _small_moments),
    Cure("adapters (LoRA)", "trains fewer directions; another learning rate", _adapters),
    Cure("export the adapter alone", "it is loaded with its base", _adapter_alone),
    Cure("frozen weights in 16 bits", "a rounding of frozen weights", _frozen_in("bfloat16")),
    Cure("frozen weights in 4 bits", "a coarser rounding, and time to widen them", _frozen_in("nf4")),
    Cure("no copy of the weights for sampling", "slower sampling, through the model's own modules", _live_weights),
    Cure("adapters of all roles on one base", "the critic starts from the policy", _one_base),
)
"""The cures on one process, the cheapest first."""

SHARDED = (
    Cure("ZeRO-2: split moments and gradients", "several GPUs, and their traffic", _zero("zero2")),
    Cure("ZeRO-3: split weights too", "more traffic", _zero("zero3")),
    Cure("ZeRO-2, moments in CPU memory", "slow steps of the optimizer", _zero("zero2_offload")),
    Cure("ZeRO-3, weights and moments in CPU memory", "the slowest", _zero("zero3_offload")),
)
"""The cures on several processes; the last two work on one."""
