"""One decode step over the KV cache and the draw of its token: by a written-out Llama, or by the model's own modules.

The written-out step does without the modules of Llama and similar models: fused products, precomputed RoPE, little
Python. Its weights are copies of the model's, joined and packed once (by oneDNN if the CPU has it) for products with
few rows, and made again for every rollout. `verify_decoder` tries either before it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, Cache, PretrainedConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from rlhf.algo.support import SamplingLimits, pack, renormalized
from rlhf.batching import widen
from rlhf.models.adapters import base_model, is_adapted, is_lora_linear
from rlhf.models.backbone import CausalLM
from rlhf.models.kernels.cast import HALF_DTYPES
from rlhf.models.kernels.llama.elementwise import rotate
from rlhf.models.kernels.llama.families import Layer, Norm, Projection, norm_of, read_layers
from rlhf.models.kernels.quantized import is_linear
from rlhf.models.text_config import attention_window, text_config
from rlhf.runtime.device import cpu_has_bfloat16_products
from rlhf.sampling.fast.kv_cache import KVCache, StepCache, UnsupportedModel, prefill
from rlhf.sampling.generate import rotation_switch
from rlhf.types import Prompts

T = TypeVar("T")


@runtime_checkable
class Decoder(Protocol):
    """Decodes one token further for all rows at once."""

    def step(self, slots: KVCache, tokens: Int[Tensor, " N"], positions: Int[Tensor, " N"]) -> Float[Tensor, "N V"]:
        """Return the logits that follow `tokens`, which stand at `positions` of their rows."""


class PackedLinear:
    """Computes x W^T + b, where W stacks the rows of several weights; it holds copies of them."""

    def __init__(
        self, weights: Sequence[Tensor], biases: Sequence[Tensor | None], *, rows: int, low: torch.dtype | None = None
    ) -> None:
        """Pack the weights for an x of `rows` rows; `low` is the dtype of the product if it is not the weights'."""
        weight = torch.cat(list(weights)) if len(weights) > 1 else weights[0]
        self.bias: Tensor | None = None
        if any(bias is not None for bias in biases):
            pairs = zip(weights, biases, strict=True)
            self.bias = torch.cat([w.new_zeros(len(w)) if b is None else b for w, b in pairs])
        if low is not None:
            weight, self.bias = weight.to(low), None if self.bias is None else self.bias.to(low)
        self.dtype = weight.dtype
        self.packed = can_pack(weight)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), rows) if self.packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        """Compute x W^T + b."""
        if not self.packed:
            return functional.linear(x.to(self.dtype), self.weight, self.bias)
        output: Tensor = torch.ops.mkldnn._linear_pointwise(x.to(self.dtype), self.weight, self.bias, "none", [], "")
        return output

    def silu(self, x: Tensor) -> Tensor:
        """Compute silu(x W^T + b)."""
        if not self.packed:
            return functional.silu(self(x))
        output: Tensor = torch.ops.mkldnn._linear_pointwise(x.to(self.dtype), self.weight, self.bias, "swish", [], "")
        return output

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        """Compute (x W^T + b) * other."""
        return self._fused_binary(x, other, "mul") if self._can_fuse(other) else self(x) * other

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """Compute x W^T + b + other."""
        return self._fused_binary(x, other, "add") if self._can_fuse(other) else self(x) + other

    def _can_fuse(self, other: Tensor) -> bool:
        return self.packed and other.dtype == self.dtype

    def _fused_binary(self, x: Tensor, other: Tensor, operation: str) -> Tensor:
        fused = torch.ops.mkldnn._linear_pointwise.binary
        output: Tensor = fused(x.to(self.dtype), other, self.weight, self.bias, operation)
        return output


def can_pack(weight: Tensor) -> bool:
    """Check whether oneDNN can pack this weight, by the operators that torch.compile uses for frozen weights."""
    return (
        weight.device.type == "cpu"
        and (weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and cpu_has_bfloat16_products()))
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


EMBEDDINGS = (nn.Embedding, Gemma3TextScaledWordEmbedding)
ROTATIONS = ("default", "linear", "llama3", "yarn")  # RoPE types whose angles depend on the position alone
LONG = "longrope"  # a type that does so only up to `original_max_position_embeddings` tokens

