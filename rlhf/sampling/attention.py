"""Attention of one new token a row: rows of one group read their prompt together, and each its own completion."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Plan:
    """Where each row's query stands in a table of `lanes` prompts x `width` rows; None: in order, with no gap."""

    lanes: int
    width: int
    cells: Tensor | None


def attend(
    query: Float[Tensor, "N H D"],
    prompt_keys: Float[Tensor, "L G P D"],
    prompt_values: Float[Tensor, "L G P Dv"],
    keys: Float[Tensor, "N G C D"],
    values: Float[Tensor, "N G C Dv"],
    bias: Float[Tensor, "N K"] | None,
    plan: Plan,
) -> Float[Tensor, "N H Dv"]:
    """softmax(q K^T + bias) V over the P columns of the row's prompt, then the C of its completion; K = P + C.

    The queries of a group are the rows of one matrix product with the prompt that they share, which is then read once
    for all of them. H is a multiple of G (grouped-query attention).
    """
    rows, heads, dim = query.shape
    groups, prompt, columns = keys.shape[1], prompt_keys.shape[2], keys.shape[2]
    each = heads // groups
    asked = query.reshape(rows, groups, each, dim)
    together = _to_lanes(asked, plan) @ prompt_keys.transpose(2, 3)  # [L, G, width x each, P]
    own = torch.bmm(asked.reshape(rows * groups, each, dim), _flat(keys).transpose(1, 2))
    scores = query.new_empty(rows, groups, each, prompt + columns)
    scores[..., :prompt] = _to_rows(together, plan, each)
    scores[..., prompt:] = own.view(rows, groups, each, columns)
    if bias is not None:
        scores += bias[:, None, None, :]
    weights = scores.softmax(dim=-1)
    shared = _to_rows(_to_lanes(weights[..., :prompt], plan) @ prompt_values, plan, each)
    found = torch.bmm(weights[..., prompt:].reshape(rows * groups, each, columns), _flat(values))
    return (found.view(rows, groups, each, -1) + shared).reshape(rows, heads, -1)


def _to_lanes(rows: Float[Tensor, "N G E X"], plan: Plan) -> Float[Tensor, "L G M X"]:
    _, groups, each, size = rows.shape
    if plan.cells is not None:
        table = rows.new_zeros(plan.lanes * plan.width, groups, each, size)
        rows = table.index_copy_(0, plan.cells, rows)
    table = rows.reshape(plan.lanes, plan.width, groups, each, size).transpose(1, 2)
    return table.reshape(plan.lanes, groups, plan.width * each, size)


def _to_rows(table: Float[Tensor, "L G M X"], plan: Plan, each: int) -> Float[Tensor, "N G E X"]:
    lanes, groups, _, size = table.shape
    rows = table.view(lanes, groups, plan.width, each, size).transpose(1, 2)
    rows = rows.reshape(lanes * plan.width, groups, each, size) if plan.cells is not None else rows.flatten(0, 1)
    return rows if plan.cells is None else rows.index_select(0, plan.cells)


def _flat(memory: Float[Tensor, "N G C X"]) -> Float[Tensor, "M C X"]:
    """Rows and heads on one axis, without copying: the columns are a slice of the ring."""
    return memory.flatten(0, 1)
