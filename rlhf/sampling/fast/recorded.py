"""Decoding on a GPU: a step with its draw as a CUDA graph over buffers that stay, from one rollout to the next.

A row has a slot with its own copy of its prompt, so that nothing in a recorded step depends on which rows share one: a
finished row makes room for a waiting one without a new recording. A step is recorded once for each number of rows in
`bucket_sizes`; weights are copied into place before each rollout. The host launches ahead of the device and learns a
few steps late which rows are done; it never waits for the step that it has just launched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rlhf.batching import to_device
from rlhf.models.backbone import CausalLM
from rlhf.runtime.seeding import uniforms
from rlhf.sampling.fast.decoder import FusedDecoder, GraphRecorder, sample_token
from rlhf.sampling.fast.kv_cache import Layered
from rlhf.sampling.fast.prefix_cache import PrefixCache
from rlhf.types import Prompts

CHECK_INTERVAL = 4  # steps between looks at which rows are done; each look is at the state of the one before
COLUMN_MULTIPLE = 64  # tokens: prompts of a few more need no new buffers; attention kernels want at least 16
SLACK = 8  # rows are admitted when one slot in this many is free: few prompts at a time are slow
SMALLEST_BUCKET = 8  # rows: fewer take as long


class RowSlots:
    """The keys and values of rows, each in its own slot: its prompt, left-padded, and then its completion."""

    def __init__(self, size: int, prompt: int, length: int, *, dtype: torch.dtype, device: torch.device) -> None:
        """Create slots for `size` rows of at most `prompt` and `length` tokens; `dtype` is of keys and values."""
        self.size, self.prompt, self.dtype, self.device = size, prompt, dtype, device
        self.columns = -(-(prompt + length) // COLUMN_MULTIPLE) * COLUMN_MULTIPLE
        self.memory: list[tuple[Tensor, Tensor]] = []  # per layer: keys and values [size, G, columns, D]
        self.bias = torch.full((size, self.columns), -torch.inf, dtype=dtype, device=device)  # 0 where a row attends
        self.column = torch.zeros(size, dtype=torch.long, device=device)  # where the row's next token is written
        self.live = size  # rows of the current step: the first ones
        self._rows = torch.arange(size, device=device)
        self._numbers = torch.arange(self.columns, device=device)
        self._windowed: dict[int, Tensor] = {}

    def admit(
        self, slots: Int[Tensor, " N"], layers: Layered, mask: Bool[Tensor, "L C"], of: Int[Tensor, " N"]
    ) -> None:
        """Copy left-padded prompts into slots; `of` is the prompt of each slot. All tensors are on the device."""
        start = self.prompt - mask.shape[1]
        if not self.memory:
            self.memory = [(self._allocate(keys), self._allocate(values)) for keys, values in layers]
        for mine, given in zip(self.memory, layers, strict=True):
            for memory, states in zip(mine, given, strict=True):
                memory[slots, :, start : self.prompt] = states.index_select(0, of).to(self.dtype)
        bias = torch.full((len(slots), self.columns), -torch.inf, dtype=self.dtype, device=self.device)
        bias[:, start : self.prompt].masked_fill_(mask.index_select(0, of), 0.0)
        self.bias.index_copy_(0, slots, bias)
        self.column.index_fill_(0, slots, self.prompt)

    def _allocate(self, states: Float[Tensor, "L G C D"]) -> Float[Tensor, "S G K D"]:
        _, groups, _, dim = states.shape
        return torch.zeros(self.size, groups, self.columns, dim, dtype=self.dtype, device=self.device)

    def move(self, index: Int[Tensor, " M"]) -> None:
        """Move the rows at `index` to the first slots, in that order."""
        count = len(index)
        for tensor in (self.bias, self.column, *(states for pair in self.memory for states in pair)):
            tensor[:count] = tensor.index_select(0, index)

    def advance(self) -> None:
        """Move to the next column of every row, after each step."""
        self.column[: self.live].add_(1).clamp_(max=self.columns - 1)  # the limit holds back finished rows alone

    def begin_step(self, positions: Int[Tensor, " N"]) -> None:
        """Unmask the column that each row writes in this step."""
        self._windowed.clear()
        self.bias[: self.live].scatter_(1, self.column[: self.live, None], 0.0)

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
        """Store the new token's key and value of every row, and attend to everything that the row may see.

        The query heads that share a key head are taken for as many positions: the kernel then needs no repeated keys.
        """
        keys, values = self.memory[layer]
        rows, heads, dim = query.shape
        at = self._rows[:rows], slice(None), self.column[:rows]
        keys[at], values[at] = key.to(self.dtype), value.to(self.dtype)
        attended = scaled_dot_product_attention(
            query.to(self.dtype).reshape(rows, keys.shape[1], -1, dim),
            keys[:rows],
            values[:rows],
            attn_mask=self._bias(rows, window)[:, None, None],
            scale=scaling,
        )
        return attended.reshape(rows, heads, -1)

    def _bias(self, rows: int, window: int | None) -> Float[Tensor, "N K"]:
        if window is None or window >= self.columns:
            return self.bias[:rows]
        if window not in self._windowed:  # a row's tokens are in adjacent columns: distances are as for positions
            in_window = self._numbers > self.column[:rows, None] - window
            self._windowed[window] = torch.where(in_window, self.bias[:rows], -torch.inf)
        return self._windowed[window]


class TrialCache(RowSlots):
    """Row slots behind the interface of a KVCache, for `verify_decoder`."""

    def add_prompts(self, layers: Layered, mask: Bool[Tensor, "L C"]) -> list[int]:
        """Keep the prompts until rows are added."""
        self._given = layers, mask
        return list(range(len(mask)))

    def add_rows(self, lanes: Int[Tensor, " N"]) -> slice:
        """Add rows that read these prompts."""
        layers, mask = self._given
        lanes = lanes.to(self.device)
        self.admit(torch.arange(len(lanes), device=self.device), layers, mask, lanes)
        self.column.fill_(self.prompt - 1)  # `advance` comes before the first step
        return slice(0, len(lanes))


@runtime_checkable
class Arrival(Protocol):
    """An event that the host can wait for."""

    def synchronize(self) -> None:
        """Wait until it is over."""


@dataclass(frozen=True)
class Look:
    """A copy of the rows' `done` on its way to the host."""

    step: int
    arrived: Arrival
    done: Bool[Tensor, " S"]  # pinned; valid once `arrived` is over