_WeightAndBias = tuple[Tensor, Tensor | None]  # the adapter is added to the weight


@dataclass(frozen=True)
class _Layer:
    pre_attention_norm: RmsNorm
    qkv: PackedLinear
    query_norm: RmsNorm | None
    key_norm: RmsNorm | None
    scaling: float
    window: int | None
    rope_kind: str | None
    out: PackedLinear
    post_attention_norm: RmsNorm | None  # before the residual is added
    pre_mlp_norm: RmsNorm
    gate: PackedLinear
    up: PackedLinear | None  # None: joined with the gate
    act: Callable[[Tensor], Tensor] | None  # None: silu
    down: PackedLinear
    post_mlp_norm: RmsNorm | None  # before the residual is added


class RmsNorm:
    """An RMS norm, w x / sqrt(mean(x²) + eps), in at least float32, as the model's; the identity if there is none.

    Without a weight it is x / sqrt(mean(x²) + eps). With a `width`, heads of that width are normalized one by one, or
    all together if the weight spans all of them. On a CPU it takes two operations fewer than `normalize` of
    rlhf.models.kernels.llama.elementwise, which costs time at every token; the last bit of the results may differ.
    """

    def __init__(self, norm: Norm | None, *, weighted: bool = False, width: int = 0) -> None:
        self.size = 0 if norm is None else len(norm.weight)
        self.eps = 0.0 if norm is None else norm.eps
        self.weight = norm.weight.detach() if norm is not None and weighted else None
        self.joins_heads = bool(width) and self.size > width
        self._eps_tensor = None if norm is None else torch.full_like(norm.weight.detach()[:1], norm.eps)

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the norm to the last axis, or to all heads together."""
        if self.joins_heads:
            return self._apply(x.flatten(1)).view(x.shape)
        return self._apply(x)

    def _apply(self, x: Tensor) -> Tensor:
        if self._eps_tensor is None:
            return x
        if x.is_cuda:  # one kernel
            normalized = functional.rms_norm(x.to(self._eps_tensor.dtype), (self.size,), self.weight, self.eps)
            return normalized
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        normalized = x * torch.addcmul(self._eps_tensor, length, length, value=1.0 / self.size).rsqrt_()
        return normalized if self.weight is None else normalized * self.weight


class FusedDecoder:
    """Decodes for the model families of rlhf.models.kernels.llama.families."""

    def __init__(self, model: CausalLM, *, rows: int, positions: int, low: torch.dtype | None) -> None:
        """Copy the model's current weights.

        Args:
            model: a model for which `supports_fused_decoding` is true.
            rows: how many rows are decoded together; the weights may be packed for that number.
            positions: tokens of the longest sequence.
            low: the dtype of matrix products if it is not the weights' (autocast).
        """
        self.rows, self.positions, self.low = rows, positions, low
        plain = _plain(model)
        inner, config = plain.model, plain.config
        self.embed = inner.embed_tokens  # the module itself: Gemma's scales the embeddings
        self.heads = config.num_attention_heads
        self.groups = config.num_key_value_heads
        layers = _described_layers(inner)
        self.dtype = low or inner.norm.weight.dtype  # of the products, and of the cache on a GPU
        self.tables = {
            angles: _rope_table(inner, angles, positions) for angles in {layer.rope_kind for layer in layers}
        }
        self.layers = [self._convert(layer) for layer in layers]
        self.norm, self.head = self._convert_head(plain)
        self._embedding_address = self.embed.weight.data_ptr()

    def refresh(self, model: CausalLM) -> bool:
        """Copy the model's current weights over the former ones, so that recorded steps read them.

        Returns False, and does nothing, if the embeddings, which are not copied, are at another address.
        """
        plain = _plain(model)
        self.embed = plain.model.embed_tokens
        if self.embed.weight.data_ptr() != self._embedding_address:
            return False
        for mine, layer in zip(self.layers, _described_layers(plain.model), strict=True):
            _copy_weights(self._convert(layer), mine)  # one layer at a time: their copies need memory
        norm, head = self._convert_head(plain)
        _copy_weights(norm, self.norm)
        _copy_weights(head, self.head)
        return True

    def _product(
        self, parts: Sequence[_WeightAndBias], *, norm: Norm | None = None, scale: float = 1.0
    ) -> PackedLinear:
        """Join products of one input; the weight of `norm` is folded into the columns, `scale` into the first."""
        columns = None if norm is None else _wide(norm.weight.detach())
        weights = [_wide(weight) if columns is None else weight * columns for weight, _ in parts]
        biases = [bias for _, bias in parts]
        if scale != 1.0:
            weights[0], biases[0] = weights[0] * scale, None if biases[0] is None else biases[0] * scale
        return PackedLinear(weights, biases, rows=self.rows, low=self.low)

    def _convert(self, layer: Layer) -> _Layer:
        query_norm, key_norm = (_norm(head_norm, layer.head_dim) for head_norm in layer.head_norms or (None, None))
        gate, up = _weights_and_biases(layer.gate_up, self.low)
        norms = layer.norms
        joined = gate[0].is_cuda  # a CPU computes the activation within the product of the gate
        return _Layer(
            pre_attention_norm=_normalizer(norms.before_attention),
            qkv=self._product(
                _weights_and_biases(layer.inputs, self.low),
                norm=norms.before_attention,
                scale=1.0 if layer.head_norms else layer.scaling,
            ),
            query_norm=query_norm,
            key_norm=key_norm,
            scaling=layer.scaling if layer.head_norms else 1.0,
            window=layer.window,
            rope_kind=layer.rope_kind,
            out=self._product(_weights_and_biases([layer.output], self.low)),
            post_attention_norm=_norm(norms.after_attention),
            pre_mlp_norm=_normalizer(norms.before_mlp),
            gate=self._product([gate, up] if joined else [gate], norm=norms.before_mlp),
            up=None if joined else self._product([up], norm=norms.before_mlp),
            act=None if layer.activation_name == "silu" else layer.activation,
            down=self._product(_weights_and_biases([layer.down], self.low)),
            post_mlp_norm=_norm(norms.after_mlp),
        )

    def _convert_head(self, plain: Any) -> tuple[RmsNorm, PackedLinear]:
        norm = norm_of(plain.model.norm)  # the head's own product is in float32 unless policy.head_dtype says otherwise
        return _normalizer(norm), self._product(_weights_and_biases([Projection(plain.lm_head)]), norm=norm)

    def step(self, slots: StepCache, tokens: Int[Tensor, " N"], positions: Int[Tensor, " N"]) -> Float[Tensor, "N V"]:
        """Decode one token of every row; see Decoder. Autocast, off inside, would cast the cache at every step."""
        with torch.autocast(tokens.device.type, enabled=False):
            return self._step(slots, tokens, positions)

    def _step(self, slots: StepCache, tokens: Int[Tensor, " N"], positions: Int[Tensor, " N"]) -> Float[Tensor, "N V"]:
        slots.begin_step(positions)
        hidden = self.embed(tokens)
        rotations = {
            angles: (cos[positions][:, None], sin[positions][:, None]) for angles, (cos, sin) in self.tables.items()
        }
        for number, layer in enumerate(self.layers):
            attended = self._attention(
                number, layer, layer.pre_attention_norm(hidden), *rotations[layer.rope_kind], slots
            )
            hidden = _add_residual(layer.out, attended, hidden, layer.post_attention_norm)
            inner = layer.pre_mlp_norm(hidden)
            hidden = _add_residual(layer.down, _gated(layer, inner), hidden, layer.post_mlp_norm)
        return self.head(self.norm(hidden))

    def _attention(
        self, number: int, layer: _Layer, hidden: Float[Tensor, "N D"], cos: Tensor, sin: Tensor, slots: StepCache
    ) -> Float[Tensor, "N E"]:
        rows, rotated_heads = len(hidden), self.heads + self.groups
        query_key_value = layer.qkv(hidden).view(rows, rotated_heads + self.groups, -1)
        query_key = query_key_value[:, :rotated_heads]
        if layer.query_norm is not None and layer.key_norm is not None:
            query_key = torch.cat(
                [layer.query_norm(query_key[:, : self.heads]), layer.key_norm(query_key[:, self.heads :])], dim=1
            )
        query_key = rotate(query_key, cos, sin, dtype=self.dtype if query_key.is_cuda else None)
        attended = slots.attend(
            number,
            query_key[:, : self.heads],
            query_key[:, self.heads :],
            query_key_value[:, rotated_heads:],
            scaling=layer.scaling,
            window=layer.window,
        )
        return attended.view(rows, -1)


def supports_fused_decoding(model: CausalLM) -> bool:
    """Check whether this decoder knows the model's layers; sequences must also pass `supports_length`."""
    plain = base_model(model)
    body = getattr(plain, "model", None)
    layers = read_layers(body)
    if body is None or layers is None or not _rope_types(plain.config) <= {*ROTATIONS, LONG}:
        return False
    if is_adapted(model) and not _has_one_lora_adapter(model):
        return False
    if type(body.embed_tokens) not in EMBEDDINGS:
        return False
    return all(_is_linear(module) for module in (plain.lm_head, *_projection_modules(layers)))


