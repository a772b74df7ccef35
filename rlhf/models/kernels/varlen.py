"""Attention over rows of any length in one call of flash attention: no rectangles, no mask, no key for every head.

It runs on a CUDA GPU in 16 bits. A row is a run of queries and a run of keys, both end to end with those of the other
rows; query i of n sees all but the last n - 1 - i keys of its run. Whole rows are such runs as they are laid out. Of a
prompt that is shared each completion's keys are the prompt's and then its own, so that only keys and values are copied.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

CAUSAL = (-1, 0)  # a window to the left without end, and none to the right of the diagonal that ends in the last key


@dataclass(frozen=True)
class VarlenLayout:
    """The runs of queries and keys of packed rows."""

    query_bounds: Int[Tensor, " E"]  # int32: where each run of queries begins, and the end of the last
    key_bounds: Int[Tensor, " E"]
    keys: Int[Tensor, " K"] | None  # the token of each key; None where keys are the tokens as they are
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
    attended: Tensor = _kernel().varlen_attn(
        query,
        key,
        value,
        layout.query_bounds,
        layout.key_bounds,
        layout.longest_queries,
        layout.longest_keys,
        scale=scale,
        window_size=CAUSAL,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return attended


@cache
def _kernel() -> Any:
    """Import torch's kernel, which takes seconds, where it is used."""
    return importlib.import_module("torch.nn.attention.varlen")


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
