"""Answers of C++ before it dispatches, on the pretend device: tensors of numbers, pinned memory, fused kernels."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from pretend_attention import scaled_dot_product_attention, varlen_attention
from pretend_streams import current
from pretend_tensor import DEVICE, DeviceTensor, names_device, names_meta
from torch.overrides import TorchFunctionMode


@contextlib.contextmanager
def _asked_for_meta(local: threading.local) -> Iterator[None]:
    """Take `meta` at its word: the program itself asked for it, as transformers does while it loads a model."""
    local.asked_for_meta = True
    try:
        yield
    finally:
        local.asked_for_meta = False


_NAMES_A_DEVICE = frozenset({str, torch.device})


class Functions(TorchFunctionMode):
    """C++'s answers before it dispatches: tensors made of Python numbers, pinned memory, fused kernels."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs) if kwargs else {}
        special = _SPECIAL.get(getattr(func, "__name__", ""))
        if special is not None:
            result = special(func, args, kwargs)
            if result is not NotImplemented:
                return result
        for value in (*args, *kwargs.values()):
            if type(value) in _NAMES_A_DEVICE:
                break
        else:  # as nearly all calls are
            return func(*args, **kwargs)
        args = tuple(DEVICE if names_device(value) else value for value in args)
        kwargs = {key: DEVICE if names_device(value) else value for key, value in kwargs.items()}
        if any(names_meta(value) for value in (*args, *kwargs.values())):
            with _asked_for_meta(current().local):
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _rms_norm(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if not isinstance(args[0], DeviceTensor) or torch.is_grad_enabled():
        return NotImplemented
    given: list[Any] = [tensor for tensor in args if isinstance(tensor, DeviceTensor)]
    return current().launch("rms_norm", torch.rms_norm, args, kwargs, given)


def _new_tensor(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if not isinstance(args[0], DeviceTensor):
        return NotImplemented
    with torch._C.DisableTorchFunction():
        made = torch.tensor(args[1], dtype=kwargs.get("dtype") or args[0].dtype)
    return made.to(DEVICE)


def _tensor(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if not names_device(kwargs.get("device")):
        return NotImplemented
    del kwargs["device"]
    made = func(*args, **kwargs)
    return made if isinstance(made, DeviceTensor) else made.to(DEVICE)


def _to(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Leave out a device that the tensor is on already, which C++ would not see."""
    if not isinstance(args[0], DeviceTensor):
        return NotImplemented
    rest = list(args[1:])
    if rest and names_device(rest[0]):
        rest = rest[1:]
    elif names_device(kwargs.get("device")):
        del kwargs["device"]
    else:
        return NotImplemented
    if not [x for x in rest if x is not None] and not kwargs.get("copy") and kwargs.get("dtype") is None:
        return args[0]
    kwargs.pop("non_blocking", None)
    if not rest or rest[0] is None:
        rest = [kwargs.pop("dtype")] if kwargs.get("dtype") is not None else [args[0].dtype]
    return func(args[0], rest[0], copy=bool(kwargs.get("copy")))


def _cuda(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return args[0] if isinstance(args[0], DeviceTensor) else args[0].to(DEVICE, **kwargs)


def _tolist(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return args[0].cpu().tolist() if isinstance(args[0], DeviceTensor) else NotImplemented


def _pin_memory(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return args[0] if current().is_pinned(args[0]) else current().pin(args[0].clone())


def _is_pinned(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return not isinstance(args[0], DeviceTensor) and current().is_pinned(args[0])


def _make(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if not kwargs.get("pin_memory"):
        return NotImplemented
    return current().pin(func(*args, **{key: value for key, value in kwargs.items() if key != "pin_memory"}))


_SPECIAL: dict[str, Callable[[Any, Any, dict[str, Any]], Any]] = {
    "scaled_dot_product_attention": scaled_dot_product_attention,
    "_varlen_attn": varlen_attention,
    "rms_norm": _rms_norm,
    "new_tensor": _new_tensor,
    **dict.fromkeys(("tensor", "as_tensor", "asarray"), _tensor),
    "to": _to,
    "cuda": _cuda,
    "tolist": _tolist,
    "pin_memory": _pin_memory,
    "is_pinned": _is_pinned,
    **dict.fromkeys(("empty", "zeros", "full", "empty_like"), _make),
}