def _projection_modules(layers: Sequence[Layer]) -> list[Any]:
    return [
        projection.module
        for layer in layers
        for projection in (*layer.inputs, layer.output, *layer.gate_up, layer.down)
    ]


def _has_one_lora_adapter(model: Any) -> bool:
    return len(model.active_adapters) == 1 and bool(model.peft_type == "LORA")


def supports_length(model: CausalLM, positions: int) -> bool:
    """Check whether rotations depend on the position alone up to this length; longrope's change beyond it."""
    switch = rotation_switch(model)
    return switch is None or positions <= switch


def _rope_types(config: Any) -> set[str]:
    """Return the RoPE types of a configuration, which has one set of RoPE parameters or several by name."""
    parameters = config.rope_parameters
    kinds = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
    return {str(kind.get("rope_type", "default")) for kind in kinds}


def _rope_table(body: Any, angles: str | None, positions: int) -> tuple[Tensor, Tensor]:
    weight = _wide(body.embed_tokens.weight.detach()[:1])
    position_ids = torch.arange(positions, device=weight.device)
    cos, sin = body.rotary_emb(weight[:1, None], position_ids[None], *([] if angles is None else [angles]))
    half = cos.shape[-1] // 2
    return cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()


def _is_linear(module: Any) -> bool:
    if is_linear(module):
        return True
    if not is_lora_linear(module) or not is_linear(module.base_layer):
        return False
    return not any(module.use_dora.values()) and not module.disable_adapters and not any(module.lora_bias.values())


