"""Decode steps over the KV cache: the model's own modules, CUDA graphs of a step, and the trial before use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface, Cache, PretrainedConfig

from rlhf.batching import widen
from rlhf.models.backbone import CausalLM
from rlhf.sampling.fast.kv_cache import KVCache, UnsupportedModel, prefill
from rlhf.types import Prompts

ATTENTION_NAME = "rlhf_slots"  # the name under which our attention is registered with transformers


@runtime_checkable
class Decoder(Protocol):
    """Decodes one token further for all rows at once."""

    def step(self, slots: KVCache, tokens: Int[Tensor, " N"], positions: Int[Tensor, " N"]) -> Float[Tensor, "N V"]:
        """Return the logits that follow `tokens`, which stand at `positions` of their rows."""


class ModelDecoder:
    """Decodes with a transformers model's own modules, but our attention, set through its AttentionInterface."""

    def __init__(self, model: CausalLM) -> None:
        self.model = model

    def step(self, slots: KVCache, tokens: Int[Tensor, " N"], positions: Int[Tensor, " N"]) -> Float[Tensor, "N V"]:
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
    config._attn_implementation = ATTENTION_NAME
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
    slots: KVCache | None = None,
    **kwargs: Any,
) -> tuple[Float[Tensor, "N 1 H Dv"], None]:
    if slots is None:
        raise UnsupportedModel("it does not pass keyword arguments on to its attention")
    for name in UNKNOWN:
        if kwargs.get(name) is not None:
            raise UnsupportedModel(f"its attention has {name}")
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


AttentionInterface.register(ATTENTION_NAME, _attention)


class GraphDecoder:
    """A Decoder that replays another's step as a CUDA graph, recorded anew whenever rows have come or gone.

    The Slots must be static. A step may be repeated with the same tokens, since it writes the same column: the warm-up
    before recording relies on it.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self._recorded_layout: int | None = None

    def step(self, slots: KVCache, tokens: Int[Tensor, " N"], positions: Int[Tensor, " N"]) -> Float[Tensor, "N V"]:
        """Decode one token of every row; see Decoder. The next step overwrites the logits."""
        if self._recorded_layout != slots.layout_version:
            self._record(slots, tokens, positions)
            self._recorded_layout = slots.layout_version
        self._tokens.copy_(tokens)
        self._positions.copy_(positions)
        self._graph.replay()
        return self._logits

    def _record(self, slots: KVCache, tokens: Tensor, positions: Tensor) -> None:
        assert slots.static, "what is recorded must not depend on Python's numbers"
        self._tokens, self._positions = tokens.clone(), positions.clone()
        side_stream = torch.cuda.Stream()
        side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side_stream):
            self.decoder.step(slots, self._tokens, self._positions)
        torch.cuda.current_stream().wait_stream(side_stream)
        self._graph = torch.cuda.CUDAGraph()
        # thread_local: other threads (the update beside a rollout, a reward model) may allocate meanwhile.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._logits = self.decoder.step(slots, self._tokens, self._positions)


TOKENS = 16  # tokens of a prompt that are used
STEPS = 2
LIMIT = {"float64": 1e-4, "float32": 1e-3, "bfloat16": 0.1}  # of the largest logit; float64 models norm in float32


def verify_decoder(
    model: CausalLM,
    decoder: Decoder,
    prompts: Prompts,
    *,
    length: int,
    dtype: str,
    device: torch.device,
    cache: Callable[[int, int, int, int], Any] | None = None,
) -> None:
    """Check that decoding a few tokens after two prompts gives the logits of one forward pass without a cache.

    `length` is that of the longest completion: no sequence here is longer than the longest that will be sampled.
    `cache` makes a cache of a number of rows, prompts, prompt and completion tokens; None: a KVCache.

    Raises:
        Unsupported: the logits differ by more than rounding, or the decoder cannot be used.
    """
    rows = torch.tensor([0, len(prompts) - 1])
    mask = prompts.prompt_mask[rows]
    longest = int(mask.sum(dim=1).max())
    width = max(1, min(TOKENS, longest, longest + length - STEPS))
    ids, mask = prompts.prompt_ids[rows][:, -width:].to(device), mask[:, -width:].to(device)
    logits, layers = prefill(model, ids, mask)
    size = 3, 2, width, STEPS + 1
    slots = KVCache(*size, device=device, windows=True) if cache is None else cache(*size)
    lanes = torch.tensor([1, 0, 1])
    slots.add_prompts(layers, mask)
    slots.add_rows(lanes)
    lane = lanes.to(device)
    positions, decoded = mask.sum(dim=1)[lane], []
    sequences, sequence_mask = ids[lane], mask[lane]
    token = logits.argmax(dim=-1)[lane]
    for _ in range(STEPS):
        slots.advance()
        decoded.append(decoder.step(slots, token, positions))
        sequences, sequence_mask = (
            torch.cat([sequences, token[:, None]], 1),
            torch.cat([sequence_mask, torch.ones_like(sequence_mask[:, :1])], 1),
        )
        token, positions = decoded[-1].argmax(dim=-1), positions + 1
    difference = _relative_difference(torch.stack(decoded, dim=1), _full_forward(model, sequences, sequence_mask))
    if not difference <= LIMIT[dtype]:
        raise UnsupportedModel(f"its logits come out differently with our cache (by {difference:.1g} of the largest)")


def _full_forward(model: CausalLM, ids: Tensor, mask: Tensor) -> Tensor:
    positions = (mask.long().cumsum(dim=1) - 1).clamp(min=0)
    output = model(input_ids=ids, attention_mask=mask.long(), position_ids=positions, use_cache=False)
    logits: Tensor = output.logits[:, -STEPS:]
    return logits


def _relative_difference(actual: Tensor, expected: Tensor) -> float:
    actual, expected = widen(actual), widen(expected)
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
