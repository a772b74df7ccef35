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
    together = _scores(_to_lanes(asked, plan), _flat(prompt_keys))  # [L G, width each, P]
    own = _scores(asked.reshape(rows * groups, each, dim), _flat(keys))
    scores = query.new_empty(rows, groups, each, prompt + columns)
    if plan.cells is None:
        _in_lanes(scores, plan)[..., :prompt] = _by_rows(together, plan, groups)
    else:
        scores[..., :prompt] = _by_rows(together, plan, groups).flatten(0, 1)[plan.cells]
    scores[..., prompt:] = own.view(rows, groups, each, columns)
    if bias is not None:
        scores += bias[:, None, None, :]
    weights = scores.softmax(dim=-1)
    found = torch.bmm(weights[..., prompt:].reshape(rows * groups, each, columns), _flat(values))
    found = found.view(rows, groups, each, -1)
    shared = _by_rows(torch.bmm(_to_lanes(weights[..., :prompt], plan), _flat(prompt_values)), plan, groups)
    if plan.cells is None:
        _in_lanes(found, plan).add_(shared)
    else:
        found += shared.flatten(0, 1)[plan.cells]
    return found.reshape(rows, heads, -1)


def _scores(query: Float[Tensor, "M E D"], keys: Float[Tensor, "M C D"]) -> Float[Tensor, "M E C"]:
    """Compute Q K^T; in bfloat16 as (K Q^T)^T, which oneDNN does three times as fast where E is a few rows."""
    if query.dtype == torch.bfloat16 and query.device.type == "cpu":
        return torch.bmm(keys, query.transpose(1, 2)).transpose(1, 2)
    return torch.bmm(query, keys.transpose(1, 2))


def _in_lanes(rows: Float[Tensor, "N G E X"], plan: Plan) -> Float[Tensor, "L W G E X"]:
    found: Tensor = rows.unflatten(0, (plan.lanes, plan.width))
    return found


def _to_lanes(rows: Float[Tensor, "N G E X"], plan: Plan) -> Float[Tensor, "M R X"]:
    """For every lane and key head one matrix of its rows' queries (or weights): M = L x G, R = width x E."""
    _, groups, each, size = rows.shape
    if plan.cells is not None:
        rows = rows.new_zeros(plan.lanes * plan.width, groups, each, size).index_copy_(0, plan.cells, rows)
    table: Tensor = rows.unflatten(0, (plan.lanes, plan.width)).transpose(1, 2)
    return table.reshape(plan.lanes * groups, plan.width * each, size)


def _by_rows(table: Float[Tensor, "M R X"], plan: Plan, groups: int) -> Float[Tensor, "L W G E X"]:
    """The way back from `_to_lanes`, as a view."""
    parts = table.unflatten(0, (plan.lanes, groups)).unflatten(2, (plan.width, -1))
    rows: Tensor = parts.transpose(1, 2)
    return rows


def _flat(memory: Float[Tensor, "N G C X"]) -> Float[Tensor, "M C X"]:
    """Rows and heads on one axis, without copying: the columns are a slice of the ring."""
    return memory.flatten(0, 1)