def _weight(module: Any, low: torch.dtype | None) -> Tensor:
    """Return the module's weight, in float32 with the active adapters added if it has some.

    The weight itself is rounded to `low`, as the model's own products see it under autocast. Rounded only after a norm
    is folded in, it would have small updates that the model's products lose, and the sampler drift from the policy.
    """
    linear = module if is_linear(module) else module.base_layer
    weight: Tensor = linear.weight.detach()  # not widened here: an LM head is large
    weight = weight if low is None else weight.to(low)
    if linear is module:
        return weight
    weight = _wide(weight)
    for name in () if module.merged else module.active_adapters:
        if name in module.lora_A:
            weight = weight + module.get_delta_weight(name).detach()
    return weight


def _wide(weight: Tensor) -> Tensor:
    return weight.float() if weight.dtype in HALF_DTYPES else weight


def _weights_and_biases(projections: Sequence[Projection], low: torch.dtype | None = None) -> list[_WeightAndBias]:
    """Return the weight and bias of every part; the parts of a weight that joins several are views of its rows."""
    parts: list[_WeightAndBias] = []
    for projection in projections:
        weights, bias = projection.split(_weight(projection.module, low)), projection.linear.bias
        biases = [None] * len(weights) if bias is None else projection.split(bias.detach())
        parts += zip(weights, biases, strict=True)
    return parts


def _gated(layer: _Layer, inner: Tensor) -> Tensor:
    """Compute act(gate) * up, the input of the product that goes back to the residual stream."""
    if layer.up is None:
        gate, up = layer.gate(inner).chunk(2, dim=-1)
        return (functional.silu(gate) if layer.act is None else layer.act(gate)) * up
    gate = layer.gate.silu(inner) if layer.act is None else layer.act(layer.gate(inner))
    return layer.up.times(inner, gate)


