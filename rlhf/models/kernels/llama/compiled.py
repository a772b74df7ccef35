"""What a layer computes between its matrix products, for torch.compile, and whether a model can be compiled.

These are the functions of elementwise.py as their equations read, without a thought for memory: the compiler fuses
them. The number of rows is left open, so that each is compiled once for a model and not for every length.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from rlhf.models.kernels.attention import PackedBatch
from rlhf.models.kernels.cast import HALF_DTYPES, ROW_MULTIPLE
from rlhf.models.kernels.llama.elementwise import ACTIVATIONS, EAGER, Elementwise, Weight
from rlhf.models.kernels.llama.families import READERS, norm_of
from rlhf.models.kernels.llama.forward import (
    layer_forward,
    live_adapters,
    rms_norm,
    rotary,
    supports_fused,
    use_functions,
)
from rlhf.models.kernels.packing import pack, vocabulary_size
from rlhf.runtime.device import is_device_error

MAX_VARIANTS = 64  # of a function, by dtype, width and autocast; torch's own 8 would end a run of several models


def normalize(
    x: Float[Tensor, "N D"], weight: Float[Tensor, " D"], eps: float, dtype: torch.dtype
) -> tuple[Float[Tensor, "M D"], Float[Tensor, "N 1"]]:
    """Compute w x / rms and 1 / rms, with rms = sqrt(mean(x²) + eps)."""
    inverse = torch.rsqrt((x * x).mean(dim=-1, keepdim=True) + eps)
    return _pad_rows(x * inverse * weight, dtype), inverse


def renormalize(
    x: Float[Tensor, "N D"], inverse: Float[Tensor, "N 1"], weight: Float[Tensor, " D"], dtype: torch.dtype
) -> tuple[Float[Tensor, "N D"], Float[Tensor, "M D"]]:
    """Compute x / rms and w x / rms."""
    scaled = x * inverse
    return scaled, _pad_rows(scaled * weight, dtype)


def norm_backward(
    gradient: Float[Tensor, "N D"],
    scaled: Float[Tensor, "N D"],
    weight: Float[Tensor, " D"],
    inverse: Float[Tensor, "N 1"],
    d_skip: Weight,
    needs_grad: bool,
) -> tuple[Float[Tensor, "N D"], Weight]:
    """Compute dx = (dy w - n mean(dy w n)) / rms + d_skip and dw = sum(dy n), with n = x / rms."""
    d_scaled = gradient * weight
    d_x = (d_scaled - scaled * (d_scaled * scaled).mean(dim=-1, keepdim=True)) * inverse
    d_weight = (gradient * scaled).sum(dim=0) if needs_grad else None
    return (d_x if d_skip is None else d_skip + d_x), d_weight


def rope(
    heads: Float[Tensor, "N H d"], cos: Float[Tensor, "N 1 E"], sin: Float[Tensor, "N 1 E"], dtype: torch.dtype
) -> Float[Tensor, "N H d"]:
    """Rotate heads to their positions."""
    return _turn(heads, cos, sin).to(dtype)


def rope_backward(
    gradient: Float[Tensor, "N H d"], cos: Float[Tensor, "N 1 E"], sin: Float[Tensor, "N 1 E"], dtype: torch.dtype
) -> Float[Tensor, "M Hd"]:
    """Rotate the gradients of heads back."""
    return _pad_rows(_turn(gradient, cos, -sin).flatten(1), dtype)


def gate(gates: Float[Tensor, "N E"], ups: Float[Tensor, "N E"], activation: str) -> Float[Tensor, "N E"]:
    """Compute a(g) u."""
    return ACTIVATIONS[activation].of(gates) * ups


def gate_backward(
    gradient: Float[Tensor, "N E"],
    gates: Float[Tensor, "N E"],
    ups: Float[Tensor, "N E"],
    activation: str,
    needs_value: bool,
) -> tuple[Weight, Float[Tensor, "N E"], Float[Tensor, "N E"]]:
    """Compute h = a(g) u, if it is needed, dg = dh u a'(g) and du = dh a(g)."""
    activated = ACTIVATIONS[activation].of(gates)
    d_gates = ACTIVATIONS[activation].back(gradient * ups, gates)
    return activated * ups if needs_value else None, d_gates, gradient * activated


