"""x W^T with weights laid out once for products of few rows, and what follows them fused in, where the CPU can."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

Product = Callable[[Tensor], Tensor]


class Linear:
    """x -> x W^T + b, the rows of several weights one after another; the weights are copies."""

    def __init__(
        self, weights: Sequence[Tensor], biases: Sequence[Tensor | None], *, rows: int, low: torch.dtype | None = None
    ) -> None:
        """`rows` is how many x usually has: the layout is made for it; `low` is the dtype of the product if another."""
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
        """The product."""
        if not self.packed:
            return functional.linear(x.to(self.dtype), self.weight, self.bias)
        found: Tensor = torch.ops.mkldnn._linear_pointwise(x.to(self.dtype), self.weight, self.bias, "none", [], "")
        return found

    def silu(self, x: Tensor) -> Tensor:
        """silu(x W^T + b)."""
        if not self.packed:
            return functional.silu(self(x))
        found: Tensor = torch.ops.mkldnn._linear_pointwise(x.to(self.dtype), self.weight, self.bias, "swish", [], "")
        return found

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        """(x W^T + b) * other."""
        return self._with(x, other, "mul") if self._fuses(other) else self(x) * other

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """x W^T + b + other."""
        return self._with(x, other, "add") if self._fuses(other) else self(x) + other

    def _fuses(self, other: Tensor) -> bool:
        return self.packed and other.dtype == self.dtype

    def _with(self, x: Tensor, other: Tensor, how: str) -> Tensor:
        fused = torch.ops.mkldnn._linear_pointwise.binary
        found: Tensor = fused(x.to(self.dtype), other, self.weight, self.bias, how)
        return found


def packs(weight: Tensor) -> bool:
    """Whether oneDNN can lay this weight out: what torch.compile does with frozen weights, called by itself."""
    return (
        weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.bfloat16)
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )
