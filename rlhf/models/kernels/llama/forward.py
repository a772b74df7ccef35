"""The forward pass of Llama-like models over rows without padding, written out: the modules' results in fewer steps.

A layer is two halves around its attention, each with a backward pass of its own. Modules take a dozen steps, each of
which keeps its inputs; here few passes over memory do the same, and values that the backward pass recomputes cheaply
(norms, silu) are not kept. Matrix products are computed in the dtype `low`, which is autocast's or else the weights'
own; norms, rotations and the residual stream are in the weights' dtype. The steps between the products are
in elementwise.py.

The list of these families, with the places of their weights, is in families.py. Results that nobody reads are left out
too: the last layer's feed-forward half is computed for the chosen tokens only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from rlhf.models.adapters import is_lora_linear
from rlhf.models.kernels.attention import PackedBatch, RectangleIndex, attend
from rlhf.models.kernels.cast import cast_weight, pad_rows_for_onednn
from rlhf.models.kernels.llama import elementwise
from rlhf.models.kernels.llama.elementwise import ACTIVATIONS, Weight
from rlhf.models.kernels.llama.families import READERS, Layer, Norm, Norms, Projection, Reader, norm_of, read_layers
from rlhf.models.kernels.packing import build_probe, full_precision, packed_inputs
from rlhf.models.kernels.quantized import QuantizedLinear, compute_dtype, is_linear
from rlhf.runtime.device import is_device_error


def predictor_states(body: nn.Module, rows: PackedBatch, chosen: Int[Tensor, " M"]) -> Float[Tensor, "M D"]:
    """Compute the last hidden states at `chosen` for rows without padding, by the written-out pass if it applies."""
    if supports_fused(body):
        return _states(body, rows, chosen)
    states: Tensor = body(**packed_inputs(rows)).last_hidden_state
    return states[0].index_select(0, chosen)


_MATCHES: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()  # tried once for each model


def supports_fused(body: nn.Module) -> bool:
    """Check whether the written-out pass computes what `body` computes, by trying it on a few rows.

    It does not apply if the modules must be called as they are: adapters of another kind than plain LoRA, weights
    that DeepSpeed gathers only then (ZeRO-3), or whose gradients it reduces as they arrive (ZeRO-2), which must be in
    the same order in all processes, while here several arrive at once.
    """
    if not _is_plain(body):
        return False
    if body not in _MATCHES:
        _MATCHES[body] = _matches_modules(body)
    return _MATCHES[body]


def fused_unsupported_reason(body: nn.Module) -> str:
    """Explain why the written-out pass is off for a family that it knows; empty if it is on, or of no use here."""
    if supports_fused(body) or not _is_plain(body):
        return ""
    return f"layers of {type(body).__name__} are not written out: on a few rows they gave other numbers"


def _is_plain(body: Any) -> bool:
    layers = read_layers(body)
    if layers is None or not _has_plain_weights(body):
        return False
    if getattr(body.config, "resid_pdrop", 0.0):  # dropout on the residual branches: Phi-3
        return False
    return all(layer.activation_name in ACTIVATIONS and _has_plain_projections(layer) for layer in layers)


def _has_plain_weights(body: Any) -> bool:
    """Check that the norms are in full precision, on this process, and that nothing waits for gradients."""
    weight = body.norm.weight
    if weight.dtype not in (torch.float32, torch.float64) or hasattr(weight, "ds_id"):
        return False
    return not any(_has_gradient_hooks(parameter) for parameter in body.parameters())


def _has_plain_projections(layer: Layer) -> bool:
    """Check that all projections of a layer are plain, and that only the inputs of attention have a bias."""
    return all(
        _is_plain_linear(projection.module)
        and (projection.linear.bias is None or may_have_bias)
        and not (projection.sizes and isinstance(projection.linear, QuantizedLinear))
        for projections, may_have_bias in ((layer.inputs, True), ([layer.output, *layer.gate_up, layer.down], False))
        for projection in projections
    )


def _is_plain_linear(module: Any) -> bool:
    """Check whether `module` is a linear layer, alone or with a single plain LoRA adapter."""
    if is_linear(module):
        return True
    if not is_lora_linear(module) or not is_linear(module.base_layer):
        return False
    return len(module.active_adapters) == 1 and _is_plain_adapter(module, module.active_adapters[0])


def _is_plain_adapter(module: Any, name: str) -> bool:
    """Check whether the LoRA adapter `name` of `module` is a product of two matrices, without dropout, not merged."""
    if name not in module.lora_A or module.merged or module.lora_variant:
        return False
    dropout, pair = module.lora_dropout[name], (module.lora_A[name], module.lora_B[name])
    plain = all(type(linear) is nn.Linear and linear.bias is None for linear in pair)
    return plain and type(dropout) is nn.Identity


def _weights(projections: Sequence[Projection]) -> list[Matrix]:
    return [part for projection in projections for part in _matrices(projection)]


def _matrices(projection: Projection) -> Sequence[Matrix]:
    """Return the weight of each part; a quantized layer stands for its own, so that no pass keeps the numbers."""
    linear = projection.linear
    return [linear] if isinstance(linear, QuantizedLinear) else projection.split(linear.weight)


def _biases(projections: Sequence[Projection]) -> list[Tensor | None]:
    return [part for projection in projections for part in _split(projection, projection.linear.bias)]


def _split(projection: Projection, rows: Tensor | None) -> Sequence[Tensor | None]:
    return [None] * projection.parts if rows is None else projection.split(rows)


def _adapters(projections: Sequence[Projection]) -> list[MaybeLowRank]:
    return [adapter for projection in projections for adapter in _adapters_of(projection)]


def _adapters_of(projection: Projection) -> Sequence[MaybeLowRank]:
    """Return the adapter of each part; parts of one weight share A. None if there is none, or it is disabled."""
    module = projection.module
    if is_linear(module) or module.disable_adapters:
        return [None] * projection.parts
    name = module.active_adapters[0]
    down, ups = module.lora_A[name].weight, projection.split(module.lora_B[name].weight)
    return [LowRank(down, up, float(module.scaling[name])) for up in ups]


def _has_gradient_hooks(weight: Any) -> bool:
    return bool(weight._post_accumulate_grad_hooks)


@torch.no_grad()
def _matches_modules(body: nn.Module) -> bool:
    with full_precision(body), live_adapters(body):
        try:
            probe = build_probe(body)
            return all(probe.matches(_states(body, rows, rows.predictor_index)) for rows in probe.layouts)
        except (RuntimeError, TypeError, AttributeError, ValueError, IndexError) as error:
            if is_device_error(error):
                raise
            return False


@contextmanager
def live_adapters(body: nn.Module) -> Iterator[None]:
    """Give adapters weights that matter within this context; a new one adds nothing and would hide a mistake."""
    adapted: list[Any] = [module for module in body.modules() if is_lora_linear(module)]
    weights: list[nn.Parameter] = [linear.weight for module in adapted for linear in module.lora_B.values()]
    before = [weight.data for weight in weights]
    for weight in weights:
        numbers = torch.arange(1, weight.numel() + 1, device=weight.device)
        weight.data = (0.02 * torch.sin(numbers)).view_as(weight).to(weight.dtype)
    try:
        yield
    finally:
        for weight, data in zip(weights, before, strict=True):
            weight.data = data


def _states(body: Any, rows: PackedBatch, chosen: Int[Tensor, " M"]) -> Float[Tensor, "M D"]:
    x = body.embed_tokens(rows.input_ids)[0]
    read = READERS[type(body)]
    layers = body.layers[: body.config.num_hidden_layers]
    turns = {angles: rotary(body, x, rows, angles) for angles in {read(layer).rope_kind for layer in layers}}
    for number, layer in enumerate(layers, start=1):
        forward = partial(
            layer_forward,
            layer,
            read=read,
            turns=turns,
            rows=rows,
            chosen=chosen if number == len(layers) else None,
        )
        if layer.gradient_checkpointing and layer.training:
            x = checkpoint(forward, x, use_reentrant=False, preserve_rng_state=False)
        else:
            x = forward(x)
    return rms_norm(x, norm_of(body.norm))


def rotary(body: Any, x: Float[Tensor, "N D"], rows: PackedBatch, angles: str | None) -> RotaryTable:
    """Compute the body's rotary embedding, of kind `angles` if it has several, at the positions of the rows."""
    tables = body.rotary_emb(x[None], rows.position_ids, *([] if angles is None else [angles]))
    cos, sin = (table[0, :, None, : table.shape[-1] // 2] for table in tables)
    return RotaryTable(cos, sin, rows.places)


def layer_forward(
    layer: Any,
    x: Float[Tensor, "N D"],
    *,
    read: Reader,
    turns: Mapping[str | None, RotaryTable],
    rows: PackedBatch,
    chosen: Int[Tensor, " M"] | None,
) -> Float[Tensor, "M D"]:
    """Compute a layer for the `chosen` tokens or, if that is None, all."""
    spec = read(layer)
    turn = turns[spec.rope_kind]
    low = compute_dtype(x)
    skip, states = before_attention(
        x,
        spec.norms.before_attention,
        _weights(spec.inputs),
        _biases(spec.inputs),
        _adapters(spec.inputs),
        spec.head_norms,
        spec.head_dim,
        turn,
        low,
    )
    others = [spec.output, *spec.gate_up, spec.down]
    return after_attention(
        skip,
        attend(rows, states, scale=spec.scaling),
        turn.places,
        chosen,
        spec.norms,
        _weights(others),
        _adapters(others),
        spec.activation_name,
        low,
    )


class LowRank(NamedTuple):
    """A LoRA adapter of a weight W: W + scale B A (Hu et al. 2022)."""

    down: Float[Tensor, "r D"]  # A
    up: Float[Tensor, "E r"]  # B
    scale: float


MaybeLowRank = LowRank | None
Matrix = Tensor | QuantizedLinear


def _save(ctx: Any, *values: Tensor | QuantizedLinear | None) -> None:
    """Keep values for the backward pass: tensors by autograd, quantized weights as they are."""
    ctx.quantized = {n: value for n, value in enumerate(values) if isinstance(value, QuantizedLinear)}
    ctx.save_for_backward(*(None if n in ctx.quantized else value for n, value in enumerate(values)))


def _saved(ctx: Any) -> list[Any]:
    """Return what `_save` kept."""
    return [ctx.quantized.get(n, value) for n, value in enumerate(ctx.saved_tensors)]


@dataclass(frozen=True)
class RotaryTable:
    """The rotary embedding of each token (Su et al. 2021), and the tokens' places in rectangles, if they go there."""

    cos: Float[Tensor, "N 1 E"]
    sin: Float[Tensor, "N 1 E"]
    places: Sequence[RectangleIndex]


def before_attention(
    x: Float[Tensor, "N D"],
    norm: Norm | None,
    weights: Sequence[Matrix],
    biases: Sequence[Weight],
    adapters: Sequence[MaybeLowRank],
    head_norms: Sequence[Norm],
    width: int,
    turn: RotaryTable,
    low: torch.dtype,
) -> tuple[Float[Tensor, "N D"], list[Tensor]]:
    """Return x itself, and query, key and value of norm(x) in each rectangle [places, heads, d = width], rotated.

    Without rectangles they stay as they are, one for each token.
    A norm of queries or keys spans one head or all of them, by the length of its weight.
    """
    eps, norm_weights = _split_norms([norm, *(head_norms or (None, None))])
    scales, pairs = _flatten_adapters(adapters)
    skip, *states = _BeforeAttention.apply(  # type: ignore[no-untyped-call]
        eps, width, turn, low, scales, x, *norm_weights, *weights, *biases, *pairs
    )
    return skip, states


def after_attention(
    skip: Float[Tensor, "N D"],
    seen: Sequence[Tensor],
    places: Sequence[RectangleIndex],
    chosen: Int[Tensor, " M"] | None,
    norms: Norms,
    weights: Sequence[Matrix],
    adapters: Sequence[MaybeLowRank],
    activation: str,
    low: torch.dtype,
) -> Float[Tensor, "M D"]:
    """Compute a layer from the output of its attention on, for the `chosen` tokens or, if that is None, for all.

    y = skip + seen Wo', then y + (silu(n Wg') * (n Wu')) Wd' with n = norm(y) (Shazeer 2020). In families that norm the
    output of a half, the norm of each product is added instead. `activation` is a key of elementwise.ACTIVATIONS.
    """
    scales, pairs = _flatten_adapters(adapters)
    eps, norm_weights = _split_norms([norms.before_mlp, norms.after_attention, norms.after_mlp])
    after: Tensor = _AfterAttention.apply(  # type: ignore[no-untyped-call]
        eps, low, scales, places, chosen, activation, skip, *norm_weights, *weights, *pairs, *seen
    )
    return after


def rms_norm(x: Float[Tensor, "N D"], norm: Norm) -> Float[Tensor, "N D"]:
    """Apply an RMSNorm to x."""
    y: Tensor = _RMSNorm.apply(x, norm.weight, norm.eps)  # type: ignore[no-untyped-call]
    return y


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, inverse = elementwise.normalize(x, weight, eps, x.dtype)
        ctx.save_for_backward(x, weight, inverse)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Weight, None]:
        x, weight, inverse = ctx.saved_tensors
        needs_grad = ctx.needs_input_grad[1]
        d_x, d_weight = elementwise.norm_backward(gradient, x * inverse, weight, inverse, None, needs_grad)
        return d_x, d_weight, None


class _BeforeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        eps: Sequence[float],
        width: int,
        turn: RotaryTable,
        low: torch.dtype,
        scales: Sequence[float],
        x: Tensor,
        weight: Weight,
        *others: Any,
    ) -> Any:
        head_norms, weights, biases, adapters = others[:2], others[2:5], others[5:8], _pair_adapters(others[8:], scales)
        inner, inverse = _normalize(x, weight, eps[0], low)
        heads = [
            _linear(inner, w, b, adapter)[: len(x)] for w, b, adapter in zip(weights, biases, adapters, strict=True)
        ]
        kept: list[Tensor] = []
        for number, norm in enumerate(head_norms):
            if norm is not None:
                states = heads[number].to(x.dtype).view(-1, len(norm))
                heads[number], inverse_rms = elementwise.normalize(states, norm, eps[1 + number], x.dtype)
                kept += [states, inverse_rms]
        query, key, value = (states.view(len(x), -1, width) for states in heads)
        query, key = (elementwise.rope(states, turn.cos, turn.sin, low) for states in (query, key))
        projected = query, key, value
        ctx.turn, ctx.low, ctx.scales = turn, low, scales
        _save(ctx, x, weight, inverse, *head_norms, *weights, *others[8:], *kept)
        if not turn.places:
            return x.view_as(x), *projected
        return x.view_as(x), *(
            states[places.start : places.start + places.count].index_select(0, places.grid)
            for places in turn.places
            for states in projected
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_skip: Tensor, *gradients: Tensor) -> Any:
        """Gather gradients from places to tokens, rotate them back, and go through the products and the norm."""
        x, weight, inverse, *saved = _saved(ctx)
        head_norms, weights, adapters, kept = saved[:2], saved[2:5], _pair_adapters(saved[5:11], ctx.scales), saved[11:]
        needs_grad = ctx.needs_input_grad[6:]
        turn: RotaryTable = ctx.turn
        d_heads = [_gather_live(gradients[number::3], turn.places) for number in range(3)]
        before_rows = x.dtype if kept else ctx.low  # the norms of heads come before the rows of a product
        flat = [elementwise.rope_backward(d, turn.cos, turn.sin, before_rows) for d in d_heads[:2]]
        d_head_norms: list[Weight] = [None, None]
        if kept:
            flat, d_head_norms = _head_norms_backward(flat, kept, head_norms, needs_grad[1:3])
        flat = [pad_rows_for_onednn(d, ctx.low) for d in (*flat, d_heads[2].flatten(1))]
        scaled, inner = _renormalize(x, inverse, weight, ctx.low)
        d_weights = [
            _weight_gradient(dy, inner, w, needed) for dy, w, needed in zip(flat, weights, needs_grad[3:6], strict=True)
        ]
        d_biases = [
            dy.sum(dim=0, dtype=x.dtype) if needed else None for dy, needed in zip(flat, needs_grad[6:9], strict=True)
        ]
        d_pairs = [
            d
            for dy, adapter, needed in zip(flat, adapters, needs_grad[9::2], strict=True)
            for d in _adapter_gradients(dy, inner, adapter, needed)
        ]
        d_inner = _input_gradient(flat, weights, adapters, x.dtype)[: len(x)]
        d_x, d_weight = _norm_backward(d_inner, scaled, weight, inverse, d_skip, needs_grad[0])
        return None, None, None, None, None, d_x, d_weight, *d_head_norms, *d_weights, *d_biases, *d_pairs


