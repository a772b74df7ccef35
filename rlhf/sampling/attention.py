"""Attention of one new token per row: the rows of a group share one read of their prompt."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Plan:
    """The cell of each row in a table of `lanes` prompts x `width` rows; None if they are in order without gaps."""

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
    """Attend from one query per row to the P columns of its prompt and the C columns of its completion.

        softmax(q K^T + bias) V,     K = P + C columns

    The queries of a group are the rows of a single matrix product with the prompt that they share, so the prompt is
    read once for all of them. H is a multiple of G (grouped-query attention).
    """
    rows, heads, dim = query.shape
    groups, prompt, columns = keys.shape[1], prompt_keys.shape[2], keys.shape[2]
    per_group = heads // groups
    grouped = query.reshape(rows, groups, per_group, dim)
    prompt_scores = _scores(_to_lanes(grouped, plan), _flat(prompt_keys))  # [L x G, width x per_group, P]
    completion_scores = _scores(grouped.reshape(rows * groups, per_group, dim), _flat(keys))
    scores = query.new_empty(rows, groups, per_group, prompt + columns)
    if plan.cells is None:
        _in_lanes(scores, plan)[..., :prompt] = _by_rows(prompt_scores, plan, groups)
    else:
        scores[..., :prompt] = _by_rows(prompt_scores, plan, groups).flatten(0, 1)[plan.cells]
    scores[..., prompt:] = completion_scores.view(rows, groups, per_group, columns)
    if bias is not None:
        scores += bias[:, None, None, :]
    weights = scores.softmax(dim=-1)
    output = torch.bmm(weights[..., prompt:].reshape(rows * groups, per_group, columns), _flat(values))
    output = output.view(rows, groups, per_group, -1)
    shared = _by_rows(torch.bmm(_to_lanes(weights[..., :prompt], plan), _flat(prompt_values)), plan, groups)
    if plan.cells is None:
        _in_lanes(output, plan).add_(shared)
    else:
        output += shared.flatten(0, 1)[plan.cells]
    return output.reshape(rows, heads, -1)


def _scores(query: Float[Tensor, "M E D"], keys: Float[Tensor, "M C D"]) -> Float[Tensor, "M E C"]:
    """Compute Q K^T; in bfloat16 as (K Q^T)^T, which oneDNN does three times as fast where E is a few rows."""
    if query.dtype == torch.bfloat16 and query.device.type == "cpu":
        return torch.bmm(keys, query.transpose(1, 2)).transpose(1, 2)
    return torch.bmm(query, keys.transpose(1, 2))


def _in_lanes(rows: Float[Tensor, "N G E X"], plan: Plan) -> Float[Tensor, "L W G E X"]:
    table: Tensor = rows.unflatten(0, (plan.lanes, plan.width))
    return table


def _to_lanes(rows: Float[Tensor, "N G E X"], plan: Plan) -> Float[Tensor, "M R X"]:
    """Gather the queries (or weights) of each lane and key head into one matrix: M = L x G, R = width x E."""
    _, groups, per_group, size = rows.shape
    if plan.cells is not None:
        rows = rows.new_zeros(plan.lanes * plan.width, groups, per_group, size).index_copy_(0, plan.cells, rows)
    table: Tensor = rows.unflatten(0, (plan.lanes, plan.width)).transpose(1, 2)
    return table.reshape(plan.lanes * groups, plan.width * per_group, size)


def _by_rows(table: Float[Tensor, "M R X"], plan: Plan, groups: int) -> Float[Tensor, "L W G E X"]:
    """Undo `_to_lanes`, returning a view."""
    parts = table.unflatten(0, (plan.lanes, groups)).unflatten(2, (plan.width, -1))
    rows: Tensor = parts.transpose(1, 2)
    return rows


def _flat(memory: Float[Tensor, "N G C X"]) -> Float[Tensor, "M C X"]:
    """Merge rows and heads into one axis without copying: the columns are a slice of the ring buffer."""
    return memory.flatten(0, 1)
