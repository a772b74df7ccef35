"""Batches: rows picked, split, grouped by size, concatenated, and moved to a device without a wait.

Axes: B rows, P prompt tokens (left-padded), T completion tokens (right-padded).

A GPU works through a queue; a host that waits for it (to read a number, or while pageable memory is copied) lets the
queue run dry. So a micro-batch goes over in one pinned, non-blocking copy, its layout is computed from the tensors that
are still on the host, and numbers are read together, once an optimizer step. On a CPU all of this does nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

B = TypeVar("B", bound="Batch")

NO_FLOAT64 = frozenset({"mps"})  # the types of devices whose tensors cannot be float64


def widest_dtype(device: torch.device) -> torch.dtype:
    """Return the widest floating-point type of a device: float64, or float32 if it has no float64."""
    return torch.float32 if device.type in NO_FLOAT64 else torch.float64


def widen(values: Tensor) -> Tensor:
    """Convert to the widest type of the tensor's device: float64, for sums and differences that have to be exact."""
    return values.to(widest_dtype(values.device))


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A batch: every tensor field shares dimension 0; tuples have one entry per row; other fields hold for all rows."""

    def __len__(self) -> int:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor | tuple):
                return len(value)
        raise TypeError(f"{type(self).__name__} has no per-row field")

    def rows(self: B, index: Tensor | slice) -> B:
        """Return the rows selected by `index` (integers or a slice), in that order."""
        assert isinstance(index, slice) or index.dtype == torch.long, "rows are named by integers, not by a mask"
        picked: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                picked[field.name] = value[index]
            elif isinstance(value, tuple):
                positions = range(len(value))[index] if isinstance(index, slice) else index.tolist()
                picked[field.name] = tuple(value[i] for i in positions)
        return replace(self, **picked)

    def split(self: B, size: int, order: Tensor | None = None) -> Iterator[B]:
        """Yield consecutive parts of at most `size` rows, reordering the rows by `order` first if it is given."""
        order = torch.arange(len(self)) if order is None else order
        for start in range(0, len(order), size):
            yield self.rows(order[start : start + size])

    def live_tokens(self) -> Int[Tensor, " B"]:
        """Count the live tokens of each row, prompt and completions; the prompt of a pair counts once."""
        masks = [getattr(self, f.name) for f in fields(self) if f.name.endswith("_mask") and f.name != "loss_mask"]
        counts = torch.stack([mask.sum(dim=1) for mask in masks])
        return counts.sum(dim=0)

    def to(self: B, device: torch.device | str) -> B:
        """Return the batch with its tensors on `device`; float64 becomes float32 if the device has no float64.

        To a GPU all of them go in one copy that does not wait; see rlhf.batching.
        """
        device = torch.device(device)
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors = {name: _narrowed(value, device) for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, **dict(zip(tensors, to_device(list(tensors.values()), device), strict=True)))


def _narrowed(values: Tensor, device: torch.device) -> Tensor:
    """Convert float64 to the widest type of the device."""
    return values.to(widest_dtype(device)) if values.dtype == torch.float64 else values


def group_by_size(sizes: Int[Tensor, " B"], limit: int) -> list[Int[Tensor, " part"]]:
    """Group consecutive rows so that the sizes in a group sum to at most `limit`; a group has at least one row."""
    groups: list[Tensor] = []
    rows: list[int] = []
    filled = 0
    for row, size in enumerate(sizes.tolist()):
        if rows and filled + size > limit:
            groups.append(torch.tensor(rows))
            rows, filled = [], 0
        rows.append(row)
        filled += size
    return [*groups, torch.tensor(rows)] if rows else groups


def concat(batches: Sequence[B]) -> B:
    """Concatenate batches along dimension 0, left-padding `[B, P]` fields and right-padding `[B, T]` ones to fit."""
    first = batches[0]
    if len(batches) == 1:
        return first
    joined: dict[str, Any] = {}
    for field in fields(first):
        values = [getattr(batch, field.name) for batch in batches]
        if isinstance(values[0], tuple):
            joined[field.name] = tuple(entry for value in values for entry in value)
        elif isinstance(values[0], Tensor):
            joined[field.name] = torch.cat(_padded(values, left=field.name.startswith("prompt_")))
        else:
            assert all(value == values[0] for value in values), f"{field.name} differs between the batches: {values}"
    return replace(first, **joined)


def _padded(tensors: Sequence[Tensor], *, left: bool) -> list[Tensor]:
    if tensors[0].ndim < 2:
        return list(tensors)
    width = max(t.shape[1] for t in tensors)
    behind = (0, 0) * (tensors[0].ndim - 2)  # pads name the last dimension first
    pads = [(*behind, width - t.shape[1], 0) if left else (*behind, 0, width - t.shape[1]) for t in tensors]
    return [torch.nn.functional.pad(t, pad) for t, pad in zip(tensors, pads, strict=True)]


def extend(kind: type[B], batch: Batch, **new: Any) -> B:
    """Build a `kind` from the fields of `batch` and the `new` ones: the next stage of the pipeline."""
    return kind(**{f.name: getattr(batch, f.name) for f in fields(batch)}, **new)


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