def _head_norms_backward(
    gradients: Sequence[Tensor],
    kept: Sequence[Tensor],
    weights: Sequence[Weight],
    needs_grad: Sequence[bool],
) -> tuple[list[Tensor], list[Weight]]:
    """Go back through the norms of queries and keys; `kept` has the input and the inverse RMS of each, in turn."""
    d_states, d_weights = [], []
    for gradient, state, inverse, weight, needed in zip(
        gradients, kept[::2], kept[1::2], weights, needs_grad, strict=True
    ):
        assert weight is not None
        d_norm = gradient.view(state.shape)
        d_state, d_weight = elementwise.norm_backward(d_norm, state * inverse, weight, inverse, None, needed)
        d_states.append(d_state.view(gradient.shape))
        d_weights.append(d_weight)
    return d_states, d_weights


class _AfterAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        eps: Sequence[float],
        low: torch.dtype,
        scales: Sequence[float],
        places: Sequence[RectangleIndex],
        chosen: Tensor | None,
        activation: str,
        skip: Tensor,
        weight: Weight,
        after_attention: Weight,
        after_mlp: Weight,
        out: Matrix,
        gate: Matrix,
        up: Matrix,
        down: Matrix,
        *others: Any,
    ) -> Tensor:
        pairs, rectangles = others[:8], others[8:]
        on_out, on_gate, on_up, on_down = _pair_adapters(pairs, scales)
        seen = _gather_live(rectangles, places).flatten(1)
        if chosen is not None:
            seen, skip = seen.index_select(0, chosen), skip.index_select(0, chosen)
        middle, *of_attention = _add_half(skip, pad_rows_for_onednn(seen, low), out, on_out, after_attention, eps[1])
        inner, inverse = _normalize(middle, weight, eps[0], low)
        gates, ups = _linear(inner, gate, adapter=on_gate), _linear(inner, up, adapter=on_up)
        total, *of_mlp = _add_half(middle, elementwise.gate(gates, ups, activation), down, on_down, after_mlp, eps[2])
        ctx.places, ctx.chosen, ctx.low, ctx.scales = places, chosen, low, scales
        ctx.activation = activation
        norms = weight, inverse, after_attention, *of_attention, after_mlp, *of_mlp
        _save(ctx, middle, *norms, out, gate, up, down, gates, ups, *pairs, *rectangles)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Go back through the feed-forward half, its norm, and the output projection of attention.

        d up = dh a(g),  d gate = dh u a'(g)  of  h = a(g) u.
        """
        middle, weight, inverse, after_attention, attended, attended_inverse, *saved = _saved(ctx)
        after_mlp, mlp_output, mlp_inverse, out, gate, up, down, gates, ups, *others = saved
        rectangles, (on_out, on_gate, on_up, on_down) = others[8:], _pair_adapters(others[:8], ctx.scales)
        needs_grad, dtype = ctx.needs_input_grad[7:], middle.dtype
        to_norms, to_weights, to_adapters = needs_grad[:3], needs_grad[3:7], needs_grad[7:15:2]
        d_mlp_output, d_after_mlp = _norm_backward(
            gradient, _scaled(mlp_output, mlp_inverse), after_mlp, mlp_inverse, None, to_norms[2]
        )
        d_low = pad_rows_for_onednn(d_mlp_output, ctx.low)
        d_hidden = _input_gradient([d_low], [down], [on_down], ctx.low)
        needs_hidden = to_weights[3] or to_adapters[3]
        hidden, d_gates, d_ups = elementwise.gate_backward(d_hidden, gates, ups, ctx.activation, needs_hidden)
        d_down = _weight_gradient(d_low, hidden, down, to_weights[3])
        d_on_down = _adapter_gradients(d_low, hidden, on_down, to_adapters[3])
        scaled, inner = _renormalize(middle, inverse, weight, ctx.low)
        d_gate, d_up = (
            _weight_gradient(d_gates, inner, gate, to_weights[1]),
            _weight_gradient(d_ups, inner, up, to_weights[2]),
        )
        d_on_gate = _adapter_gradients(d_gates, inner, on_gate, to_adapters[1])
        d_on_up = _adapter_gradients(d_ups, inner, on_up, to_adapters[2])
        d_inner = _input_gradient([d_gates, d_ups], [gate, up], [on_gate, on_up], dtype)[: len(middle)]
        d_middle, d_weight = _norm_backward(d_inner, scaled, weight, inverse, gradient, to_norms[0])
        d_attended, d_after_attention = _norm_backward(
            d_middle,
            _scaled(attended, attended_inverse),
            after_attention,
            attended_inverse,
            None,
            to_norms[1],
        )
        d_low, rows = pad_rows_for_onednn(d_attended, ctx.low), _count_tokens(rectangles, ctx.places)
        seen = None
        if to_weights[0] or to_adapters[0]:
            seen = _gather_live(rectangles, ctx.places).flatten(1)
            seen = pad_rows_for_onednn(seen if ctx.chosen is None else seen.index_select(0, ctx.chosen), ctx.low)
        d_out, d_on_out = (
            _weight_gradient(d_low, seen, out, to_weights[0]),
            _adapter_gradients(d_low, seen, on_out, to_adapters[0]),
        )
        d_seen = _input_gradient([d_low], [out], [on_out], ctx.low)[: len(middle)]
        if ctx.chosen is not None:  # a shared prompt's last token predicts the first of each completion
            d_seen = d_seen.new_zeros(rows, d_seen.shape[1]).index_add_(0, ctx.chosen, d_seen)
            d_middle = d_middle.new_zeros(rows, d_middle.shape[1]).index_add_(0, ctx.chosen, d_middle)
        d_rectangles = _scatter_to(rectangles, ctx.places, d_seen)
        d_weights = d_middle, d_weight, d_after_attention, d_after_mlp, d_out, d_gate, d_up, d_down
        d_pairs = *d_on_out, *d_on_gate, *d_on_up, *d_on_down
        return None, None, None, None, None, None, *d_weights, *d_pairs, *d_rectangles


def _split_norms(norms: Sequence[Norm | None]) -> tuple[list[float], list[Weight]]:
    """Return the epsilons and the weights of norms; 0 and None if there is none."""
    return [0.0 if norm is None else norm.eps for norm in norms], [None if norm is None else norm[0] for norm in norms]


def _flatten_adapters(adapters: Sequence[MaybeLowRank]) -> tuple[list[float], list[Weight]]:
    """Return the adapters' scales, and A and B of each in a flat list; 0 and None if there is no adapter."""
    scales = [0.0 if adapter is None else adapter.scale for adapter in adapters]
    pairs = [(None, None) if adapter is None else (adapter.down, adapter.up) for adapter in adapters]
    return scales, [weight for pair in pairs for weight in pair]


