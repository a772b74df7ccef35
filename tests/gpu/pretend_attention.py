"""Attention on the pretend device: one kernel and one for its gradients, as CUDA has them, with the CPU's numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from pretend_streams import current
from pretend_tensor import DeviceTensor
from torch import Tensor


def scaled_dot_product_attention(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if not isinstance(args[0], DeviceTensor):
        return NotImplemented
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    options = {**dict(zip(names, args, strict=False)), **kwargs}
    query, key, value = (options.pop(name) for name in names[:3])
    if torch.is_autocast_enabled("cuda"):
        low = torch.get_autocast_dtype("cuda")
        query, key, value = (x if x.dtype == torch.float64 else x.to(low) for x in (query, key, value))
    mask = options.pop("attn_mask", None)
    for tensor in (key, value, *([] if mask is None else [mask])):
        if not isinstance(tensor, DeviceTensor):
            current()._refuse("Expected all tensors to be on the same device, cuda:0 and cpu: attention")
    current().attention[_attention_kernel(query, mask, bool(options.get("enable_gqa")))] += 1
    return _Attention.apply(query, key, value, mask, options)  # type: ignore[no-untyped-call]


def _attention_kernel(query: Tensor, mask: Tensor | None, groups: bool) -> str:
    """Name the kernel that CUDA would take: flash needs 16 bits and no mask, mem-efficient a key for every head."""
    if query.dtype in (torch.bfloat16, torch.float16) and mask is None:
        return "flash"
    return "math" if groups or query.dtype == torch.float64 else "memory-efficient"


class _Attention(torch.autograd.Function):
    """Attention as one kernel, and another for its gradients."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: Any) -> Tensor:
        ctx.save_for_backward(query, key, value, mask)
        ctx.options = options
        given: list[Any] = [query, key, value] if mask is None else [query, key, value, mask]
        attend = _host_attention(options)
        out: Tensor = current().launch("attention", attend, (query, key, value, mask), {}, given)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        query, key, value, mask = ctx.saved_tensors
        attend = _host_attention(ctx.options)

        def back(gradient: Tensor, *inputs: Tensor) -> Any:
            with torch.enable_grad():
                leaves = [tensor.detach().requires_grad_() for tensor in inputs[:3]]
                return list(torch.autograd.grad(attend(*leaves, *inputs[3:]), leaves, gradient))

        args = (gradients[0], query, key, value, *([] if mask is None else [mask]))
        given: list[Any] = [tensor for tensor in args if isinstance(tensor, DeviceTensor)]
        gradient_list = current().launch("attention backward", back, args, {}, given)
        return *gradient_list, None, None


def _host_attention(options: dict[str, Any]) -> Callable[..., Tensor]:
    plain = torch._C._nn.scaled_dot_product_attention

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        with torch.autocast("cpu", enabled=False), torch._C.DisableTorchFunction():
            out: Tensor = plain(query, key, value, attn_mask=mask, **options)
        return out

    return attend


def varlen_attention(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run torch's operation for rows of any length, which has no kernel on a CPU; refuse inputs that CUDA refuses."""
    if not isinstance(args[0], DeviceTensor):
        return NotImplemented
    query, key, value, queries, keys, longest_queries, longest_keys, _, scale, window, *told = args
    groups = query.shape[1] != key.shape[1]  # torch 2.11's operation is not told of them
    machine = current()
    if not all(isinstance(tensor, DeviceTensor) for tensor in args[:5]):
        machine._refuse("Expected all tensors to be on the same device, cuda:0 and cpu: attention")
    runs = [list(zip(x.host.tolist(), x.host.tolist()[1:], strict=False)) for x in (queries, keys)]
    longest = [max(stop - start for start, stop in run) for run in runs]
    dim = query.shape[2]
    for is_wrong, text in (
        (any(x.dtype not in (torch.float16, torch.bfloat16) for x in args[:3]), "only supports fp16 and bf16"),
        (queries.dtype != torch.int32 or keys.dtype != torch.int32, "cu_seqlens must have dtype int32"),
        (dim % 8 or dim > 256 or value.shape[2] != dim, "only supports head dimension of a multiple of 8 up to 256"),
        (any(x.host.stride(-1) != 1 for x in args[:3]), "input tensors must have contiguous last dimension"),
        (longest != [longest_queries, longest_keys], f"longest runs are {longest}"),
        ([run[-1][1] for run in runs] != [len(query), len(key)], "bounds do not end with the tokens"),
        (list(window) != [-1, 0] or groups != (told or [groups])[0], "another kind of attention"),
    ):
        if is_wrong:
            raise RuntimeError(f"FlashAttention: {text}")
    machine.attention["varlen"] += 1
    return _Varlen.apply(query, key, value, runs, scale), None, None  # type: ignore[no-untyped-call]


class _Varlen(torch.autograd.Function):
    """Attention of all runs as one kernel, and another for its gradients."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, runs: Any, scale: float | None) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.attend = lambda *host: attend_runs(*host, runs, scale)
        out: Tensor = current().launch("attention", ctx.attend, (query, key, value), {}, [query, key, value])
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        args: Any = (gradients[0], *ctx.saved_tensors)

        def back(gradient: Tensor, *inputs: Tensor) -> Any:
            with torch.enable_grad():
                leaves = [tensor.detach().requires_grad_() for tensor in inputs]
                return list(torch.autograd.grad(ctx.attend(*leaves), leaves, gradient))

        return *current().launch("attention backward", back, args, {}, list(args)), None, None


def attend_runs(
    query: Tensor, key: Tensor, value: Tensor, runs: Sequence[Sequence[tuple[int, int]]], scale: float | None
) -> Tensor:
    """Compute attention of each run of queries over its run of keys, with the diagonal in the last corner."""
    outputs = []
    for (first, stop), (first_key, stop_key) in zip(*runs, strict=True):
        asked, seen = stop - first, stop_key - first_key
        heads = [
            x[start:end].transpose(0, 1)[None]
            for x, start, end in ((query, first, stop), (key, first_key, stop_key), (value, first_key, stop_key))
        ]
        mask = torch.ones(asked, seen, dtype=torch.bool).tril(seen - asked)
        attend = _host_attention({"scale": scale, "enable_gqa": query.shape[1] != key.shape[1]})
        outputs.append(attend(*heads, mask)[0].transpose(0, 1))
    return torch.cat(outputs)
