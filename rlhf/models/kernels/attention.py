"""Attention over rows without padding: in rectangles of rows, or in one call of a kernel for rows of any length.

The kernel runs on a CUDA GPU in 16 bits: no rectangles, no mask, no key for every head. A row is then a run of queries
and a run of keys, both end to end with the runs of the other rows; query i of n sees all but the last n - 1 - i keys of
its run. Whole rows are such runs as they are laid out. Of a prompt that is shared each completion's keys are the
prompt's and then its own, so that only keys and values are copied.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers.integrations.sdpa_attention import repeat_kv

from rlhf.models.kernels.cast import HALF_DTYPES
from rlhf.models.kernels.quantized import compute_dtype

MATMUL_ATTENTION_MAX_KEYS = (
    256  # keys up to which 16-bit attention on a CPU is computed by plain products: benchmarks/NOTES.md
)
CAUSAL = (-1, 0)  # a window to the left without end, and none to the right of the diagonal that ends in the last key


@dataclass(frozen=True)
class VarlenLayout:
    """The runs of queries and keys of packed rows."""

    query_bounds: Int[Tensor, " E"]  # int32: where each run of queries begins, and the end of the last
    key_bounds: Int[Tensor, " E"]
    keys: Int[Tensor, " K"] | None  # the token of each key; None if keys are the tokens as they are
    longest_queries: int
    longest_keys: int


def whole_runs(lengths: Sequence[int]) -> VarlenLayout:
    """Lay out whole rows of these lengths."""
    bounds = _bounds(lengths)
    return VarlenLayout(bounds, bounds.clone(), None, max(lengths), max(lengths))


def shared_runs(prompts: Sequence[int], completions: Sequence[int], prompt_of: Sequence[int]) -> VarlenLayout:
    """Lay out prompts of these lengths and, behind them, completions; `prompt_of` names the prompt of each.

    A completion without tokens asks nothing and has no run.
    """
    starts = _bounds([*prompts, *completions]).tolist()
    own = [
        (prompt, first, count)
        for prompt, first, count in zip(prompt_of, starts[len(prompts) :], completions, strict=False)
        if count
    ]
    keys = [torch.arange(sum(prompts))] + [
        run
        for prompt, first, count in own
        for run in (
            torch.arange(starts[prompt], starts[prompt + 1]),
            torch.arange(first, first + count),
        )
    ]
    queries = [*prompts, *(count for _, _, count in own)]
    seen = [*prompts, *(prompts[prompt] + count for prompt, _, count in own)]
    return VarlenLayout(_bounds(queries), _bounds(seen), torch.cat(keys), max(queries), max(seen))


def _bounds(lengths: Sequence[int]) -> Int[Tensor, " E"]:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def varlen_attention(
    query: Float[Tensor, "N H d"],
    key: Float[Tensor, "N G d"],
    value: Float[Tensor, "N G d"],
    layout: VarlenLayout,
    *,
    scale: float | None,
) -> Float[Tensor, "N H d"]:
    """Compute softmax(scale q K^T) V for each query over the keys that it sees; H is a multiple of G."""
    if layout.keys is not None:
        key, value = (_gather(states, layout.keys) for states in (key, value))
    kernel = _kernel().varlen_attn
    attended: Tensor = kernel(
        query,
        key,
        value,
        layout.query_bounds,
        layout.key_bounds,
        layout.longest_queries,
        layout.longest_keys,
        scale=scale,
        window_size=CAUSAL,
        **({"enable_gqa": query.shape[1] != key.shape[1]} if _is_told_of_groups(kernel) else {}),
    )
    return attended


@cache
def _kernel() -> Any:
    """Import torch's kernel, which takes seconds, when it is used."""
    return importlib.import_module("torch.nn.attention.varlen")


@cache
def _is_told_of_groups(kernel: Callable[..., Any]) -> bool:
    """Return whether the kernel wants to know that several heads share a key; torch 2.11's reads it off the shapes."""
    return "enable_gqa" in inspect.signature(kernel).parameters


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, index: Tensor) -> Tensor:
        """Return tokens[index]."""
        ctx.save_for_backward(index)
        ctx.shape = tokens.shape
        return tokens.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Sum the gradients of each token's copies, in float32 at least: a prompt may have hundreds."""
        (index,) = ctx.saved_tensors
        wide = torch.promote_types(gradient.dtype, torch.float32)
        total = gradient.new_zeros(ctx.shape, dtype=wide).index_add_(0, index, gradient.to(wide))
        return total.to(gradient.dtype), None