def _copy_weights(source: Any, target: Any) -> None:
    """Copy every tensor of a converted layer, norm or product to its place in another."""
    for name, value in vars(source).items():
        mine = getattr(target, name)
        if isinstance(value, Tensor):
            if mine.data_ptr() != value.data_ptr():
                mine.copy_(value)
        elif isinstance(value, PackedLinear | RmsNorm):
            _copy_weights(value, mine)


def _plain(model: CausalLM) -> Any:
    return base_model(model)


def _described_layers(body: Any) -> list[Layer]:
    layers = read_layers(body)
    assert layers is not None, "check supports_fused_decoding() first"
    return layers


def _add_residual(product: PackedLinear, x: Tensor, hidden: Tensor, norm: RmsNorm | None) -> Tensor:
    """Add the product of x, normalized if `norm` is given, to the hidden states."""
    return product.plus(x, hidden) if norm is None else hidden + norm(product(x).to(hidden.dtype))


def _norm(norm: Norm | None, width: int = 0) -> RmsNorm | None:
    """Make the RMS norm with its weight; None if there is no norm."""
    return None if norm is None else RmsNorm(norm, weighted=True, width=width)


def _normalizer(norm: Norm | None) -> RmsNorm:
    """Make the RMS norm without its weight, which is folded into the product after it."""
    return RmsNorm(norm)


ATTENTION_NAME = "rlhf_slots"  # the name under which our attention is registered with transformers


class ModelDecoder:
    """Decodes with a transformers model's own modules, but our attention, set through its AttentionInterface."""

    def __init__(self, model: CausalLM) -> None:
        self.model = model

    def step(self, slots: KVCache, tokens: Int[Tensor, " N"], positions: Int[Tensor, " N"]) -> Float[Tensor, "N V"]:
        """Decode one token of every row; see Decoder."""
        slots.begin_step(positions)
        with _use_our_attention(text_config(self.model)):
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


class GraphRecorder:
    """Records steps as CUDA graphs, all of them on one stream: cuBLAS keeps a workspace for each, 32 MiB on an H100.

    torch's own stream for this purpose is shared by samplers in other threads, which may record at the same time.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    def record(self, step: Callable[[], T], pool: Any = None) -> tuple[torch.cuda.CUDAGraph, T]:
        """Take the step once, which warms up all that may not start in a capture; record it and return its outputs too.

        `pool` is the memory that graphs share which are never replayed at the same time.
        """
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            step()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads (the update beside a rollout, a reward model) may allocate meanwhile.
        with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
            outputs = step()
        return graph, outputs


class GraphDecoder:
    """A Decoder that replays another's step as a CUDA graph, recorded again whenever rows have come or gone.

    The `RowSlots` must be static. A step may be repeated with the same tokens, since it writes the same column: the
    warm-up before recording relies on it.
    """

    def __init__(self, decoder: Decoder, recorder: GraphRecorder) -> None:
        self.decoder, self._recorder = decoder, recorder
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
        assert slots.static, "a recorded step must not depend on Python's numbers"
        self._tokens, self._positions = tokens.clone(), positions.clone()
        self._graph, self._logits = self._recorder.record(
            lambda: self.decoder.step(slots, self._tokens, self._positions)
        )


TOKENS = 16  # tokens of a prompt that are used
STEPS = 2
MOST_PROBED = 2048  # tokens: a window beyond is not filled for a trial, which would take long
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

    `length` is the longest completion's length: no sequence here is longer than the longest that will be sampled. If
    sequences may outgrow the window of the model's attention, the first prompt is repeated until it fills the window.
    `cache` makes a cache of a number of rows, prompts, prompt and completion tokens; None: a KVCache.

    Raises:
        UnsupportedModel: the logits differ by more than rounding, or the decoder cannot be used.
    """
    rows = torch.tensor([0, len(prompts) - 1])
    mask = prompts.prompt_mask[rows]
    longest = int(mask.sum(dim=1).max())
    width = max(1, min(TOKENS, longest, longest + length - STEPS))
    ids, mask = prompts.prompt_ids[rows][:, -width:].to(device), mask[:, -width:].to(device)
    window = attention_window(model)
    if window is not None and width + STEPS <= window <= MOST_PROBED and longest + length > window:
        ids, mask = _fill_window(ids, mask, window)
        width = window
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


