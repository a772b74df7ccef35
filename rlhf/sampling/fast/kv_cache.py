"""The KV cache of a running batch (prompts shared by their completions): filled from prompts, and attended over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import DynamicCache

from rlhf.models.backbone import CausalLM
from rlhf.models.text_config import text_config
from rlhf.runtime.device import cpu_has_bfloat16_products


@dataclass(frozen=True)
class PromptLayout:
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
    plan: PromptLayout,
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
    """Compute Q K^T; in bfloat16 as (K Q^T)^T, which oneDNN does three times as fast if E is a few rows."""
    if query.dtype == torch.bfloat16 and query.device.type == "cpu":
        return torch.bmm(keys, query.transpose(1, 2)).transpose(1, 2)
    return torch.bmm(query, keys.transpose(1, 2))


def _in_lanes(rows: Float[Tensor, "N G E X"], plan: PromptLayout) -> Float[Tensor, "L W G E X"]:
    table: Tensor = rows.unflatten(0, (plan.lanes, plan.width))
    return table


def _to_lanes(rows: Float[Tensor, "N G E X"], plan: PromptLayout) -> Float[Tensor, "M R X"]:
    """Gather the queries (or weights) of each lane and key head into one matrix: M = L x G, R = width x E."""
    _, groups, per_group, size = rows.shape
    if plan.cells is not None:
        rows = rows.new_zeros(plan.lanes * plan.width, groups, per_group, size).index_copy_(0, plan.cells, rows)
    table: Tensor = rows.unflatten(0, (plan.lanes, plan.width)).transpose(1, 2)
    return table.reshape(plan.lanes * groups, plan.width * per_group, size)


def _by_rows(table: Float[Tensor, "M R X"], plan: PromptLayout, groups: int) -> Float[Tensor, "L W G E X"]:
    """Undo `_to_lanes`, returning a view."""
    parts = table.unflatten(0, (plan.lanes, groups)).unflatten(2, (plan.width, -1))
    rows: Tensor = parts.transpose(1, 2)
    return rows


def _flat(memory: Float[Tensor, "N G C X"]) -> Float[Tensor, "M C X"]:
    """Merge rows and heads into one axis without copying: the columns are a slice of the ring buffer."""
    return memory.flatten(0, 1)


@runtime_checkable
class StepCache(Protocol):
    """The methods of a cache that a decode step calls."""

    def begin_step(self, positions: Int[Tensor, " N"]) -> None:
        """Unmask the columns that this step writes, for tokens at these positions."""

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "N H D"],
        key: Float[Tensor, "N G D"],
        value: Float[Tensor, "N G Dv"],
        *,
        scaling: float,
        window: int | None,
    ) -> Float[Tensor, "N H Dv"]:
        """Store the new token's key and value of every row, and attend to everything that the row may see."""


class UnsupportedModel(Exception):
    """The model's attention does something that the fast sampler does not support; the message says what."""


Layered = Sequence[tuple[Tensor, Tensor]]  # keys [B, H, C, D] and values [B, H, C, Dv] of each layer


def prefill(
    model: CausalLM, ids: Int[Tensor, "L C"], mask: Bool[Tensor, "L C"], past: Layered = ()
) -> tuple[Float[Tensor, "L V"], Layered]:
    """Return the logits after each left-padded prompt and all layers' keys and values, using the model's attention.

    `past` has the keys and values of the first columns, if they are known: the model reads the others.
    """
    cache = DynamicCache()  # without the configuration it keeps all columns of sliding-window layers too
    for number, states in enumerate(past):
        cache.update(*states, number)
    new = slice(past[0][0].shape[2] if past else 0, None)
    logits = model(
        input_ids=ids[:, new],
        attention_mask=_prefill_mask(model, mask, new),
        position_ids=(mask.long().cumsum(dim=1) - 1).clamp(min=0)[:, new],
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    ).logits[:, -1]
    layers = []
    for layer in cache.layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or keys.shape[2] != ids.shape[1]:
            raise UnsupportedModel("its cache does not hold keys and values of every token")
        layers.append((keys, values))
    return logits, layers


def _prefill_mask(model: CausalLM, mask: Bool[Tensor, "L C"], new: slice) -> Tensor:
    """Return the attention mask of a prefill: the padding, or on a GPU which token of the new columns sees which.

    From the padding transformers would find out whether a mask is needed at all, for which the host waits. A dead token
    sees itself, since a softmax over nothing is NaN.
    """
    config, width = text_config(model), mask.shape[1]
    window = getattr(config, "sliding_window", None)
    if not mask.is_cuda or config._attn_implementation != "sdpa" or (window is not None and window < width):
        return mask.long()
    causal = torch.ones(width, width, dtype=torch.bool, device=mask.device)
    return ((mask[:, None, None] & causal.tril()) | causal.tril().triu())[:, :, new]


