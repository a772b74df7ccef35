"""The computations of a layer between its matrix products, forward and backward: norms, rotations and gates.

Each takes as few passes over memory as torch's own operators allow.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from rlhf.models.kernels.cast import pad_rows_for_onednn

Weight = Tensor | None


class Activation(NamedTuple):
    """A function of the gate, and its backward: (gradient of the value, gate) to gradient of the gate."""

    of: Callable[[Tensor], Tensor]
    back: Callable[[Tensor, Tensor], Tensor]


ACTIVATIONS = {  # by their names in model configurations
    "silu": Activation(functional.silu, torch.ops.aten.silu_backward),
    "gelu_pytorch_tanh": Activation(
        partial(functional.gelu, approximate="tanh"), partial(torch.ops.aten.gelu_backward, approximate="tanh")
    ),
}


def normalize(
    x: Float[Tensor, "N D"], weight: Float[Tensor, " D"], eps: float, dtype: torch.dtype
) -> tuple[Float[Tensor, "M D"], Float[Tensor, "N 1"]]:
    """Compute the norm w x / rms in `dtype`, with rows of padding if those help, and 1 / rms.

    rms = sqrt(mean(x²) + eps).
    """
    inverse = _inverse_rms(x, eps)
    return pad_rows_for_onednn((x * inverse).mul_(weight), dtype), inverse


def renormalize(
    x: Float[Tensor, "N D"], inverse: Float[Tensor, "N 1"], weight: Float[Tensor, " D"], dtype: torch.dtype
) -> tuple[Float[Tensor, "N D"], Float[Tensor, "M D"]]:
    """Compute x / rms, and the norm w x / rms in `dtype`, from the 1 / rms that the forward pass kept."""
    scaled = x * inverse
    return scaled, pad_rows_for_onednn(scaled * weight, dtype)


def norm_backward(
    gradient: Float[Tensor, "N D"],
    scaled: Float[Tensor, "N D"],
    weight: Float[Tensor, " D"],
    inverse: Float[Tensor, "N 1"],
    d_skip: Weight,
    needs_grad: bool,
) -> tuple[Float[Tensor, "N D"], Weight]:
    """Compute the gradients of a norm's input and, with `needs_grad`, of its weight.

    With n = x / rms,  dx = (dy w - n mean(dy w n)) / rms,  dw = sum(dy n). `d_skip`, the gradient that reaches x past
    the norm, is added to dx.
    """
    product = gradient * scaled
    d_weight = product.sum(dim=0) if needs_grad else None
    mean = (product @ weight).div_(-scaled.shape[-1])[..., None]
    d_x = torch.mul(gradient, weight, out=product).addcmul_(scaled, mean)
    return (d_x.mul_(inverse) if d_skip is None else torch.addcmul(d_skip, d_x, inverse, out=d_x)), d_weight


def rope(
    heads: Float[Tensor, "N H d"], cos: Float[Tensor, "N 1 E"], sin: Float[Tensor, "N 1 E"], dtype: torch.dtype
) -> Float[Tensor, "N H d"]:
    """Rotate heads to their positions, at least in the precision of the angles, and return them in `dtype`."""
    return rotate(heads, cos, sin).to(dtype)


def rope_backward(
    gradient: Float[Tensor, "N H d"], cos: Float[Tensor, "N 1 E"], sin: Float[Tensor, "N 1 E"], dtype: torch.dtype
) -> Float[Tensor, "M Hd"]:
    """Rotate the gradients of heads back, and return them as rows of a product in `dtype`."""
    return pad_rows_for_onednn(rotate(gradient, cos, sin, back=True).flatten(1), dtype)


def gate(gates: Float[Tensor, "N E"], ups: Float[Tensor, "N E"], activation: str) -> Float[Tensor, "N E"]:
    """Compute a(g) u; `activation` is a key of `ACTIVATIONS`."""
    return ACTIVATIONS[activation].of(gates).mul_(ups)


def gate_backward(
    gradient: Float[Tensor, "N E"],
    gates: Float[Tensor, "N E"],
    ups: Float[Tensor, "N E"],
    activation: str,
    needs_value: bool,
) -> tuple[Weight, Float[Tensor, "N E"], Float[Tensor, "N E"]]:
    """Compute h = a(g) u again, if it is needed, and the gradients dg = dh u a'(g) and du = dh a(g).

    The memory of `gradient` is used up.
    """
    activated = ACTIVATIONS[activation].of(gates)
    value = activated * ups if needs_value else None
    d_ups = activated.mul_(gradient)
    return value, ACTIVATIONS[activation].back(gradient.mul_(ups), gates), d_ups


def rotate(
    heads: Float[Tensor, "N H d"],
    cos: Float[Tensor, "N 1 E"],
    sin: Float[Tensor, "N 1 E"],
    *,
    back: bool = False,
    dtype: torch.dtype | None = None,
) -> Float[Tensor, "N H d"]:
    """Apply rotary position embeddings to the first 2 E entries of every head (Su et al. 2021), or undo that (`back`).

    The two halves of these entries are the coordinates of E planes. Entries beyond them, in families that rotate only a
    part of the head, stay as they are. The result has the widest dtype of the three, unless `dtype` is given.
    """
    half, direction = cos.shape[-1], -1 if back else 1
    first, second, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
    rotated = heads.new_empty(heads.shape, dtype=dtype or torch.promote_types(heads.dtype, cos.dtype))
    torch.addcmul(first * cos, second, sin, value=-direction, out=rotated[..., :half])
    torch.addcmul(second * cos, first, sin, value=direction, out=rotated[..., half : 2 * half])
    if rest.shape[-1]:
        rotated[..., 2 * half :] = rest
    return rotated


def _inverse_rms(x: Float[Tensor, "*shape D"], eps: float) -> Float[Tensor, "*shape 1"]:
    """Compute the inverse RMS of x, 1 / sqrt(mean(x²) + eps)."""
    square: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
    return square.div_(x.shape[-1]).add_(eps).rsqrt_()
