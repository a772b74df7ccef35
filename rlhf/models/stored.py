"""The weights of a model in memory: in float32, in bfloat16, or quantized; and models that share their weights.

A matrix that is stored in fewer bits is widened again for every product, so that the memory of one at a time is needed.
Norms, biases and scalar heads stay in float32.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence, Set
from functools import partial
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding
from transformers.pytorch_utils import Conv1D

from rlhf.errors import ModelError
from rlhf.models.dither import spread_trained
from rlhf.models.kernels.cast import HALF_DTYPES
from rlhf.models.kernels.quantized import KINDS, QuantizedLinear, compute_dtype, frozen_product

M = TypeVar("M", bound=nn.Module)


@torch.no_grad()
def store_weights(model: M, weights: str, device: torch.device | None = None) -> M:
    """Keep the weights of `model` in the form `weights` (a value of the setting of this name) and return the model.

    float32, auto: all in float32 (float64 stays). bfloat16: the matrices of linear layers and embeddings, rounded.
    int8, nf4: linear layers are quantized; embeddings, and a head that shares its weight with one, are in bfloat16.
    The model is changed in place; adapters come after. With `device`, the one of the run, layers are quantized there,
    where their codes stay: a GPU takes seconds, one core of a CPU takes minutes.

    Raises:
        ModelError: most of its weights are in layers that can only be kept as they are.
    """
    if weights not in ("auto", "float32") and any(isinstance(part, Conv1D) for part in model.modules()):
        raise ModelError(
            f"weights={weights}: {type(model).__name__} has its weights in layers of transformers' Conv1D, "
            "which are only kept in float32: set weights=auto, or choose a model with linear layers"
        )
    if weights in KINDS:
        for name, part in list(model.named_modules()):
            quantize_layer(model, name, part, weights, device)
    rounded = _round(spread_trained(model)) if weights == "bfloat16" or weights in KINDS else set()
    _widen(model, but=rounded)  # last: a model that is loaded in 16 bits is never in float32 as a whole
    return model


def is_quantized(model: nn.Module) -> bool:
    """Return whether `store_weights` has quantized layers of the model, with adapters or without."""
    return any(isinstance(part, QuantizedLinear) for part in model.modules())


@torch.no_grad()
def quantize_layer(
    model: nn.Module, name: str, part: nn.Module, weights: str, device: torch.device | None = None
) -> None:
    """Store a module of `model` in int8 or nf4, in place, if `store_weights` quantizes such a layer."""
    if type(part) is nn.Linear and part is not _head(model) and name.rpartition(".")[2] != SCALAR_HEAD:
        _replace(model, name, KINDS[weights](part, device))


SCALAR_HEAD = "score"  # of a classifier; its scores need float32


def _head(model: nn.Module) -> nn.Module | None:
    find = getattr(model, "get_output_embeddings", None)
    head = None if find is None else find()
    return head if isinstance(head, nn.Module) else None


def _widen(model: nn.Module, *, but: Set[nn.Parameter] = frozenset()) -> None:
    for parameter in model.parameters():
        if parameter.dtype in HALF_DTYPES and parameter not in but:
            parameter.data = parameter.data.float()
    for part in model.modules():  # a model that is loaded in 16 bits has its scale rounded too
        if isinstance(part, Gemma3TextScaledWordEmbedding) and part.embed_scale.dtype in HALF_DTYPES:
            exact = torch.full_like(part.embed_scale, part.scalar_embed_scale, dtype=torch.float32)
            part.register_buffer("embed_scale", exact, persistent=False)


def _replace(model: nn.Module, name: str, new: nn.Module) -> None:
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, new)


def _round(model: nn.Module) -> set[nn.Parameter]:
    """Store the matrices of linear layers and embeddings in bfloat16, tied ones once; return these weights."""
    forwards = WIDENED | EMBEDDINGS
    stored: dict[Tensor, nn.Parameter] = {}
    for name, part in model.named_modules():
        weight = part._parameters.get("weight") if type(part) in forwards else None
        if weight is None or weight.dtype == torch.float64 or name.rpartition(".")[2] == SCALAR_HEAD:
            continue
        if weight not in stored:
            stored[weight] = nn.Parameter(weight.to(torch.bfloat16), requires_grad=weight.requires_grad)
        part.weight = stored[weight]  # type: ignore[assignment, unused-ignore]
        vars(part)["forward"] = partial(forwards[type(part)], part, torch.float32)
    return set(stored.values())


def make_dense(model: M) -> M:
    """Turn quantized and 16-bit layers into ordinary ones in float32, in place, and return the model."""
    for name, part in list(model.named_modules()):
        if isinstance(part, QuantizedLinear):
            _replace(model, name, part.as_linear())
        elif "forward" in vars(part) and type(part) in WIDENED | EMBEDDINGS:
            del vars(part)["forward"]
    _widen(model)
    return model


def twin(model: M) -> M:
    """Copy a model's modules but not its weights: both have the same tensors, and each can get adapters of its own."""
    shared = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})


