"""The forward pass of Llama-like models over rows without padding, written out: the modules' results in fewer steps.

Which families these are, and where they keep their weights, is in families.py. Results that nobody reads are left out
too: the last layer's feed-forward half is computed for the chosen tokens only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rlhf.models.adapters import is_lora_linear
from rlhf.models.kernels.attention import PackedBatch, attend, compute_dtype
from rlhf.models.kernels.cast import HALF_DTYPES
from rlhf.models.kernels.llama.elementwise import ACTIVATIONS, EAGER, Elementwise
from rlhf.models.kernels.llama.families import READERS, Layer, Projection, Reader, norm_of, read_layers
from rlhf.models.kernels.llama.layer import (
    Adapter,
    LowRank,
    RotaryTable,
    after_attention,
    before_attention,
    rms_norm,
)
from rlhf.models.kernels.packing import autocast_off, build_probe, packed_inputs
from rlhf.runtime.device import is_device_error


def predictor_states(body: nn.Module, rows: PackedBatch, chosen: Int[Tensor, " M"]) -> Float[Tensor, "M D"]:
    """Compute the last hidden states at `chosen` for rows without padding, by the written-out pass where it applies."""
    if supports_fused(body):
        return _states(body, rows, chosen)
    states: Tensor = body(**packed_inputs(rows)).last_hidden_state
    return states[0].index_select(0, chosen)


_MATCHES: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()  # tried once for each model
_FUNCTIONS: WeakKeyDictionary[nn.Module, Elementwise] = WeakKeyDictionary()  # of models whose layers are compiled


def supports_fused(body: nn.Module) -> bool:
    """Check whether the written-out pass computes what `body` computes, by trying it on a few rows.

    It does not apply where the modules must be called as they are: adapters of another kind than plain LoRA, weights
    that DeepSpeed gathers only then (ZeRO-3), or whose gradients it reduces as they arrive (ZeRO-2), which must be in
    the same order in all processes, while here several arrive at once.
    """
    if not _is_plain(body):
        return False
    if body not in _MATCHES:
        _MATCHES[body] = _matches_modules(body)
    return _MATCHES[body]


def use_functions(body: nn.Module, functions: Elementwise) -> bool:
    """Compute with `functions` what is between the products of a supported `body`, if it passes the trial with them."""
    before = _FUNCTIONS.get(body, EAGER)
    _FUNCTIONS[body] = functions
    kept_low = any(weight.dtype in HALF_DTYPES for weight in body.parameters())  # frozen.py: modules cannot be called
    matches = kept_low or _matches_modules(body)
    if not matches:
        _FUNCTIONS[body] = before
    return matches


def fused_unsupported_reason(body: nn.Module) -> str:
    """Explain why the written-out pass is off for a family that it knows; empty where it is on, or never was meant."""
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
    """Check that the weights are in full precision, on this process, and that nothing waits for their gradients."""
    weight = body.norm.weight
    if weight.dtype not in (torch.float32, torch.float64) or hasattr(weight, "ds_id"):
        return False
    return not any(_has_gradient_hooks(parameter) for parameter in body.parameters())


def _has_plain_projections(layer: Layer) -> bool:
    """Check that all projections of a layer are plain, and that only the inputs of attention have a bias."""
    return all(
        _is_plain_linear(projection.module) and (projection.linear.bias is None or may_have_bias)
        for projections, may_have_bias in ((layer.inputs, True), ([layer.output, *layer.gate_up, layer.down], False))
        for projection in projections
    )


def _is_plain_linear(module: Any) -> bool:
    """Check whether `module` is a linear layer, alone or with a single plain LoRA adapter."""
    if type(module) is nn.Linear:
        return True
    if not is_lora_linear(module) or type(module.base_layer) is not nn.Linear:
        return False
    return len(module.active_adapters) == 1 and _is_plain_adapter(module, module.active_adapters[0])


def _is_plain_adapter(module: Any, name: str) -> bool:
    """Check whether the LoRA adapter `name` of `module` is a product of two matrices, without dropout, not merged."""
    if name not in module.lora_A or module.merged or module.lora_variant:
        return False
    dropout, pair = module.lora_dropout[name], (module.lora_A[name], module.lora_B[name])
    plain = all(type(linear) is nn.Linear and linear.bias is None for linear in pair)
    return plain and type(dropout) is nn.Identity


def _weights(projections: Sequence[Projection]) -> list[Tensor]:
    return [part for projection in projections for part in projection.split(projection.linear.weight)]


def _biases(projections: Sequence[Projection]) -> list[Tensor | None]:
    return [part for projection in projections for part in _split(projection, projection.linear.bias)]


def _split(projection: Projection, rows: Tensor | None) -> Sequence[Tensor | None]:
    return [None] * projection.parts if rows is None else projection.split(rows)


def _adapters(projections: Sequence[Projection]) -> list[Adapter]:
    return [adapter for projection in projections for adapter in _adapters_of(projection)]


def _adapters_of(projection: Projection) -> Sequence[Adapter]:
    """Return the adapter of each part; parts of one weight share A. None where there is none, or it is disabled."""
    module = projection.module
    if type(module) is nn.Linear or module.disable_adapters:
        return [None] * projection.parts
    name = module.active_adapters[0]
    down, ups = module.lora_A[name].weight, projection.split(module.lora_B[name].weight)
    return [LowRank(down, up, float(module.scaling[name])) for up in ups]


def _has_gradient_hooks(weight: Any) -> bool:
    return bool(weight._post_accumulate_grad_hooks)


@torch.no_grad()
def _matches_modules(body: nn.Module) -> bool:
    with autocast_off(body), live_adapters(body):
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
    read, functions = READERS[type(body)], _FUNCTIONS.get(body, EAGER)
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
            functions=functions,
        )
        if layer.gradient_checkpointing and layer.training:
            x = checkpoint(forward, x, use_reentrant=False, preserve_rng_state=False)
        else:
            x = forward(x)
    return rms_norm(x, norm_of(body.norm), functions)


def rotary(body: Any, x: Float[Tensor, "N D"], rows: PackedBatch, angles: str | None) -> RotaryTable:
    """Compute the body's rotary embedding, of kind `angles` where it has several, at the positions of the rows."""
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
    functions: Elementwise,
) -> Float[Tensor, "M D"]:
    """Compute a layer, with `functions` between its products, for the `chosen` tokens or, where that is None, all."""
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
        functions,
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
        functions,
    )