class RecordedSampler:
    """Slots, weights and graphs that stay from one rollout to the next."""

    def __init__(
        self,
        decoder: FusedDecoder,
        slots: RowSlots,
        recorder: GraphRecorder,
        *,
        length: int,
        temperature: float,
        ends: Sequence[int],
    ) -> None:
        """Allocate the state of the rows; `length` is the most tokens of a completion, `ends` the ids that end one."""
        device, size = slots.device, slots.size
        self.decoder, self.slots = decoder, slots
        self.length, self.temperature = length, temperature
        self.buckets = bucket_sizes(size)
        self.ends = to_device([torch.tensor(ends, dtype=torch.long)], device)[0]
        self.token, self.position, self.drawn = torch.zeros(3, size, dtype=torch.long, device=device).unbind()
        self.done = torch.ones(size, dtype=torch.bool, device=device)
        # One extra column: it takes the tokens that a finished row goes on to draw.
        self.ids = torch.zeros(size, length + 1, dtype=torch.long, device=device)
        self.uniforms = torch.zeros(size, length + 1, dtype=torch.float64, device=device)
        wide = torch.float64 if slots.dtype == torch.float64 else torch.float32
        self.logprobs = torch.zeros(size, length + 1, dtype=wide, device=device)
        self.graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._recorder, self._pool = recorder, torch.cuda.graph_pool_handle()
        self._looks = [torch.zeros(size, dtype=torch.bool, pin_memory=True) for _ in range(2)]

    # -- a step -----------------------------------------------------------------------------------------------------

    def step(self, count: int, *, greedy: bool) -> None:
        """Decode and draw one token of the first `count` rows; recorded the second time, replayed from then on."""
        self.slots.live = count
        graph = self.graphs.get((count, greedy))
        if graph is not None:
            graph.replay()
            return
        self.graphs[count, greedy], _ = self._recorder.record(lambda: self._step(count, greedy=greedy), self._pool)

    def _step(self, count: int, *, greedy: bool) -> None:
        token, position, drawn = self.token[:count], self.position[:count], self.drawn[:count]
        logits = self.decoder.step(self.slots, token, position)
        uniform = None if greedy else self.uniforms[:count].gather(1, drawn[:, None]).squeeze(1)
        drawn_token, logprob = sample_token(logits, uniform, self.temperature)
        self.ids[:count].scatter_(1, drawn[:, None], drawn_token[:, None])
        self.logprobs[:count].scatter_(1, drawn[:, None], logprob[:, None].to(self.logprobs.dtype))
        token.copy_(drawn_token)
        drawn.add_(1).clamp_(max=self.length)
        position.add_(1).clamp_(max=self.decoder.positions - 1)
        self.slots.advance()
        self.done[:count].logical_or_((drawn_token[:, None] == self.ends).any(dim=1)).logical_or_(drawn == self.length)

    # -- rows -------------------------------------------------------------------------------------------------------

    def admit(
        self,
        model: CausalLM,
        rows: Prompts,
        slots: Sequence[int],
        prompt: Int[Tensor, " N"],
        key: int | None,
        prefixes: PrefixCache,
    ) -> None:
        """Admit rows: prefill their prompts and draw their first tokens; `prompt` numbers equal prompts alike."""
        numbers, of = prompt.unique(return_inverse=True)
        first = torch.zeros_like(numbers).scatter_reduce_(0, of, torch.arange(len(of)), "amin", include_self=False)
        mask = rows.prompt_mask[first]
        width = int(mask.sum(dim=1).max())
        lengths = rows.prompt_mask.sum(dim=1)
        mask = mask[:, -width:]
        of_prompt = of
        logits, layers = prefixes.prefill(
            model,
            rows.prompt_ids[first][:, -width:],
            mask,
            lambda number: rows.row_ids[of_prompt == number].tolist(),
            self.slots.device,
        )
        mask, of, at, row_ids, lengths = to_device(
            [
                mask,
                of,
                torch.tensor(slots, dtype=torch.long),
                rows.row_ids,
                lengths,
            ],
            self.slots.device,
        )
        self.slots.admit(at, layers, mask, of)
        uniform: Tensor | None = None
        if key is not None:
            count, positions = len(of), torch.arange(self.length + 1, device=at.device)
            table = uniforms(
                key,
                row_ids.repeat_interleave(len(positions), output_size=count * len(positions)),
                positions.repeat(count),
            )
            table = table.view(count, -1)
            self.uniforms.index_copy_(0, at, table)
            uniform = table[:, 0]
        token, logprob = sample_token(logits.index_select(0, of), uniform, self.temperature)
        self.ids[:, 0].index_copy_(0, at, token)
        self.logprobs[:, 0].index_copy_(0, at, logprob.to(self.logprobs.dtype))
        self.token.index_copy_(0, at, token)
        self.position.index_copy_(0, at, lengths)
        self.drawn.index_fill_(0, at, 1)
        is_done = (token[:, None] == self.ends).any(dim=1)
        self.done.index_copy_(0, at, is_done if self.length > 1 else torch.ones_like(is_done))

    def move(self, slots: Sequence[int]) -> None:
        """Move the rows in these slots to the first ones, in that order."""
        (index,) = to_device([torch.tensor(slots, dtype=torch.long)], self.slots.device)
        self.slots.move(index)
        state = self.token, self.position, self.drawn, self.done, self.ids, self.logprobs, self.uniforms
        for tensor in state:
            tensor[: len(slots)] = tensor.index_select(0, index)

    def look(self, step: int) -> Look:
        """Send the rows' `done` to the host, without waiting for it."""
        buffer = self._looks[step // CHECK_INTERVAL % 2]
        buffer.copy_(self.done, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return Look(step, arrived, buffer)


def bucket_sizes(size: int) -> list[int]:
    """Return the numbers of rows that steps are recorded for, the largest first: halves, down to a few rows."""
    sizes = [size]
    while sizes[-1] > SMALLEST_BUCKET:
        sizes.append(-(-sizes[-1] // 2))
    return sizes


class RecordedGeneration:
    """One call of a RecordedSampler: which row is in which slot, and the tokens of the rows that are done."""

    def __init__(
        self,
        sampler: RecordedSampler,
        model: CausalLM,
        prompts: Prompts,
        prompt: Int[Tensor, " B"],
        *,
        key: int | None,
        prefixes: PrefixCache,
    ) -> None:
        """Start with all rows waiting; `prompt` numbers runs of equal prompts, and a `key` of None decodes greedily."""
        self.sampler, self.model, self.prompts, self.prompt, self.key = sampler, model, prompts, prompt, key
        self.prefixes = prefixes
        device, rows = sampler.slots.device, len(prompts)
        self.ids = torch.zeros(rows, sampler.length, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(rows, sampler.length, dtype=sampler.logprobs.dtype, device=device)
        self.row: list[int | None] = [None] * sampler.slots.size  # of each slot
        self.since = [0] * sampler.slots.size  # the step before which the slot's row came
        self.waiting = 0  # the first row that waits

    def generate(self) -> tuple[Int[Tensor, "B T"], Float[Tensor, "B T"]]:
        """Decode all rows; return their tokens and log-probabilities on the CPU."""
        sampler, step = self.sampler, 0
        sampler.done.fill_(True)
        count = self._admit(step)
        looks: list[Look] = []
        while any(row is not None for row in self.row):
            sampler.step(count, greedy=self.key is None)
            step += 1
            if step % CHECK_INTERVAL == 0:
                looks.append(sampler.look(step))
                finished = self._finished(looks.pop(0) if len(looks) > 1 else None, step)
                if self._is_worth_a_break(len(finished)):
                    self._take(finished)
                    looks = looks if self.waiting < len(self.prompts) or not self._shrinks() else []
                    count = self._admit(step)
        ids, logprobs = (torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in (self.ids, self.logprobs))
        ids.copy_(self.ids, non_blocking=True)
        logprobs.copy_(self.logprobs, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        return ids, logprobs

    def _finished(self, look: Look | None, step: int) -> list[int]:
        """Return the slots whose rows are done: by their length, which the host knows, or from an earlier look."""
        done = [False] * len(self.row)
        if look is not None:
            look.arrived.synchronize()
            done = [
                bool(flag) and look.step > since for flag, since in zip(look.done.tolist(), self.since, strict=True)
            ]
        last = self.sampler.length - 1
        return [s for s, row in enumerate(self.row) if row is not None and (done[s] or step - self.since[s] >= last)]

    def _is_worth_a_break(self, finished: int) -> bool:
        """Return whether so many rows are done that others should take their place, or the rest need fewer slots."""
        live = len(self._live()) - finished
        if not finished or not live:
            return finished > 0
        if self.waiting < len(self.prompts):
            return finished * SLACK >= len(self.row)
        return self._bucket(live) < self._bucket(self._live()[-1] + 1)

    def _take(self, slots: list[int]) -> None:
        """Copy the tokens of finished rows to their places, and free their slots."""
        rows = [row for row in (self.row[slot] for slot in slots) if row is not None]
        at, source = to_device([torch.tensor(rows), torch.tensor(slots)], self.ids.device)
        for target, tensor in ((self.ids, self.sampler.ids), (self.logprobs, self.sampler.logprobs)):
            target.index_copy_(0, at, tensor[:, : self.sampler.length].index_select(0, source))
        for slot in slots:
            self.row[slot] = None

    def _live(self) -> list[int]:
        return [slot for slot, row in enumerate(self.row) if row is not None]

    def _shrinks(self) -> bool:
        live = self._live()
        return bool(live) and live[-1] >= self._bucket(len(live))

    def _bucket(self, rows: int) -> int:
        return min(size for size in self.sampler.buckets if size >= rows)

    def _admit(self, step: int) -> int:
        """Admit waiting rows to free slots, or close up if the rest need fewer; return the rows of a step."""
        free = [slot for slot, row in enumerate(self.row) if row is None]
        count = min(len(free), len(self.prompts) - self.waiting)
        if count:
            rows = torch.arange(self.waiting, self.waiting + count)
            chosen = self.prompts.rows(rows)
            self.sampler.admit(self.model, chosen, free[:count], self.prompt[rows], self.key, self.prefixes)
            for slot, row in zip(free[:count], rows.tolist(), strict=True):
                self.row[slot], self.since[slot] = row, step
            self.waiting += count
        elif self._shrinks():
            live = self._live()
            self.sampler.move(live)
            rest = len(self.row) - len(live)
            self.row = [self.row[slot] for slot in live] + [None] * rest
            self.since = [self.since[slot] for slot in live] + [0] * rest
        live = self._live()
        return self._bucket(live[-1] + 1) if live else 0
