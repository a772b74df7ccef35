"""The keys and values of the rows being decoded: each prompt's once, each completion's in a ring of its own slot."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf.sampling.attention import Plan, attend

Layered = Sequence[tuple[Tensor, Tensor]]  # keys [B, H, C, D] and values [B, H, C, Dv] of each layer


class Slots:
    """Rows 0 .. live-1 are decoded together; each reads the prompt in its lane, which its group shares.

    What a row's token adds stands in column `now` of the ring for all rows at once, however long each of them is: a
    row that came later has its earlier columns masked. The ring is as long as the longest completion, so no row's own
    columns are overwritten while it lives.
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
    ) -> None:
        """Room for `size` rows of `lanes` prompts.

        Args:
            size: rows.
            lanes: prompts.
            prompt: tokens of the longest prompt.
            length: tokens of the longest completion.
            device: where they lie.
            windows: some layer may see the last tokens only: positions are kept.
            static: a step's work depends on numbers on the device only, so that it can be recorded and replayed.
        """
        self.size, self.prompt, self.ring, self.device = size, prompt, max(1, length - 1), device
        self.lanes = lanes
        self.live = self.prompts = 0  # rows, and lanes in use
        self.now = 0  # steps since the rows were last all gone
        self.masked = False  # some column of some row must not be seen
        self.memory: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []  # of each layer: prompts' K, V; completions' K, V
        self.lane = torch.zeros(size, dtype=torch.long)  # on the CPU
        self.bias = torch.full((size, prompt + self.ring), -torch.inf, device=device)  # 0 where a row may look
        self.lane_bias = torch.full((lanes, prompt), -torch.inf, device=device)
        self.positions: Tensor | None = None
        if windows:
            self.positions = torch.zeros(size, prompt + self.ring, dtype=torch.long, device=device)
        self.plan = Plan(lanes=0, width=0, cells=None)
        self.static = static
        self.arrangements = 0  # how often rows have come or gone: what was recorded before holds no longer
        self._column = torch.zeros(1, dtype=torch.long, device=device)
        self._windowed: dict[int, Tensor] = {}

    # -- rows come and go -------------------------------------------------------------------------------------------

    def add_prompts(self, layers: Layered, mask: Bool[Tensor, "L C"]) -> list[int]:
        """Put prompts, left-padded, into lanes of their own; gives the lanes' numbers."""
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
        """Rows that read the prompts in these lanes; gives their slots."""
        if self.live == 0:
            self.now, self.masked = 0, False
            self.bias[:, self.prompt :] = -torch.inf
        elif self.now:
            self.masked = True
        where = slice(self.live, self.live + len(lanes))
        assert where.stop <= self.size, "more rows than slots"
        self.lane[where] = lanes
        self.bias[where, : self.prompt] = self.lane_bias[lanes.to(self.device)]
        self.bias[where, self.prompt :] = -torch.inf
        if self.positions is not None:
            seen = self.bias[where, : self.prompt] == 0
            self.positions[where, : self.prompt] = seen.long().cumsum(dim=1) - 1
        self.live = where.stop
        self._arrange()
        return where

    def keep(self, kept: Bool[Tensor, " N"], lane: int | None) -> tuple[Int[Tensor, " M"], int | None]:
        """Drop the other rows, and prompts that none reads, but not the one in `lane`.

        Rows from the end take the places that come free, and likewise prompts.

        Returns:
            For each row that is left the slot that it had (on the CPU), and the lane that `lane` has become.
        """
        index = _filled(kept)
        moved = (index != torch.arange(len(index))).nonzero().flatten()
        if len(moved):
            to, origin = moved.to(self.device), index[moved].to(self.device)
            columns = min(self.now, self.ring)
            for _, _, keys, values in self.memory:
                keys[to, :, :columns] = keys[origin, :, :columns]
                values[to, :, :columns] = values[origin, :, :columns]
            self.bias[to] = self.bias[origin]
            if self.positions is not None:
                self.positions[to] = self.positions[origin]
        self.lane[: len(index)] = self.lane[index]
        self.live = len(index)
        renamed = self._drop_prompts(lane)
        self._arrange()
        return index, None if lane is None else int(renamed[lane])

    def _drop_prompts(self, lane: int | None) -> Int[Tensor, " L"]:
        used = torch.zeros(self.prompts, dtype=torch.bool)
        used[self.lane[: self.live]] = True
        if lane is not None:
            used[lane] = True
        index = _filled(used)
        moved = (index != torch.arange(len(index))).nonzero().flatten()
        if len(moved):
            to, origin = moved.to(self.device), index[moved].to(self.device)
            for keys, values, _, _ in self.memory:
                keys[to], values[to] = keys[origin], values[origin]
            self.lane_bias[to] = self.lane_bias[origin]
        renamed = torch.zeros(self.prompts, dtype=torch.long)
        renamed[index] = torch.arange(len(index))
        self.lane[: self.live] = renamed[self.lane[: self.live]]
        self.prompts = len(index)
        return renamed

    def _arrange(self) -> None:
        self.arrangements += 1
        lanes = self.lane[: self.live]
        counts = torch.bincount(lanes, minlength=self.prompts)
        order = lanes.argsort(stable=True)
        starts = counts.cumsum(dim=0) - counts
        place = torch.empty_like(lanes)
        place[order] = torch.arange(self.live) - starts[lanes[order]]
        width = int(counts.max()) if self.live else 0
        cells = lanes * width + place
        plain = len(cells) == self.prompts * width and bool((cells == torch.arange(self.live)).all())
        padded = bool((self.lane_bias[: self.prompts] != 0).any())
        self.plan = Plan(lanes=self.prompts, width=width, cells=None if plain else cells.to(self.device))
        self.masked_prompts = padded

    def _allocate(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        def room(rows: int, like: Tensor, columns: int) -> Tensor:
            dtype = cache_dtype(like.dtype, like.device)
            return torch.zeros(rows, like.shape[1], columns, like.shape[3], dtype=dtype, device=like.device)

        return (
            room(self.lanes, keys, self.prompt),
            room(self.lanes, values, self.prompt),
            room(self.size, keys, self.ring),
            room(self.size, values, self.ring),
        )

    # -- a step -----------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """To the next column, which is every row's: before each step."""
        self._column.fill_(self.now % self.ring)
        self.now += 1

    def begin_step(self, positions: Int[Tensor, " N"]) -> None:
        """The column can be seen; `positions` are those of the tokens that go there."""
        self._windowed.clear()
        self.bias[: self.live, self.prompt :].index_fill_(1, self._column, 0.0)
        if self.positions is not None:
            self.positions[: self.live, self.prompt :].index_copy_(1, self._column, positions[:, None])
            self._own = positions

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
        """Keep the token's key and value, and read everything that each row may see."""
        prompt_keys, prompt_values, keys, values = self.memory[layer]
        if self.static:
            keys[: self.live].index_copy_(2, self._column, key.to(keys.dtype)[:, :, None])
            values[: self.live].index_copy_(2, self._column, value.to(values.dtype)[:, :, None])
        else:
            column = (self.now - 1) % self.ring
            keys[: self.live, :, column], values[: self.live, :, column] = key, value
        used = self.ring if self.static else min(self.now, self.ring)
        found = attend(
            query.to(keys.dtype) if scaling == 1.0 else query.to(keys.dtype) * scaling,
            prompt_keys[: self.prompts],
            prompt_values[: self.prompts],
            keys[: self.live, :, :used],
            values[: self.live, :, :used],
            self._bias(used, window, keys.dtype),
            self.plan,
        )
        return found.to(query.dtype)

    def _bias(self, used: int, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """What is added to the scores of the rows; None where every row may see every column."""
        if window is None or self.positions is None:
            if not (self.static or self.masked or self.masked_prompts):
                return None
            return self.bias[: self.live, : self.prompt + used].to(dtype)
        if window not in self._windowed:
            columns = self.positions[: self.live, : self.prompt + used]
            near = columns > self._own[:, None] - window
            bias = self.bias[: self.live, : self.prompt + used]
            self._windowed[window] = torch.where(near, bias, -torch.inf).to(dtype)
        return self._windowed[window]


def cache_dtype(computed: torch.dtype, device: torch.device) -> torch.dtype:
    """Choose the dtype of the cache: that of the keys, but float32 on a CPU that has no bfloat16 products."""
    if computed != torch.bfloat16 or device.type != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return computed
    return torch.float32


def _filled(kept: Bool[Tensor, " N"]) -> Int[Tensor, " M"]:
    """The kept places, so that as many as possible stay where they are: holes are filled from the end."""
    count = int(kept.sum())
    index = torch.arange(count)
    holes = (~kept[:count]).nonzero().flatten()
    index[holes] = kept[count:].nonzero().flatten() + count
    return index