def _pair_adapters(pairs: Sequence[Weight], scales: Sequence[float]) -> list[MaybeLowRank]:
    """Build the adapters from what `_flatten_adapters` returned."""
    return [
        None if down is None or up is None else LowRank(down, up, scale)
        for down, up, scale in zip(pairs[::2], pairs[1::2], scales, strict=True)
    ]


def _linear(
    x: Float[Tensor, "N D"], weight: Matrix, bias: Weight = None, adapter: MaybeLowRank = None
) -> Float[Tensor, "N E"]:
    """Compute x (W + scale B A)^T + b in the dtype of x."""
    product = functional.linear(x, cast_weight(weight, x.dtype), None if bias is None else bias.to(x.dtype))
    return product if adapter is None else _add_low_rank(product, x, adapter)


def _add_low_rank(product: Float[Tensor, "M E"], x: Float[Tensor, "N D"], adapter: LowRank) -> Float[Tensor, "M E"]:
    """Add the first M rows of scale x A^T B^T to `product` in place."""
    inner = functional.linear(x, cast_weight(adapter.down, x.dtype))[: len(product)]
    if inner.dtype == product.dtype:
        return product.addmm_(inner, cast_weight(adapter.up, x.dtype).t(), alpha=adapter.scale)
    return product.add_(functional.linear(inner, cast_weight(adapter.up, x.dtype)), alpha=adapter.scale)


