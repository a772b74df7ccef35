"""Prefill and decode steps of a model: the keys and values of prompts, then logits token by token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface, Cache, DynamicCache, PretrainedConfig

from rlhf.models.backbone import CausalLM
from rlhf.sampling.slots import Slots

NAME = "rlhf_slots"  # the name under which our attention is registered with transformers


class Unsupported(Exception):
    """The model's attention does something that the fast sampler does not support; the message says what."""


@runtime_checkable
class Decoder(Protocol):
    """Decodes one token further for all rows at once."""

    def step(self, slots: Slots, tokens: Int[Tensor, " N"], positions: Int[Tensor, " N"]) -> Float[Tensor, "N V"]:
        """Return the logits that follow `tokens`, which stand at `positions` of their rows."""


def prefill(
    model: CausalLM, ids: Int[Tensor, "L C"], mask: Bool[Tensor, "L C"]
) -> tuple[Float[Tensor, "L V"], list[tuple[Tensor, Tensor]]]:
    """Return the logits after each left-padded prompt and all layers' keys and values, using the model's attention."""
    cache = DynamicCache()  # without the configuration it keeps all columns of sliding-window layers too
    logits = model(
        input_ids=ids,
        attention_mask=mask.long(),
        position_ids=(mask.long().cumsum(dim=1) - 1).clamp(min=0),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    ).logits[:, -1]
    layers = []
    for layer in cache.layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or keys.shape[2] != ids.shape[1]:
            raise Unsupported("its cache does not hold keys and values of every token")
        layers.append((keys, values))
    return logits, layers


class ModelDecoder:
    """Decodes with a transformers model's own modules, but our attention, set through its AttentionInterface."""

    def __init__(self, model: CausalLM) -> None:
        self.model = model

    def step(self, slots: Slots, tokens: Int[Tensor, " N"], positions: Int[Tensor, " N"]) -> Float[Tensor, "N V"]:
        """Decode one token of every row; see Decoder."""
        slots.begin_step(positions)
        with _use_our_attention(self.model.config):
            output = self.model(
                input_ids=tokens[:, None],
                attention_mask=torch.ones_like(tokens)[:, None],  # unused, but some models warn without it
                position_ids=positions[:, None],
                past_key_values=_PassThroughCache(),
                use_cache=True,
                slots=slots,
            )
        logits: Tensor = output.logits[:, -1]
        return logits


class _PassThroughCache(Cache):
    """Stands in for the model's cache and hands the new token's key and value on to our attention."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states


@contextmanager
def _use_our_attention(config: PretrainedConfig) -> Iterator[None]:
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before


UNKNOWN = ("softcap", "position_bias", "s_aux")  # arguments by which some models change the scores or the softmax


def _attention(
    module: nn.Module,
    query: Float[Tensor, "N H 1 D"],
    key: Float[Tensor, "N G 1 D"],
    value: Float[Tensor, "N G 1 Dv"],
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    slots: Slots | None = None,
    **kwargs: Any,
) -> tuple[Float[Tensor, "N 1 H Dv"], None]:
    if slots is None:
        raise Unsupported("it does not pass keyword arguments on to its attention")
    for name in UNKNOWN:
        if kwargs.get(name) is not None:
            raise Unsupported(f"its attention has {name}")
    with torch.autocast(query.device.type, enabled=False):
        output = slots.attend(
            int(module.layer_idx),  # type: ignore[arg-type]  # every attention module of transformers has it
            query.squeeze(2),
            key.squeeze(2),
            value.squeeze(2),
            scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
            window=sliding_window,
        )
    return output[:, None], None


AttentionInterface.register(NAME, _attention)
