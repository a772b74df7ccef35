"""Copies between the host and a GPU for which nobody waits.

A GPU works through a queue; a host that waits for it (to read a number, or while pageable memory is copied) lets the
queue run dry. So a micro-batch goes over in one pinned, non-blocking copy, its layout is computed from the tensors that
are still on the host, and numbers are read together, once an optimizer step. On a CPU all of this does nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

Number = float | Tensor
"""A number, or a tensor without dimensions that has it on a device."""

ALIGNMENT = 16  # bytes: of each tensor within the copied buffer; more than the largest element

_HOST: Any = WeakTensorKeyDictionary()  # tensor on a GPU -> the host's tensor that it was copied from
_POSITIONS: Any = WeakTensorKeyDictionary()  # mask on a GPU -> its live positions, on the GPU


def copies_asynchronously(device: torch.device) -> bool:
    """Return whether copies to this device can go on while the host does something else."""
    return device.type == "cuda"


def to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return the tensors on `device`; from the host to a GPU in a single copy that does not wait.

    The host's tensors are remembered for `on_host` as long as the device's live; they must not be changed meanwhile.
    """
    if not copies_asynchronously(device) or not tensors or any(tensor.device.type != "cpu" for tensor in tensors):
        return [tensor.to(device) for tensor in tensors]
    sizes = [-(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT for tensor in tensors]
    starts = [0, *accumulate(sizes)]
    buffer = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)
    for tensor, start in zip(tensors, starts, strict=False):
        _slice(buffer, start, tensor).copy_(tensor)
    moved = buffer.to(device, non_blocking=True)
    results = [_slice(moved, start, tensor) for tensor, start in zip(tensors, starts, strict=False)]
    for result, tensor in zip(results, tensors, strict=True):
        _HOST[result] = tensor
    return results


def _slice(buffer: Tensor, start: int, like: Tensor) -> Tensor:
    """Return the part of a byte buffer that begins at `start` as a tensor with the shape and dtype of `like`."""
    return buffer[start : start + like.numel() * like.element_size()].view(like.dtype).view(like.shape)


def on_host(tensor: Tensor) -> Tensor:
    """Return the tensor on the CPU: the one it was copied from by `to_device` if there is one, without waiting."""
    if tensor.device.type == "cpu":
        return tensor
    host: Tensor | None = _HOST.get(tensor)
    return tensor.cpu() if host is None else host


def live_positions(mask: Bool[Tensor, "B T"]) -> Int[Tensor, " M"]:
    """Return the positions at which the flattened mask is true, on its device, and without waiting if it was copied."""
    if mask.device.type == "cpu":
        return mask.flatten().nonzero().squeeze(1)
    positions: Tensor | None = _POSITIONS.get(mask)
    if positions is None:
        (positions,) = to_device([on_host(mask).flatten().nonzero().squeeze(1)], mask.device)
        _POSITIONS[mask] = positions
    return positions


def select_live(values: Tensor, mask: Bool[Tensor, "B T"]) -> Tensor:
    """Return the entries of `values` [B, T, ...] where the mask is true, in order: values[mask]."""
    if mask.device.type == "cpu":
        return values[mask]
    return values.flatten(0, 1).index_select(0, live_positions(mask))


def place_live(values: Tensor, mask: Bool[Tensor, "B T"]) -> Tensor:
    """Undo `select_live`: return [B, T, ...] with `values` [M, ...] where the mask is true, and zero elsewhere."""
    shape = *mask.shape, *values.shape[1:]
    if mask.device.type == "cpu":
        return values.new_zeros(shape).masked_scatter(mask.view(*mask.shape, *[1] * (values.dim() - 1)), values)
    flat = values.new_zeros(mask.numel(), *values.shape[1:])
    return flat.index_copy(0, live_positions(mask), values).view(shape)


def read_numbers(numbers: Sequence[Number]) -> list[float]:
    """Return the numbers as Python's, with a single wait for all that are on a device."""
    pending = [number.detach().double() for number in numbers if isinstance(number, Tensor)]
    values = iter(torch.stack(pending).tolist() if pending else ())
    return [next(values) if isinstance(number, Tensor) else number for number in numbers]