def _add_product(
    skip: Float[Tensor, "N D"], x: Float[Tensor, "M E"], weight: Matrix, adapter: MaybeLowRank
) -> Float[Tensor, "N D"]:
    """Compute skip + the first N rows of x (W + scale B A)^T; one fused product if the dtypes agree (M = N)."""
    if x.dtype == skip.dtype:
        total = torch.addmm(skip, x, cast_weight(weight, x.dtype).t())
    else:
        total = skip + _linear(x, weight)[: len(skip)]
    return total if adapter is None else _add_low_rank(total, x, adapter)


def _add_half(
    skip: Float[Tensor, "N D"],
    x: Float[Tensor, "M E"],
    weight: Matrix,
    adapter: MaybeLowRank,
    norm: Weight,
    eps: float,
) -> tuple[Tensor, Weight, Weight]:
    """Add a half's product, or its norm, to `skip`; also return the product and its inverse RMS if there is a norm."""
    if norm is None:
        return _add_product(skip, x, weight, adapter), None, None
    product = _linear(x, weight, adapter=adapter)[: len(skip)].to(skip.dtype)
    normed, inverse = elementwise.normalize(product, norm, eps, skip.dtype)
    return skip + normed, product, inverse


def _input_gradient(
    gradients: Sequence[Tensor], weights: Sequence[Matrix], adapters: Sequence[MaybeLowRank], dtype: torch.dtype
) -> Float[Tensor, "N D"]:
    """Compute the gradient of a shared input, the sum of dy (W + scale B A), accumulated in `dtype`."""
    total = (gradients[0] @ cast_weight(weights[0], gradients[0].dtype)).to(dtype)
    for gradient, weight in zip(gradients[1:], weights[1:], strict=True):
        if gradient.dtype == dtype:
            total.addmm_(gradient, cast_weight(weight, dtype))
        else:
            total += gradient @ cast_weight(weight, gradient.dtype)
    for gradient, adapter in zip(gradients, adapters, strict=True):
        if adapter is not None:
            up, down = (cast_weight(matrix, gradient.dtype) for matrix in (adapter.up, adapter.down))
            total += (gradient @ up).mul_(adapter.scale) @ down
    return total


