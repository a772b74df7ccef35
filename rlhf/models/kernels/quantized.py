"""Frozen linear layers in 4 or 8 bits: the codes and scales of a weight, and its numbers again, one matrix at a time.

nf4 (Dettmers et al. 2023, QLoRA) is bitsandbytes' format with quantized scales: blocks of 64 weights share a scale, the
scales of 256 blocks are 8-bit numbers themselves. It takes 4 + 8/64 + 32/(64·256) = 4.127 bits per weight. int8 has a
scale per output of the layer.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rlhf.errors import ConfigError, install_hint

NF4_BLOCK = 64  # weights that share a scale
NF4_SCALE_BLOCK = 256  # scales that share a scale


_SHAPES_ALONE: ContextVar[bool] = ContextVar("shapes_alone", default=False)


@contextmanager
def shapes_alone() -> Iterator[None]:
    """Let the weights of quantized layers be zeros that take no memory and no time.

    peft asks for a weight some ten times while it adds an adapter, for its shape, dtype and device.
    """
    token = _SHAPES_ALONE.set(True)
    try:
        yield
    finally:
        _SHAPES_ALONE.reset(token)


class QuantizedLinear(nn.Linear):
    """A frozen linear layer that holds codes instead of its weight; `weight` computes the numbers at each access.

    It is an nn.Linear so that peft puts adapters on it. Its state dict has the codes.
    """

    def __init__(self, linear: nn.Linear, device: torch.device | None = None) -> None:
        """Compute the codes of the weight of `linear` on `device`, where they stay; its bias stays as it is."""
        nn.Module.__init__(self)  # nn.Linear's own would allocate a weight
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_parameter("bias", linear.bias)
        self._quantize(linear.weight.detach().to(device))

    @abstractmethod
    def _quantize(self, weight: Float[Tensor, "E D"]) -> None:
        """Register the codes and scales as buffers."""

    @abstractmethod
    def _numbers(self) -> Float[Tensor, "E D"]:
        """Compute the numbers that the codes stand for, in float32."""

    def dense(self, dtype: torch.dtype = torch.float32) -> Float[Tensor, "E D"]:
        """Compute the weight: float32 numbers, rounded to `dtype`."""
        with torch.no_grad():
            return self._numbers().to(dtype)

    @property
    def weight(self) -> Float[Tensor, "E D"]:  # type: ignore[override]
        """Compute the weight in float32; a caller that keeps it keeps its memory."""
        if _SHAPES_ALONE.get():
            codes: Any = self.codes
            zeros: Tensor = codes.new_zeros((), dtype=torch.float32).expand(self.out_features, self.in_features)
            return zeros
        return self.dense()

    def as_linear(self) -> nn.Linear:
        """Return an ordinary layer with the same numbers in float32."""
        linear = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, device="meta")
        linear.weight = nn.Parameter(self.dense(), requires_grad=False)
        linear.bias = self.bias
        return linear

    def forward(self, input: Float[Tensor, "*shape D"]) -> Float[Tensor, "*shape E"]:
        """Compute x W^T + b; neither pass keeps the numbers of W."""
        return frozen_product(input, self.dense, self.bias)


class Nf4Linear(QuantizedLinear):
    """Weights in 4 bits: codes of a normal distribution's quantiles times a scale per block (bitsandbytes)."""

    def _quantize(self, weight: Float[Tensor, "E D"]) -> None:
        codes, state = _functional().quantize_4bit(
            weight.float().contiguous(), blocksize=NF4_BLOCK, compress_statistics=True, quant_type="nf4"
        )
        scales = state.state2
        self.register_buffer("codes", codes)
        self.register_buffer("scale_codes", state.absmax)
        self.register_buffer("scale_mean", state.offset)
        self.register_buffer("scale_scales", scales.absmax)
        self.register_buffer("levels", state.code)
        self.register_buffer("scale_levels", scales.code)

    def _numbers(self) -> Float[Tensor, "E D"]:
        functional = _functional()
        buffers: Any = self
        scales = functional.QuantState(
            absmax=buffers.scale_scales, code=buffers.scale_levels, blocksize=NF4_SCALE_BLOCK, dtype=torch.float32
        )
        state = functional.QuantState(
            absmax=buffers.scale_codes,
            shape=torch.Size((self.out_features, self.in_features)),
            dtype=torch.float32,
            blocksize=NF4_BLOCK,
            code=buffers.levels,
            quant_type="nf4",
            offset=buffers.scale_mean,
            state2=scales,
        )
        numbers: Tensor = functional.dequantize_4bit(buffers.codes, state)
        return numbers


class Int8Linear(QuantizedLinear):
    """Weights in 8 bits: w = c s with c in -127 to 127 and a scale s for each output."""

    def _quantize(self, weight: Float[Tensor, "E D"]) -> None:
        numbers = weight.float()
        scales = numbers.abs().amax(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / 127
        self.register_buffer("codes", (numbers / scales).round_().to(torch.int8))
        self.register_buffer("scales", scales)

    def _numbers(self) -> Float[Tensor, "E D"]:
        buffers: Any = self
        numbers: Tensor = buffers.codes.float().mul_(buffers.scales)
        return numbers


KINDS: dict[str, type[QuantizedLinear]] = {"nf4": Nf4Linear, "int8": Int8Linear}


def is_linear(module: object) -> bool:
    """Return whether the module is a linear layer as torch has it, or a quantized one, and no other subclass."""
    return type(module) is nn.Linear or isinstance(module, QuantizedLinear)


def frozen_product(
    x: Float[Tensor, "*shape D"], dense: Callable[[torch.dtype], Tensor], bias: Tensor | None
) -> Float[Tensor, "*shape E"]:
    """Compute x W^T + b, W = dense(dtype) of a frozen weight, which is computed again in the backward pass."""
    dtype = compute_dtype(x)
    product: Tensor = _FrozenProduct.apply(x.to(dtype), dense)  # type: ignore[no-untyped-call]
    return product if bias is None else product + bias.to(dtype)


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of matrix products with x: autocast's if it is on, or its own."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


class _FrozenProduct(torch.autograd.Function):
    """y = x W^T and dx = dy W, without keeping W for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dense: Callable[[torch.dtype], Tensor]) -> Tensor:
        ctx.dense = dense
        with torch.autocast(x.device.type, enabled=False):
            return x @ dense(x.dtype).t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.dense(gradient.dtype), None


def _functional() -> Any:
    """Import what quantizes to 4 bits.

    Raises:
        ConfigError: bitsandbytes is not installed.
    """
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # names kernels that nothing here uses
    try:
        from bitsandbytes import functional
    except ImportError as error:
        raise ConfigError(
            f"weights=nf4 needs bitsandbytes, which is not installed: {install_hint('eightbit')}, or set weights=int8"
        ) from error
    return functional