def _turn(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half, heads = cos.shape[-1], heads.to(torch.promote_types(heads.dtype, cos.dtype))
    first, second, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def _pad_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Do what `cast.pad_rows_for_onednn` does, without asking whether there is anything to append."""
    low = x.to(dtype)
    on_cpu = x.device.type == "cpu" and dtype in HALF_DTYPES
    return functional.pad(low, (0, 0, 0, -x.shape[0] % ROW_MULTIPLE)) if on_cpu else low


PLAIN = Elementwise(normalize, renormalize, norm_backward, rope, rope_backward, gate, gate_backward)
_graphs = 0


def count_graphs() -> int:
    """Return how many graphs were compiled in this process, of all functions and their variants."""
    return _graphs


@cache
def compiled() -> Elementwise:
    """Return the functions behind torch.compile; each is compiled when it is first called."""
    return Elementwise(*(_compile(function) for function in PLAIN))


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled_function = torch.compile(function, fullgraph=True, backend=_inductor)

    def call(*arguments: Any) -> Any:
        for tensor in arguments:
            if isinstance(tensor, Tensor) and tensor.dim() > 1:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)  # rows
        return compiled_function(*arguments)

    return call


def _inductor(graph: Any, inputs: Any) -> Any:
    """Compile a graph by torch's own compiler, and count it."""
    global _graphs
    from torch._inductor.compile_fx import compile_fx

    _graphs += 1
    return compile_fx(graph, inputs)


TRIAL_ROWS, TRIAL_LENGTH = 16, 64  # as many tokens as a micro-batch: the compiler divides work by those it first sees
NOT_WRITTEN_OUT = "layers are not compiled: they are not written out"
MAX_ERROR = {torch.bfloat16: 5e-2, torch.float32: 1e-5, torch.float64: 1e-12}  # RMS, relative to eager's


def compile_layers(body: nn.Module, dtype: torch.dtype) -> str:
    """Compile what the layers of `body` compute between their products in a run of `dtype`; return why not, or "".

    Tried on the first layer: states and gradients must be those of the functions that are not compiled, to rounding.
    Then the whole body passes its own trial again.
    """
    device = next(body.parameters()).device
    if not supports_fused(body):
        return NOT_WRITTEN_OUT
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        return _because("a GPU needs Triton, which is not installed")
    torch._dynamo.config.recompile_limit = max(MAX_VARIANTS, torch._dynamo.config.recompile_limit)
    try:
        error = _largest_error(body, dtype)
        if not count_graphs():
            return _because("torch.compile did nothing, as if TORCHDYNAMO_DISABLE were set")
        matches = error <= MAX_ERROR[dtype] and use_functions(body, compiled())
    except (RuntimeError, OSError, ImportError, AttributeError, TypeError, ValueError, AssertionError) as failure:
        if is_device_error(failure):
            raise
        return _because(f"torch.compile failed: {_first_line(failure)}")
    return "" if matches else _because("on a few rows they gave other numbers")


def _because(reason: str) -> str:
    return f"layers are not compiled: {reason}"


def _first_line(failure: Exception) -> str:
    return f"{type(failure).__name__}: {str(failure).strip().partition(chr(10))[0]}"


def _largest_error(body: nn.Module, dtype: torch.dtype) -> float:
    """Compute the largest error of states or a gradient by the compiled functions, relative to its RMS."""
    rows = _trial_rows(body)
    with live_adapters(body):
        eager, tried = (_states_and_gradients(body, rows, dtype, functions) for functions in (EAGER, compiled()))
    return max(_rms(ours - right) / _rms(right) for ours, right in zip(tried, eager, strict=True))


def _rms(numbers: Tensor) -> float:
    return float(numbers.double().square().mean().sqrt())


def _trial_rows(body: nn.Module) -> PackedBatch:
    ids = torch.arange(2 * TRIAL_ROWS * TRIAL_LENGTH).view(2, TRIAL_ROWS, TRIAL_LENGTH) % vocabulary_size(body)
    mask = torch.ones(TRIAL_ROWS, TRIAL_LENGTH // 2, dtype=torch.bool)
    prompts, completions = (part[:, : TRIAL_LENGTH // 2].to(next(body.parameters()).device) for part in ids)
    rows = pack(prompts, mask, completions, mask)
    assert rows is not None
    return rows


def _states_and_gradients(body: Any, rows: PackedBatch, dtype: torch.dtype, functions: Elementwise) -> list[Tensor]:
    """Return the states after the first layer and the last norm, and the gradients of the layer's input and weights.

    Biases are left out: that of keys has no gradient but rounding. Of a frozen model the states are all.
    """
    layer, read = body.layers[0], READERS[type(body)]
    named = [*layer.named_parameters(), *body.norm.named_parameters()]
    weights = [weight for name, weight in named if weight.requires_grad and name.endswith("weight")]
    x = body.embed_tokens(rows.input_ids)[0].detach().requires_grad_()
    low = torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16)
    kind = read(layer).rope_kind
    with torch.enable_grad(), low:
        turns = {kind: rotary(body, x, rows, kind)}
        y = layer_forward(layer, x, read=read, turns=turns, rows=rows, chosen=None, functions=functions)
        states = rms_norm(y, norm_of(body.norm), functions)
    direction = torch.linspace(-1, 1, states.numel(), dtype=states.dtype, device=states.device).view_as(states)
    if not weights:
        return [states.detach()]
    return [states.detach(), *torch.autograd.grad((states * direction).sum(), [x, *weights])]