def _weight_gradient(gradient: Tensor, x: Weight, weight: Matrix, needed: bool) -> Weight:
    """Compute the gradient of a weight, dy^T x, in its dtype; return None if it is not needed."""
    if not needed or isinstance(weight, QuantizedLinear):
        return None
    assert x is not None
    return (gradient.t() @ x).to(weight.dtype)


def _adapter_gradients(gradient: Tensor, x: Weight, adapter: MaybeLowRank, needed: bool) -> tuple[Weight, Weight]:
    """Compute the gradients of A, scale (dy B)^T x, and of B, scale dy^T (x A^T); None if they are not needed."""
    if adapter is None or not needed:
        return None, None
    assert x is not None
    outer = (gradient @ cast_weight(adapter.up, gradient.dtype)).mul_(adapter.scale)
    inner = functional.linear(x, cast_weight(adapter.down, x.dtype)).mul_(adapter.scale)
    return (outer.t() @ x).to(adapter.down.dtype), (gradient.t() @ inner).to(adapter.up.dtype)


def _count_tokens(rectangles: Sequence[Tensor], places: Sequence[RectangleIndex]) -> int:
    return sum(p.count for p in places) if places else len(rectangles[0])


def _scatter_to(
    rectangles: Sequence[Tensor], places: Sequence[RectangleIndex], d_seen: Float[Tensor, "N E"]
) -> list[Tensor]:
    """Undo `_gather_live`."""
    if not places:
        return [d_seen.view(rectangles[0].shape)]
    return [_scatter_live(d_seen, states, p) for states, p in zip(rectangles, places, strict=True)]