class KVCache:
    """The key-value cache: a slot per row for its completion, and a lane per prompt, shared by the rows of its group.

    Rows 0 .. live-1 are decoded together. Each step writes the same column of the ring buffer for all rows, whatever
    their lengths: for a row admitted later, the columns before it are masked. The ring is as long as the longest
    completion, so no row's own columns are overwritten while it is being decoded.
    """

    def __init__(
        self,
        size: int,
        lanes: int,
        prompt: int,
        length: int,
        *,
        device: torch.device,
        windows: bool = False,
        static: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create a cache for `size` rows of `lanes` prompts.

        Args:
            prompt: tokens of the longest prompt.
            length: tokens of the longest completion.
            windows: whether some layer may see only a window of the last tokens: positions are then kept.
            static: whether a step depends only on values on the device, so that it can be recorded and replayed.
            dtype: of keys and values; None: the model's own, as `cache_dtype` says.
        """
        self.size, self.prompt, self.ring, self.device = size, prompt, max(1, length - 1), device
        self.lanes = lanes
        self.live = self.prompts = 0  # rows, and lanes in use
        self.now = 0  # steps since the cache was last empty
        self.masked = False  # some column of some row is masked
        self.memory: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []  # per layer: K, V of prompts; K, V of completions
        self.lane = torch.zeros(size, dtype=torch.long)  # of each row; on the CPU
        self.bias = torch.full((size, prompt + self.ring), -torch.inf, device=device)  # 0 where a row may attend
        self.lane_bias = torch.full((lanes, prompt), -torch.inf, device=device)
        self.positions: Tensor | None = None
        if windows:
            self.positions = torch.zeros(size, prompt + self.ring, dtype=torch.long, device=device)
        self.plan = PromptLayout(lanes=0, width=0, cells=None)
        self.static, self.dtype = static, dtype
        self.layout_version = 0  # counts changes of the rows: a step recorded before a change is no longer valid
        self._column = torch.zeros(1, dtype=torch.long, device=device)
        self._windowed: dict[int, Tensor] = {}

    # -- rows come and go -------------------------------------------------------------------------------------------

    def add_prompts(self, layers: Layered, mask: Bool[Tensor, "L C"]) -> list[int]:
        """Copy left-padded prompts into free lanes and return the lanes' numbers."""
        count, width = mask.shape
        first, last = self.prompts, self.prompts + count
        assert last <= self.lanes, "more prompts than lanes"
        if not self.memory:
            self.memory = [self._allocate(keys, values) for keys, values in layers]
        for (prompt_keys, prompt_values, _, _), (keys, values) in zip(self.memory, layers, strict=True):
            prompt_keys[first:last, :, self.prompt - width :] = keys
            prompt_values[first:last, :, self.prompt - width :] = values
        self.lane_bias[first:last] = -torch.inf
        self.lane_bias[first:last, self.prompt - width :].masked_fill_(mask, 0.0)
        self.prompts = last
        return list(range(first, last))

    def add_rows(self, lanes: Int[Tensor, " N"]) -> slice:
        """Add rows that read the prompts in these lanes, and return their slots."""
        if self.live == 0:
            self.now, self.masked = 0, False
            self.bias[:, self.prompt :] = -torch.inf
        elif self.now:
            self.masked = True
        slots = slice(self.live, self.live + len(lanes))
        assert slots.stop <= self.size, "more rows than slots"
        self.lane[slots] = lanes
        self.bias[slots, : self.prompt] = self.lane_bias[lanes.to(self.device)]
        self.bias[slots, self.prompt :] = -torch.inf
        if self.positions is not None:
            visible = self.bias[slots, : self.prompt] == 0
            self.positions[slots, : self.prompt] = visible.long().cumsum(dim=1) - 1
        self.live = slots.stop
        self._update_plan()
        return slots

    def keep(self, kept: Bool[Tensor, " N"], lane: int | None) -> tuple[Int[Tensor, " M"], int | None]:
        """Keep only these rows, and drop the prompts that no row reads, except the one in `lane`.

        Rows from the end move into the slots that become free, and prompts likewise into lanes.

        Returns:
            The former slot of each row that is left (on the CPU), and the lane to which the prompt in `lane` has moved.
        """
        index = _compacted_indices(kept)
        moved = (index != torch.arange(len(index))).nonzero().flatten()
        if len(moved):
            target, source = moved.to(self.device), index[moved].to(self.device)
            columns = min(self.now, self.ring)
            for _, _, keys, values in self.memory:
                keys[target, :, :columns] = keys[source, :, :columns]
                values[target, :, :columns] = values[source, :, :columns]
            self.bias[target] = self.bias[source]
            if self.positions is not None:
                self.positions[target] = self.positions[source]
        self.lane[: len(index)] = self.lane[index]
        self.live = len(index)
        new_lanes = self._drop_prompts(lane)
        self._update_plan()
        return index, None if lane is None else int(new_lanes[lane])

    def _drop_prompts(self, lane: int | None) -> Int[Tensor, " L"]:
        used = torch.zeros(self.prompts, dtype=torch.bool)
        used[self.lane[: self.live]] = True
        if lane is not None:
            used[lane] = True
        index = _compacted_indices(used)
        moved = (index != torch.arange(len(index))).nonzero().flatten()
        if len(moved):
            target, source = moved.to(self.device), index[moved].to(self.device)
            for keys, values, _, _ in self.memory:
                keys[target], values[target] = keys[source], values[source]
            self.lane_bias[target] = self.lane_bias[source]
        new_lanes = torch.zeros(self.prompts, dtype=torch.long)
        new_lanes[index] = torch.arange(len(index))
        self.lane[: self.live] = new_lanes[self.lane[: self.live]]
        self.prompts = len(index)
        return new_lanes

    def _update_plan(self) -> None:
        self.layout_version += 1
        lanes = self.lane[: self.live]
        counts = torch.bincount(lanes, minlength=self.prompts)
        order = lanes.argsort(stable=True)
        starts = counts.cumsum(dim=0) - counts
        place_in_lane = torch.empty_like(lanes)
        place_in_lane[order] = torch.arange(self.live) - starts[lanes[order]]
        width = int(counts.max()) if self.live else 0
        cells = lanes * width + place_in_lane
        is_ordered = len(cells) == self.prompts * width and bool((cells == torch.arange(self.live)).all())
        any_padding = bool((self.lane_bias[: self.prompts] != 0).any())
        self.plan = PromptLayout(lanes=self.prompts, width=width, cells=None if is_ordered else cells.to(self.device))
        self.masked_prompts = any_padding

    def _allocate(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        def zeros(rows: int, like: Tensor, columns: int) -> Tensor:
            dtype = self.dtype or cache_dtype(like.dtype, like.device)
            return torch.zeros(rows, like.shape[1], columns, like.shape[3], dtype=dtype, device=like.device)

        return (
            zeros(self.lanes, keys, self.prompt),
            zeros(self.lanes, values, self.prompt),
            zeros(self.size, keys, self.ring),
            zeros(self.size, values, self.ring),
        )

    # -- a step -----------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Move to the next column of the ring, before each step."""
        self._column.fill_(self.now % self.ring)
        self.now += 1

    def begin_step(self, positions: Int[Tensor, " N"]) -> None:
        """Unmask the current column, which takes tokens at these positions."""
        self._windowed.clear()
        self.bias[: self.live, self.prompt :].index_fill_(1, self._column, 0.0)
        if self.positions is not None:
            self.positions[: self.live, self.prompt :].index_copy_(1, self._column, positions[:, None])
            self._step_positions = positions

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "N H D"],
        key: Float[Tensor, "N G D"],
        value: Float[Tensor, "N G Dv"],
        *,
        scaling: float,
        window: int | None,
    ) -> Float[Tensor, "N H Dv"]:
        """Store the new token's key and value of every row, and attend to everything that the row may see."""
        prompt_keys, prompt_values, keys, values = self.memory[layer]
        if self.static:
            keys[: self.live].index_copy_(2, self._column, key.to(keys.dtype)[:, :, None])
            values[: self.live].index_copy_(2, self._column, value.to(values.dtype)[:, :, None])
        else:
            column = (self.now - 1) % self.ring
            keys[: self.live, :, column], values[: self.live, :, column] = key, value
        used = self.ring if self.static else min(self.now, self.ring)
        output = attend(
            query.to(keys.dtype) if scaling == 1.0 else query.to(keys.dtype) * scaling,
            prompt_keys[: self.prompts],
            prompt_values[: self.prompts],
            keys[: self.live, :, :used],
            values[: self.live, :, :used],
            self._bias(used, window, keys.dtype),
            self.plan,
        )
        return output.to(query.dtype)

    def _bias(self, used: int, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """Return the bias added to the attention scores; None if every row may attend to every column."""
        if window is None or self.positions is None:
            if not (self.static or self.masked or self.masked_prompts):
                return None
            return self.bias[: self.live, : self.prompt + used].to(dtype)
        if window not in self._windowed:
            positions = self.positions[: self.live, : self.prompt + used]
            in_window = positions > self._step_positions[:, None] - window
            bias = self.bias[: self.live, : self.prompt + used]
            self._windowed[window] = torch.where(in_window, bias, -torch.inf).to(dtype)
        return self._windowed[window]


def cache_dtype(computed: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype of the cache: the keys', but float32 on a CPU without bfloat16 matrix products."""
    if computed != torch.bfloat16 or device.type != "cpu" or cpu_has_bfloat16_products():
        return computed
    return torch.float32


def _compacted_indices(kept: Bool[Tensor, " N"]) -> Int[Tensor, " M"]:
    """Return the kept indices such that most stay in place: gaps are filled from the end."""
    count = int(kept.sum())
    index = torch.arange(count)
    gaps = (~kept[:count]).nonzero().flatten()
    index[gaps] = kept[count:].nonzero().flatten() + count
    return index
