"""Matrix products in 16 bits: each weight cast once per optimizer step and, on a CPU, few distinct shapes.

Frozen matrices that are stored in 16 bits or fewer to save memory are widened for each product instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from rlhf.models.kernels.quantized import QuantizedLinear

ROW_MULTIPLE = 64
HALF_DTYPES = (torch.bfloat16, torch.float16)


def pad_rows_for_onednn(x: Float[Tensor, "N D"], dtype: torch.dtype) -> Float[Tensor, "M D"]:
    """Convert `x` to `dtype`; for 16 bits on a CPU, append rows of zeros up to a multiple of 64.

    oneDNN compiles and caches a kernel for each shape of a 16-bit product, which takes about as long as the product
    itself, and a batch without padding has another shape in every pass. The caller cuts off the results of the
    appended rows; in a sum over rows they add nothing.
    """
    missing = -len(x) % ROW_MULTIPLE if x.device.type == "cpu" and dtype in HALF_DTYPES else 0
    if not missing:
        return x.to(dtype)
    padded = x.new_empty(len(x) + missing, x.shape[1], dtype=dtype)
    padded[: len(x)] = x
    padded[len(x) :] = 0
    return padded


# Memory of a weight -> the weight, its version, its 16-bit copy. Not by object: each pass views fused weights again.
_CASTS: dict[tuple[int, torch.Size, tuple[int, ...]], tuple[Tensor, int, Tensor]] | None = None


@contextmanager
def weights_cast_once() -> Iterator[None]:
    """Keep the copies that `cast_weight` makes until the outermost of these contexts ends.

    Enter it around passes between which no weight changes: the micro-batches of one optimizer step or of a rollout. A
    copy is made again if the version of its weight has risen, and after the step of any optimizer of torch, because
    fused ones do not raise it.
    """
    global _CASTS  # not a ContextVar: backward passes may run in a thread of autograd's
    if _CASTS is not None:
        yield
        return
    _CASTS = {}
    hook = register_optimizer_step_post_hook(_forget_casts)
    try:
        yield
    finally:
        _CASTS = None
        hook.remove()


def _forget_casts(*_: object) -> None:
    """Drop the copies of weights that an optimizer may have changed."""
    casts = _CASTS
    if casts is not None:
        casts.clear()


def cast_weight(weight: Tensor | QuantizedLinear, dtype: torch.dtype) -> Tensor:
    """Return `weight` in `dtype`: unchanged if it has it, else the copy that `weights_cast_once` keeps.

    A weight that ZeRO-3 has gathered is cast each time, as is one that is stored in 16 bits and computes in more: to
    keep its copy would undo the sharding, or the saving.
    """
    if isinstance(weight, QuantizedLinear):  # the layer stands for its weight, whose numbers nobody keeps
        return weight.dense(dtype)
    if weight.dtype == dtype:
        return weight
    casts = _CASTS  # read once: a sampler in another thread may open and close the context meanwhile
    if casts is None or hasattr(weight, "ds_id") or weight.dtype in HALF_DTYPES:
        return weight.to(dtype)
    key = weight.data_ptr(), weight.shape, weight.stride()
    cached = casts.get(key)
    if cached is None or cached[1] != weight._version or cached[2].dtype != dtype:
        alias = weight.detach()  # keeps the memory alive, so that no other weight gets the same address
        cached = alias, weight._version, alias.to(dtype)
        casts[key] = cached
    return cached[2]
