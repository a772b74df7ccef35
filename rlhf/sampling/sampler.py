"""The protocol of samplers, and the choice of one for a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch

from rlhf.batching import concat
from rlhf.config.sections import SamplingConfig
from rlhf.errors import ConfigError
from rlhf.models.adapters import base_model, is_adapted
from rlhf.models.backbone import CausalLM
from rlhf.models.text_config import text_config
from rlhf.runtime.engine import Engine
from rlhf.runtime.offload import Offload
from rlhf.sampling.fast.engine import FastSampler, KeptSteps
from rlhf.sampling.generate import HFSampler, rotation_switch
from rlhf.types import Completions, Prompts


@runtime_checkable
class Sampler(Protocol):
    """Samples completions from the policy with its current weights."""

    def sample(self, prompts: Prompts, *, key: int, group_size: int, greedy: bool = False) -> Completions:
        """Sample `group_size` completions of each prompt; the rows of one prompt are contiguous.

        A completion depends on `key` (runtime.seeding.derive_seed), its row id and the weights, and on nothing else:
        neither on its batch nor on its rank. `greedy` takes the most likely token instead of sampling.
        """


@runtime_checkable
class BatchesSampler(Sampler, Protocol):
    """A sampler that has to know which batches belong together."""

    def sample_batches(
        self, batches: Sequence[Prompts], *, key: int, group_size: int, greedy: bool = False
    ) -> Completions:
        """Sample completions of the prompts of all batches; see Sampler.sample."""


def sample_batches(
    sampler: Sampler, batches: Sequence[Prompts], *, key: int, group_size: int, greedy: bool = False
) -> Completions:
    """Sample completions of the prompts of all batches, one batch after another; see Sampler.sample."""
    if isinstance(sampler, BatchesSampler):
        return sampler.sample_batches(batches, key=key, group_size=group_size, greedy=greedy)
    return concat([sampler.sample(batch, key=key, group_size=group_size, greedy=greedy) for batch in batches])


class OffloadingSampler:
    """A sampler during whose rollouts the models that it does not read are off the device."""

    def __init__(self, sampler: Sampler, offload: Offload) -> None:
        """Set the sampler, and the offload of the models."""
        self.sampler, self.offload = sampler, offload

    def sample(self, prompts: Prompts, *, key: int, group_size: int, greedy: bool = False) -> Completions:
        """Sample completions; see Sampler.sample."""
        with self.offload.rollout():
            return self.sampler.sample(prompts, key=key, group_size=group_size, greedy=greedy)

    def sample_batches(
        self, batches: Sequence[Prompts], *, key: int, group_size: int, greedy: bool = False
    ) -> Completions:
        """Sample completions of several batches; see BatchesSampler.sample_batches."""
        with self.offload.rollout():
            return sample_batches(self.sampler, batches, key=key, group_size=group_size, greedy=greedy)


LAYERS = {"full_attention", "sliding_attention"}  # layer types whose keys and values the fast sampler can cache
SCORES = ("attn_logit_softcapping", "alibi")  # settings of models whose attention modifies the scores


def make_sampler(
    model: CausalLM,
    config: SamplingConfig,
    *,
    eos_ids: tuple[int, ...],
    pad_id: int,
    dtype: str,
    device: torch.device,
    engine: Engine | None = None,
    kept: KeptSteps | None = None,
    warn: Callable[[str], None] = lambda _: None,
) -> Sampler:
    """Make the sampler that `sampling.backend` asks for; `warn` is called with the reason if auto is not fast.

    Samplers from one model, with one dtype, may share the memory of the fast one on a GPU: `kept`.

    Raises:
        ConfigError: the backend is `fast`, which cannot sample from this model, or under sharding.rollout=layered.
    """
    reason = None if config.backend == "hf" else fast_unsupported_reason(model)
    if engine is not None and engine.samples_in_layers:
        _check_layered(model, config)
        reason = reason or "sharding.rollout=layered gathers the layers in their own forward"
    if reason is not None and config.backend == "fast":
        raise ConfigError(f"sampling.backend=fast cannot sample from this model: {reason}; set sampling.backend=auto")
    if reason is not None:
        warn(f"sampling with transformers' generate, which is slower: {reason}")
    if config.backend == "hf" or reason is not None:
        return HFSampler(model, config, eos_ids=eos_ids, pad_id=pad_id, dtype=dtype, device=device, engine=engine)
    return FastSampler(
        model,
        config,
        eos_ids=eos_ids,
        pad_id=pad_id,
        dtype=dtype,
        device=device,
        engine=engine,
        lean=config.copy_weights,
        kept=kept,
        warn=warn,
    )


def _check_layered(model: CausalLM, config: SamplingConfig) -> None:
    """Check that the ranks can run the same forward passes while they sample.

    Raises:
        ConfigError: the fast sampler was asked for by name, or batches may be cut differently on the ranks.
    """
    cure = "set sharding.rollout=gather"
    if config.backend == "fast":
        raise ConfigError(
            "sampling.backend=fast evicts rows that are complete, each rank at another time, but under "
            f"sharding.rollout=layered all ranks must run the same passes: set sampling.backend=auto, or {cure}"
        )
    if rotation_switch(model) is not None:
        raise ConfigError(
            "the rotations of this model change with the length (longrope), so that ranks sample their rows in "
            f"different batches, but under sharding.rollout=layered all must run the same passes: {cure}"
        )


def fast_unsupported_reason(model: CausalLM) -> str | None:
    """Return the reason why the fast sampler cannot sample from this model; None if it can."""
    plain = base_model(model)
    config, name = text_config(plain), type(plain).__name__
    if is_adapted(model) and model.peft_type != "LORA":
        return f"the fast sampler does not support adapters of type {model.peft_type}"
    if getattr(config, "is_encoder_decoder", False):
        return f"{name} is not a decoder-only model"
    if not getattr(plain, "_supports_attention_backend", False):
        return f"the attention of {name} cannot be given another cache"
    if getattr(config, "kv_lora_rank", None):
        return f"{name} has latent attention, whose keys and values differ in width"
    kinds = set(getattr(config, "layer_types", None) or ()) - LAYERS
    if kinds:
        return f"{name} has layers of type {', '.join(sorted(kinds))}"
    for setting in SCORES:
        if getattr(config, setting, None):
            return f"{name} sets {setting}"
    return None
