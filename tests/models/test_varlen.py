"""Attention over rows of any length: the rectangles' numbers, and the kernel's arguments. It is emulated on a CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import EOS, PROMPTS, completions_of, ragged, tiny
from torch import Tensor

from rlhf.models.backbone import body_of
from rlhf.models.kernels import attention
from rlhf.models.kernels.attention import (
    PackedBatch,
    VarlenLayout,
    packed_attention,
    shared_runs,
    varlen_attention,
    whole_runs,
)
from rlhf.models.kernels.llama.forward import predictor_states
from rlhf.models.kernels.packing import pack_rows
from rlhf.types import Completions

SHARED = completions_of(
    [PROMPTS[0], PROMPTS[1], PROMPTS[0], PROMPTS[0], PROMPTS[1]],
    [[3, 14, EOS], [15, 9, 2, 6, 5, EOS], [7], [10, 10, 7, EOS], [3, 14]],
)
BATCHES = {"alone": ragged(), "shared": SHARED}


def emulated(query: Tensor, key: Tensor, value: Tensor, queries: Tensor, keys: Tensor, *_: int, **more: Any) -> Tensor:
    """softmax(scale q K^T) V of each run, written out: query i of n sees all but the last n - 1 - i keys."""
    scale = query.shape[2] ** -0.5 if more["scale"] is None else more["scale"]
    groups, rows = query.shape[1] // key.shape[1], []
    for run in range(len(queries) - 1):
        asked = query[queries[run] : queries[run + 1]]
        seen, known = (x[keys[run] : keys[run + 1]].repeat_interleave(groups, dim=1) for x in (key, value))
        scores = scale * torch.einsum("qhd,khd->hqk", asked, seen)
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(len(seen) - len(asked) + 1)
        rows.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), known))
    return torch.cat(rows)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments of each call of the kernel, which is emulated."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def kernel(*args: Any, enable_gqa: bool, **kwargs: Any) -> Tensor:
        calls.append((args, {**kwargs, "enable_gqa": enable_gqa}))
        return emulated(*args, **kwargs)

    monkeypatch.setattr(attention, "_kernel", lambda: SimpleNamespace(varlen_attn=kernel))
    return calls


def packed(batch: Completions, *, runs: bool) -> PackedBatch:
    rows = pack_rows(batch.prompt_ids, batch.prompt_mask, batch.completion_ids, batch.completion_mask, varlen=runs)
    assert rows is not None
    assert isinstance(rows.layout, VarlenLayout) == runs
    return rows


def states_and_gradients(body: Any, rows: PackedBatch) -> list[Tensor]:
    body.zero_grad()
    states = predictor_states(body, rows, rows.predictor_index)
    (states * torch.linspace(-1, 1, states.numel(), dtype=states.dtype).view_as(states)).sum().backward()
    return [states.detach(), *(p.grad.clone() for p in body.parameters() if p.grad is not None)]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
@pytest.mark.parametrize("batch", BATCHES)
def test_runs_have_the_numbers_of_rectangles(family: str, batch: str, calls: list[Any]) -> None:
    body = body_of(tiny(family))
    theirs = states_and_gradients(body, packed(BATCHES[batch], runs=False))
    assert calls == []
    ours = states_and_gradients(body, packed(BATCHES[batch], runs=True))
    assert len(calls) == 2  # one a layer
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10 * max(1.0, float(other.abs().max())))


def test_the_kernel_is_given_the_tokens_as_they_are(calls: list[Any]) -> None:
    body, rows = body_of(tiny()), packed(ragged(), runs=True)
    predictor_states(body, rows, rows.predictor_index)
    (query, key, value, queries, keys, longest_queries, longest_keys), options = calls[0]
    lengths = (ragged().prompt_mask.sum(1) + ragged().completion_mask.sum(1)).tolist()
    assert query.shape == (sum(lengths), 2, 8)
    assert key.shape == value.shape == (sum(lengths), 1, 8)  # no key for every head
    assert queries.dtype == keys.dtype == torch.int32
    assert queries.diff().tolist() == keys.diff().tolist() == lengths
    assert longest_queries == longest_keys == max(lengths)
    assert options == {"scale": body.layers[0].self_attn.scaling, "window_size": (-1, 0), "enable_gqa": True}


def test_a_kernel_that_reads_groups_off_the_shapes_is_not_told_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of torch 2.11 has no such parameter."""

    def kernel(*args: Any, scale: float | None, window_size: tuple[int, int]) -> Tensor:
        return emulated(*args, scale=scale)

    monkeypatch.setattr(attention, "_kernel", lambda: SimpleNamespace(varlen_attn=kernel))
    body, rows = body_of(tiny()), packed(ragged(), runs=True)
    assert predictor_states(body, rows, rows.predictor_index).isfinite().all()


def test_a_prompt_is_copied_for_each_completion_that_has_tokens() -> None:
    runs = shared_runs([2, 1], [2, 0, 1, 1], [0, 0, 1, 0])
    assert runs.query_bounds.tolist() == [0, 2, 3, 5, 6, 7]
    assert runs.key_bounds.tolist() == [0, 2, 3, 7, 9, 12]
    assert runs.keys is not None
    assert runs.keys.tolist() == [0, 1, 2, *(0, 1, 3, 4), *(2, 5), *(0, 1, 6)]
    assert (runs.longest_queries, runs.longest_keys) == (2, 4)
    assert whole_runs([3, 1]).query_bounds.tolist() == [0, 3, 4]


def test_gradients_of_copies_are_summed_in_float32() -> None:
    """In bfloat16 a sum of ones ends at 256."""
    tokens = torch.zeros(1, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    attention._gather(tokens, torch.zeros(300, dtype=torch.long)).sum().backward()
    assert tokens.grad is not None
    assert tokens.grad.item() == 300.0


def test_runs_of_another_dtype_are_refused() -> None:
    rows, states = packed(ragged(), runs=True), torch.zeros(1, 2, 40, 8)
    with pytest.raises(RuntimeError, match=r"met torch\.float32: enter autocast before packing"):
        packed_attention(states, states, states, rows=rows, scale=None)


def test_the_scale_is_passed_on(calls: list[Any]) -> None:
    query, key = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    varlen_attention(query, key, key, whole_runs([3]), scale=0.3)
    assert (calls[0][1]["scale"], calls[0][1]["enable_gqa"]) == (0.3, False)
