"""Linear layers for few rows: weights packed once by oneDNN and the following operation fused, where the CPU can."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

Product = Callable[[Tensor], Tensor]


class Linear:
    """Computes x W^T + b, where W stacks the rows of several weights; it holds copies of them."""

    def __init__(
        self, weights: Sequence[Tensor], biases: Sequence[Tensor | None], *, rows: int, low: torch.dtype | None = None
    ) -> None:
        """Pack the weights for an x of `rows` rows; `low` is the dtype of the product where it is not the weights'."""
        weight = torch.cat(list(weights)) if len(weights) > 1 else weights[0]
        self.bias: Tensor | None = None
        if any(bias is not None for bias in biases):
            pairs = zip(weights, biases, strict=True)
            self.bias = torch.cat([w.new_zeros(len(w)) if b is None else b for w, b in pairs])
        if low is not None:
            weight, self.bias = weight.to(low), None if self.bias is None else self.bias.to(low)
        self.dtype = weight.dtype
        self.packed = packs(weight)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), rows) if self.packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        """Compute x W^T + b."""
        if not self.packed:
            return functional.linear(x.to(self.dtype), self.weight, self.bias)
        output: Tensor = torch.ops.mkldnn._linear_pointwise(x.to(self.dtype), self.weight, self.bias, "none", [], "")
        return output

    def silu(self, x: Tensor) -> Tensor:
        """Compute silu(x W^T + b)."""
        if not self.packed:
            return functional.silu(self(x))
        output: Tensor = torch.ops.mkldnn._linear_pointwise(x.to(self.dtype), self.weight, self.bias, "swish", [], "")
        return output

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        """Compute (x W^T + b) * other."""
        return self._fused_binary(x, other, "mul") if self._can_fuse(other) else self(x) * other

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """Compute x W^T + b + other."""
        return self._fused_binary(x, other, "add") if self._can_fuse(other) else self(x) + other

    def _can_fuse(self, other: Tensor) -> bool:
        return self.packed and other.dtype == self.dtype

    def _fused_binary(self, x: Tensor, other: Tensor, operation: str) -> Tensor:
        fused = torch.ops.mkldnn._linear_pointwise.binary
        output: Tensor = fused(x.to(self.dtype), other, self.weight, self.bias, operation)
        return output


def packs(weight: Tensor) -> bool:
    """Check whether oneDNN can pack this weight, by the operators that torch.compile uses for frozen weights."""
    return (
        weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.bfloat16)
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )
