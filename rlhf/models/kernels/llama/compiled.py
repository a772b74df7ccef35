"""What a layer computes between its matrix products, for torch.compile: each function becomes one pass over memory.

These are the functions of elementwise.py as their equations read, without a thought for memory: the compiler fuses
them. The number of rows is left open, so that each is compiled once for a model and not for every length.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from rlhf.models.kernels.cast import HALF_DTYPES, ROW_MULTIPLE
from rlhf.models.kernels.llama.elementwise import ACTIVATIONS, Elementwise, Weight

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