def _fill_window(
    ids: Int[Tensor, "2 L"], mask: Bool[Tensor, "2 L"], window: int
) -> tuple[Int[Tensor, "2 W"], Bool[Tensor, "2 W"]]:
    """Pad two prompts on the left to the window, and repeat the tokens of the first one until it is full."""
    empty = window - ids.shape[1]
    ids = torch.nn.functional.pad(ids, (empty, 0))
    mask = torch.nn.functional.pad(mask, (empty, 0))
    own = ids[0][mask[0]]
    ids[0] = own.repeat(-(-window // len(own)))[-window:]
    mask[0] = True
    return ids, mask


def _full_forward(model: CausalLM, ids: Tensor, mask: Tensor) -> Tensor:
    positions = (mask.long().cumsum(dim=1) - 1).clamp(min=0)
    output = model(input_ids=ids, attention_mask=mask.long(), position_ids=positions, use_cache=False)
    logits: Tensor = output.logits[:, -STEPS:]
    return logits


def _relative_difference(actual: Tensor, expected: Tensor) -> float:
    actual, expected = widen(actual), widen(expected)
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-6))


BLOCK = 64  # probabilities that sample_token sums as one block


def sample_token(
    scores: Float[Tensor, "B V"], uniform: Float[Tensor, " B"] | None, temperature: float
) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"]]:
    """Pick a token for each row and return it with its log-probability (nats) at the temperature.

    Args:
        scores: the model's logits.
        uniform: numbers in [0, 1), float64, on the CPU if the device of the scores has no float64: the token is then
            drawn there. None takes the most likely token instead.
        temperature: divides the logits.
    """
    wide = scores if scores.dtype == torch.float64 else scores.float()
    probabilities = (wide if temperature == 1.0 else wide / temperature).softmax(dim=-1)
    if uniform is None:
        token = wide.argmax(dim=-1)
    else:
        token = inverse_cdf(probabilities.to(uniform.device), uniform).to(scores.device)
    return token, probabilities.gather(1, token[:, None]).squeeze(1).log()


def sample_within(
    scores: Float[Tensor, "B V"], uniform: Float[Tensor, " B"] | None, temperature: float, limits: SamplingLimits
) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"], UInt8[Tensor, "B W"]]:
    """Pick a token for each row among those that the limits leave, like `sample_token` among all.

    Returns:
        The tokens, their log-probabilities among those left (nats), and which were left (`algo.support.pack`).
    """
    wide = scores if scores.dtype == torch.float64 else scores.float()
    whole = (wide if temperature == 1.0 else wide / temperature).softmax(dim=-1)
    support = limits.support(whole)
    probabilities = renormalized(whole, support)
    token = best = whole.argmax(dim=-1)
    if uniform is not None:
        token = inverse_cdf(probabilities.to(uniform.device), uniform).to(scores.device)
        is_left = support.gather(1, token[:, None]).squeeze(1)
        token = torch.where(is_left, token, best)  # a sum rounded up may end behind the last token that has a share
    return token, probabilities.gather(1, token[:, None]).squeeze(1).log(), pack(support)


def inverse_cdf(probabilities: Float[Tensor, "B V"], uniform: Float[Tensor, " B"]) -> Int[Tensor, " B"]:
    """Return the token at which the cumulative probability first exceeds `uniform`, like `draw`.

    The float64 sums are taken over blocks first, and then inside the block that contains the threshold, so that the
    whole vocabulary need not be converted and accumulated.
    """
    rows, vocabulary = probabilities.shape
    padding = -vocabulary % BLOCK
    padded = torch.nn.functional.pad(probabilities, (0, padding)) if padding else probabilities
    blocks = padded.view(rows, -1, BLOCK)
    cumulative = blocks.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    threshold = uniform * cumulative[:, -1]
    block = torch.searchsorted(cumulative, threshold[:, None], right=True).clamp_(max=blocks.shape[1] - 1)
    before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp(min=0)), 0.0)
    cumulative_inside = blocks.gather(1, block[:, :, None].expand(rows, 1, BLOCK)).squeeze(1).double().cumsum(dim=-1)
    offset = torch.searchsorted(cumulative_inside, threshold[:, None] - before, right=True).clamp_(max=BLOCK - 1)
    return (block * BLOCK + offset).squeeze(1).clamp_(max=vocabulary - 1)
