"""What a decode step asks of a model: the prompt's keys and values, then logits token by token."""

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

NAME = "rlhf_slots"  # under which our attention is known to transformers


class Unsupported(Exception):
    """The model does something in its attention that the fast sampler does not know; says what."""


@runtime_checkable
class Decoder(Protocol):
    """One token further, for all rows at once."""

    def step(self, slots: Slots, tokens: Int[Tensor, " N"], positions: Int[Tensor, " N"]) -> Float[Tensor, "N V"]:
        """The logits after `tokens`, which stand at `positions` of their rows."""


def prefill(
    model: CausalLM, ids: Int[Tensor, "L C"], mask: Bool[Tensor, "L C"]
) -> tuple[Float[Tensor, "L V"], list[tuple[Tensor, Tensor]]]:
    """The logits after each left-padded prompt, and every layer's keys and values, by the model's own attention."""
    cache = DynamicCache()  # made without the configuration, it keeps all columns of sliding layers too
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
    """Any decoder of transformers whose attention is called through its interface: its own modules, our attention."""

    def __init__(self, model: CausalLM) -> None:
        self.model = model

    def step(self, slots: Slots, tokens: Int[Tensor, " N"], positions: Int[Tensor, " N"]) -> Float[Tensor, "N V"]:
        """See Decoder."""
        slots.begin_step(positions)
        with _our_attention(self.model.config):
            output = self.model(
                input_ids=tokens[:, None],
                attention_mask=torch.ones_like(tokens)[:, None],  # nobody reads it, but some warn where there is none
                position_ids=positions[:, None],
                past_key_values=_Written(),
                use_cache=True,
                slots=slots,
            )
        logits: Tensor = output.logits[:, -1]
        return logits


class _Written(Cache):
    """What the model's attention takes for its cache: hands the new token's key and value on to our attention."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states


@contextmanager
def _our_attention(config: PretrainedConfig) -> Iterator[None]:
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before


UNKNOWN = ("softcap", "position_bias", "s_aux")  # what some models add to the scores or the softmax


def _attention(
    module: nn.Module,
    query: Float[Tensor, "N H 1 D"],
    key: Float[Tensor, "N G 1 D"],
    value: Float[Tensor, "N G 1 Dv"],
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    slots: Slots | None = None,
    **more: Any,
) -> tuple[Float[Tensor, "N 1 H Dv"], None]:
    if slots is None:
        raise Unsupported("it does not pass on what its attention is called with")
    for name in UNKNOWN:
        if more.get(name) is not None:
            raise Unsupported(f"its attention has {name}")
    with torch.autocast(query.device.type, enabled=False):
        found = slots.attend(
            int(module.layer_idx),  # type: ignore[arg-type]  # every attention module of transformers has it
            query.squeeze(2),
            key.squeeze(2),
            value.squeeze(2),
            scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
            window=sliding_window,
        )
    return found[:, None], None


AttentionInterface.register(NAME, _attention)
