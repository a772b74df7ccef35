"""Autocast for the pretend device: which operations CUDA's autocast runs in 16 bits, and which in float32.

From the documentation of torch.amp, "CUDA Ops that can autocast to float16", "... to float32" and "... promote".
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SIXTEEN_BITS = ("addmm", "addmv", "addr", "matmul", "mm", "mv", "linear", "addbmm", "baddbmm", "bmm")
FLOAT32 = (
    *("exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "pow", "softplus", "layer_norm"),
    *("native_layer_norm", "rms_norm", "logsumexp", "binary_cross_entropy_with_logits", "kl_div", "dist", "renorm"),
    *("prod", "softmax", "log_softmax", "cumprod", "cumsum", "linalg_vector_norm", "sum"),
)
WIDEST = ("addcdiv", "addcmul", "atan2", "cross", "dot", "index_put", "scatter_add")

_libraries: list[torch.library.Library] = []


def register_autocast(kind: type[Tensor]) -> None:
    """Register the casts for tensors of `kind`, once a process."""
    if _libraries:
        return
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that its own kernels are overridden
        for names, target in ((SIXTEEN_BITS, _sixteen_bits), (FLOAT32, _float32), (WIDEST, _widest)):
            for name in names:
                packet = getattr(torch.ops.aten, name)
                for overload in packet.overloads():
                    if "out" not in overload:
                        _register(library, getattr(packet, overload), target, kind)


Target = Callable[[list[torch.dtype]], torch.dtype | None]


def _sixteen_bits(_: list[torch.dtype]) -> torch.dtype:
    return torch.get_autocast_dtype("cuda")


def _float32(_: list[torch.dtype]) -> torch.dtype:
    return torch.float32


def _widest(dtypes: list[torch.dtype]) -> torch.dtype | None:
    return torch.float32 if torch.float32 in dtypes else None


def _register(library: torch.library.Library, operation: Any, target: Target, kind: type[Tensor]) -> None:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)

    def is_cast(value: Any) -> bool:
        return isinstance(value, kind) and value.is_floating_point() and value.dtype != torch.float64

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            dtype = target([value.dtype for value in (*args, *kwargs.values()) if is_cast(value)])

            def cast(value: Any) -> Any:
                if isinstance(value, list | tuple):
                    return type(value)([cast(part) for part in value])
                return value.to(dtype) if dtype is not None and is_cast(value) and value.dtype != dtype else value

            return operation(*cast(args), **{name: cast(value) for name, value in kwargs.items()})

    library.impl(operation, kernel, "AutocastCUDA", allow_override=True)