def _scatter_live(d_seen: Float[Tensor, "N E"], rectangle: Tensor, where: RectangleIndex) -> Tensor:
    """Scatter tokens' gradients to their places in a rectangle; zero at dead places."""
    live = d_seen[where.start : where.start + where.count].view(-1, *rectangle.shape[1:])
    return rectangle.new_zeros(rectangle.shape).index_copy_(0, where.back, live)


def _gather_live(rectangles: Sequence[Tensor], places: Sequence[RectangleIndex]) -> Float[Tensor, "N H d"]:
    """Gather tokens from their places, end to end; without rectangles they are there already."""
    if not places:
        return rectangles[0]
    tokens = [rectangle.index_select(0, p.back) for rectangle, p in zip(rectangles, places, strict=True)]
    return tokens[0] if len(tokens) == 1 else torch.cat(tokens)


def _normalize(
    x: Float[Tensor, "N D"], weight: Weight, eps: float, low: torch.dtype
) -> tuple[Float[Tensor, "M D"], Weight]:
    """Compute the norm of x, as rows of a product in `low`, and its inverse RMS; without a norm x itself, and None."""
    return (pad_rows_for_onednn(x, low), None) if weight is None else elementwise.normalize(x, weight, eps, low)


def _renormalize(
    x: Float[Tensor, "N D"], inverse: Weight, weight: Weight, low: torch.dtype
) -> tuple[Float[Tensor, "N D"], Float[Tensor, "M D"]]:
    """Compute the norm of x without its weight, and with it as rows of a product in `low`; both x without a norm."""
    if weight is None:
        return x, pad_rows_for_onednn(x, low)
    assert inverse is not None
    return elementwise.renormalize(x, inverse, weight, low)


def _scaled(x: Any, inverse: Weight) -> Any:
    """Apply a norm without its weight to x; return x itself if there is none."""
    return x if inverse is None else x * inverse


def _norm_backward(
    gradient: Tensor,
    scaled: Weight,
    weight: Weight,
    inverse: Weight,
    d_skip: Weight,
    needs_grad: bool,
) -> tuple[Tensor, Weight]:
    """Compute the gradients of a norm's input, added to `d_skip`, and of its weight; without a norm dx = dy."""
    if weight is None:
        return (gradient if d_skip is None else gradient + d_skip), None
    assert scaled is not None
    assert inverse is not None
    return elementwise.norm_backward(gradient, scaled, weight, inverse, d_skip, needs_grad)