def _gather(tokens: Float[Tensor, "N G d"], index: Int[Tensor, " K"]) -> Float[Tensor, "K G d"]:
    gathered: Tensor = _Gather.apply(tokens, index)  # type: ignore[no-untyped-call]
    return gathered


@dataclass(frozen=True)
class RectangleIndex:
    """The correspondence between tokens laid end to end and their places in a rectangle of rows."""

    start: int  # the first of these tokens, among all
    count: int
    grid: Int[Tensor, " RW"]  # the token at each place, row by row; an arbitrary one at dead places
    back: Int[Tensor, " K"]  # the place of each token
    shape: tuple[int, int]  # R, W


@dataclass(frozen=True)
class RectangleLayout:
    """The rectangles of packed rows: whole rows, or prompts and completions."""

    first: RectangleIndex  # whole rows; prompts, if they are shared
    second: RectangleIndex | None  # completions, if prompts are shared
    prompt_of: Int[Tensor, " B"]  # the prompt of each completion
    mask: Bool[Tensor, "B 1 T PT"] | None  # which keys (the prompt's, then its own) a completion token sees

    @property
    def places(self) -> list[RectangleIndex]:
        """Return the rectangles in the order of their tokens."""
        return [self.first] if self.second is None else [self.first, self.second]


PackedLayout = RectangleLayout | VarlenLayout


@dataclass(frozen=True)
class PackedBatch:
    """The tokens of a batch end to end: whole rows, or all distinct prompts and then all completions."""

    input_ids: Int[Tensor, "1 N"]
    position_ids: Int[Tensor, "1 N"]
    predictor_index: Int[Tensor, " M"]  # the token before each live completion token, in the order of completion_mask
    last: Int[Tensor, " B"]  # the last live token of each row
    longest: int  # tokens of the longest prompt with its completion
    layout: PackedLayout  # for attention

    @property
    def places(self) -> list[RectangleIndex]:
        """Return the rectangles that attention is computed in; none if it takes the tokens as they are."""
        return [] if isinstance(self.layout, VarlenLayout) else self.layout.places


class _ToRectangle(torch.autograd.Function):
    """Tokens to places. A dead place holds an arbitrary token, which no live one sees and whose output nobody reads."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, grid: Tensor, back: Tensor) -> Tensor:
        """Return tokens[grid]."""
        ctx.save_for_backward(back)
        return tokens.index_select(0, grid)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Read each token's gradient at its only live place: no sum is needed."""
        (back,) = ctx.saved_tensors
        return gradient.index_select(0, back), None, None


