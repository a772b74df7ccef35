"""Try whether the layers of a model can be compiled, and compile them: policy.compile."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor, nn

from rlhf.models.kernels.attention import PackedBatch
from rlhf.models.kernels.llama.compiled import MAX_VARIANTS, compiled, count_graphs
from rlhf.models.kernels.llama.elementwise import EAGER, Elementwise
from rlhf.models.kernels.llama.families import READERS, norm_of
from rlhf.models.kernels.llama.forward import layer_forward, live_adapters, rotary, supports_fused, use_functions
from rlhf.models.kernels.llama.layer import rms_norm
from rlhf.models.kernels.packing import pack, vocabulary_size
from rlhf.runtime.device import is_device_error

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
