"""A tensor on the pretend device, and Python's name for that device."""

from __future__ import annotations

from typing import Any

import torch
from pretend_streams import Memory, current
from torch import Tensor

DEVICE = torch.device("cuda:0")


class DeviceTensor(torch.Tensor):
    """A tensor on the pretend device; `host` has its numbers.

    C++ takes it for a meta tensor, so that autograd asks no CUDA driver for a stream, but with CUDA's dispatch keys,
    so that CUDA's autocast sees it; Python is told `cuda:0`.
    """

    host: Tensor
    memory: Memory

    @staticmethod
    def __new__(cls, host: Tensor, memory: Memory | None = None) -> DeviceTensor:
        with torch._C.DisableTorchFunction():
            meta = torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device="meta")
            made: DeviceTensor = torch.Tensor._make_subclass(cls, meta, False, device_for_backend_keys=DEVICE)
        return made

    def __init__(self, host: Tensor, memory: Memory | None = None) -> None:
        self.host, self.memory = host, memory or Memory()

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: DEVICE)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_meta = property(lambda self: False)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return current().run(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"DeviceTensor({self.host!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        current().host_waits("pickle", current().stream().clock())
        return self.host.detach().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            made: Tensor = self.detach().clone()
            if isinstance(self, torch.nn.Parameter):
                made = torch.nn.Parameter(made, requires_grad=self.requires_grad)
            memo[id(self)] = made.requires_grad_(self.requires_grad)
        return memo[id(self)]

    def data_ptr(self) -> int:
        return self.host.data_ptr()


def names_device(value: Any) -> bool:
    return (isinstance(value, torch.device) and value.type == "cuda") or (
        isinstance(value, str) and value.startswith("cuda")
    )


def names_meta(value: Any) -> bool:
    return (isinstance(value, torch.device) and value.type == "meta") or (isinstance(value, str) and value == "meta")


def is_device(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"