class _FromRectangle(torch.autograd.Function):
    """Places back to tokens, end to end."""

    @staticmethod
    def forward(ctx: Any, places: Tensor, back: Tensor) -> Tensor:
        """Return places[back]."""
        ctx.save_for_backward(back)
        ctx.shape = places.shape
        return places.index_select(0, back)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the gradient at each place; zero at dead ones."""
        (back,) = ctx.saved_tensors
        return gradient.new_zeros(ctx.shape).index_copy_(0, back, gradient), None


def _to_rectangle(states: Float[Tensor, "1 H N d"], places: RectangleIndex) -> Float[Tensor, "R H W d"]:
    tokens = states[0].transpose(0, 1)[places.start : places.start + places.count]
    flat: Tensor = _ToRectangle.apply(tokens, places.grid, places.back)  # type: ignore[no-untyped-call]
    return flat.view(*places.shape, *flat.shape[1:]).transpose(1, 2)


def _from_rectangle(states: Float[Tensor, "R H W d"], places: RectangleIndex) -> Float[Tensor, "K H d"]:
    flat = states.transpose(1, 2).flatten(0, 1)
    tokens: Tensor = _FromRectangle.apply(flat, places.back)  # type: ignore[no-untyped-call]
    return tokens


def packed_attention(
    query: Float[Tensor, "1 H N d"],
    key: Float[Tensor, "1 K N d"],
    value: Float[Tensor, "1 K N e"],
    *,
    rows: PackedBatch,
    scale: float | None,
) -> Float[Tensor, "1 N H e"]:
    """Compute causal attention within each row; values may be narrower than keys (latent attention).

    Raises:
        RuntimeError: the rows were laid out for a kernel in 16 bits, and these are not.
    """
    layout = rows.layout
    if isinstance(layout, VarlenLayout):
        low = compute_dtype(query)
        if low not in HALF_DTYPES:
            raise RuntimeError(f"rows laid out for attention in 16 bits met {low}: enter autocast before packing them")
        width = value.shape[-1]
        value = pad(value, (0, key.shape[-1] - width))  # the kernel wants one width
        query, key, value = (states[0].transpose(0, 1).to(low) for states in (query, key, value))
        return varlen_attention(query, key, value, layout, scale=scale)[None, ..., :width]
    first = [_to_rectangle(states, layout.first) for states in (query, key, value)]
    second = (
        [_to_rectangle(states, layout.second) for states in (query, key, value)] if layout.second is not None else []
    )
    attended = rectangle_attention(layout, first, second, scale=scale)
    tokens = [_from_rectangle(states, where) for states, where in zip(attended, layout.places, strict=True)]
    return torch.cat(tokens)[None]


def attend(rows: PackedBatch, states: Sequence[Tensor], *, scale: float | None) -> list[Tensor]:
    """Compute causal attention within each row, of states that are already in their places.

    `states` are query, key and value, [places or tokens, heads, d]: of each rectangle, row by row, or of the tokens as
    they are. So is the result.
    """
    if isinstance(rows.layout, VarlenLayout):
        query, key, value = states
        return [varlen_attention(query, key, value, rows.layout, scale=scale)]
    places = rows.layout.places
    heads = [
        tokens.view(*places[number // 3].shape, *tokens.shape[1:]).transpose(1, 2)
        for number, tokens in enumerate(states)
    ]
    attended = rectangle_attention(rows.layout, heads[:3], heads[3:], scale=scale)
    return [rectangle.transpose(1, 2).flatten(0, 1) for rectangle in attended]


def rectangle_attention(
    layout: RectangleLayout, first: Sequence[Tensor], second: Sequence[Tensor], *, scale: float | None
) -> list[Float[Tensor, "R H W d"]]:
    """Compute attention in rectangles of query, key and value: whole rows, or prompts and (`second`) completions."""
    groups = first[0].shape[1] // first[1].shape[1]
    attended = [_attention(*first, groups=groups, mask=None, scale=scale)]
    if second:
        keys, values = (
            torch.cat([prompts.index_select(0, layout.prompt_of), completions], dim=2)
            for prompts, completions in zip(first[1:], second[1:], strict=True)
        )
        attended.append(_attention(second[0], keys, values, groups=groups, mask=layout.mask, scale=scale))
    return attended


def _attention(
    query: Tensor, key: Tensor, value: Tensor, *, groups: int, mask: Tensor | None, scale: float | None
) -> Tensor:
    """Compute attention of each head over its group's keys, causal or as `mask` says."""
    on_cpu = query.device.type == "cpu"
    if on_cpu and query.dtype in HALF_DTYPES and key.shape[2] <= MATMUL_ATTENTION_MAX_KEYS:
        return _attention_by_products(query, key, value, groups=groups, mask=mask, scale=scale)
    flash = not on_cpu and mask is None and query.dtype in HALF_DTYPES  # flash attention reads grouped keys
    if not on_cpu and not flash:  # with a mask or in float32, GPU kernels need a key for every head
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    attended: Tensor = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=(on_cpu or flash) and groups > 1,
    )
    return attended


def _attention_by_products(
    query: Float[Tensor, "R H W d"],
    key: Float[Tensor, "R K P d"],
    value: Float[Tensor, "R K P e"],
    *,
    groups: int,
    mask: Bool[Tensor, "R 1 W P"] | None,
    scale: float | None,
) -> Float[Tensor, "R H W e"]:
    """Compute attention by two batched products, with the heads of a group as rows of one matrix.

    softmax(scale Q K^T) V, for short rows in 16 bits on a CPU, where the backward pass of torch's own kernel takes
    three times as long.
    """
    rows, heads, width, dim = query.shape
    scaled = (query * (dim**-0.5 if scale is None else scale)).reshape(rows, heads // groups, groups * width, dim)
    scores = torch.matmul(scaled, key.transpose(2, 3)).view(rows, heads // groups, groups, width, -1)
    visible = mask[:, :, None] if mask is not None else _causal(width, query.device)
    weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1).view(rows, heads // groups, groups * width, -1)
    return torch.matmul(weights, value).view(rows, heads, width, value.shape[-1])


def _causal(width: int, device: torch.device) -> Bool[Tensor, "W W"]:
    return torch.ones(width, width, dtype=torch.bool, device=device).tril()