@torch.no_grad()
def round_matrices(body: nn.Module) -> int:
    """Convert to bfloat16 the matrices of a frozen `body` that only linear layers hold; return the bytes saved."""
    saved, holders = 0, holders_of_weights(body, (nn.Linear,))
    while holders:  # an entry at a time goes: it keeps the weight as it was
        weight, parts = holders.popitem()
        stored = weight.to(torch.bfloat16)
        _store(stored, parts)
        saved += weight.nbytes - stored.nbytes
    return saved


@torch.no_grad()
def store_exact_matrices(module: nn.Module) -> int:
    """Store in bfloat16 the matrices of linear layers and embeddings that it has exactly; return the bytes saved.

    Each is widened again for every product, so that the memory of one at a time is needed, and the product is the same.
    """
    saved, holders = 0, holders_of_weights(module, tuple(WIDENED))
    while holders:
        weight, parts = holders.popitem()
        stored = weight.to(torch.bfloat16)
        if not torch.equal(stored.to(weight.dtype), weight):
            continue
        _store(stored, parts)
        saved += weight.nbytes - stored.nbytes
        for part in parts:  # not a subclass: the families know plain layers
            vars(part)["forward"] = partial(WIDENED[type(part)], part, weight.dtype)
    return saved


def holders_of_weights(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> dict[Tensor, list[nn.Module]]:
    """Find the weights of a frozen module that only layers of these kinds hold, with those layers."""
    others = [part for part in module.modules() if type(part) not in kinds]
    elsewhere = {weight for part in others for weight in part._parameters.values()}
    holders: dict[Tensor, list[nn.Module]] = {}
    for part in module.modules():
        weight = part._parameters.get("weight") if type(part) in kinds else None
        if weight is not None and weight.dtype not in HALF_DTYPES and weight not in elsewhere:
            assert not weight.requires_grad, "a weight that is trained keeps its float32"
            holders.setdefault(weight, []).append(part)
    return holders


def _store(weight: Tensor, parts: Sequence[nn.Module]) -> None:
    parameter = nn.Parameter(weight, requires_grad=False)
    for part in parts:
        part.weight = parameter


def _widened_product(part: nn.Linear, dtype: torch.dtype, x: Float[Tensor, "*shape D"]) -> Float[Tensor, "*shape E"]:
    """Compute a linear layer whose weight is stored in fewer bits than x has; `dtype` was the weight's."""
    del dtype
    if x.requires_grad and not part.weight.requires_grad:
        return frozen_product(x, part.weight.to, part.bias)
    return functional.linear(x, part.weight.to(compute_dtype(x)), part.bias)


def _widened_rows(part: nn.Embedding, dtype: torch.dtype, ids: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape D"]:
    """Read rows that are stored in fewer bits than `dtype`, which the weight had."""
    return functional.embedding(ids, part.weight).to(dtype)


def _scaled_rows(part: Any, dtype: torch.dtype, ids: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape D"]:
    """Read Gemma's embeddings, which are scaled."""
    rows: Tensor = _widened_rows(part, dtype, ids) * part.embed_scale.to(dtype)
    return rows


WIDENED: dict[type[nn.Module], Callable[..., Tensor]] = {nn.Linear: _widened_product, nn.Embedding: _widened_rows}
EMBEDDINGS: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Embedding: _widened_rows,
    Gemma3TextScaledWordEmbedding: _scaled_rows,
}
