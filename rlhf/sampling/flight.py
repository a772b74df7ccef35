"""Continuous batching for one call of the fast sampler: finished rows make room for waiting ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf.config.sections import SamplingConfig
from rlhf.models.backbone import CausalLM
from rlhf.runtime.seeding import uniforms
from rlhf.sampling.decoders import Decoder, prefill
from rlhf.sampling.drawing import pick
from rlhf.sampling.slots import Slots
from rlhf.types import Prompts

SLACK = 8  # compact the batch when one row in this many is finished: compacting costs a copy
CHECK_INTERVALS = {"cpu": 1}  # steps between checks for finished rows: on a GPU a check waits for the device
CHECK_INTERVAL = 4


@dataclass
class _RunningRows:
    """The rows being decoded, in the order of their slots."""

    row: Int[Tensor, " N"]  # index of the row in the call
    token: Int[Tensor, " N"]  # the last token drawn
    position: Int[Tensor, " N"]  # position of that token in its sequence
    drawn: Int[Tensor, " N"]  # number of tokens drawn
    done: Bool[Tensor, " N"]

    def rows(self, index: Tensor) -> _RunningRows:
        """Return the rows at `index`, in that order."""
        return _RunningRows(*(field[index] for field in (self.row, self.token, self.position, self.drawn, self.done)))

    def concat(self, other: _RunningRows) -> _RunningRows:
        """Return these rows followed by those of `other`."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return _RunningRows(*(torch.cat(pair) for pair in pairs))


class Flight:
    """The rows of one call: those that wait, those that run in slots, and the tokens drawn for all of them."""

    def __init__(
        self,
        prompts: Prompts,
        model: CausalLM,
        decoder: Decoder,
        config: SamplingConfig,
        *,
        key: int | None,
        device: torch.device,
        static: bool = False,
    ) -> None:
        """Allocate the cache and the outputs; a `key` of None decodes greedily, and `static` is that of Slots."""
        self.model, self.decoder, self.device = model, decoder, device
        self.temperature, self.length = config.temperature, config.max_new_tokens
        rows = len(prompts)
        first, self.prompt = distinct(prompts)
        longest = int(prompts.prompt_mask.sum(dim=1).max())
        self.prompt_ids = prompts.prompt_ids[first][:, -longest:]
        self.prompt_mask = prompts.prompt_mask[first][:, -longest:]
        self.size = min(config.batch_size, rows)
        window = getattr(model.config, "sliding_window", None)
        windows = window is not None and longest + self.length > window
        lanes = min(self.size, len(first))
        self.slots = Slots(self.size, lanes, longest, self.length, device=device, windows=windows, static=static)
        # One extra column: it takes the tokens that a finished row goes on to draw before it is evicted.
        self.ids = torch.zeros(rows, self.length + 1, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(rows, self.length + 1, device=device)
        self.uniforms: Tensor | None = None
        if key is not None:
            positions = torch.arange(self.length + 1, device=device).repeat(rows)
            row_ids = prompts.row_ids.to(device).repeat_interleave(self.length + 1)
            self.uniforms = uniforms(key, row_ids, positions).view(rows, -1)
        self.next_row = 0  # the first waiting row; all before it have been admitted
        self.lane: dict[int, int] = {}  # lane of the prompt admitted last, some of whose rows may still wait
        self.last_logits: Tensor | None = None  # the logits after that prompt
        self.running: _RunningRows | None = None

    def land(
        self, eos_ids: tuple[int, ...]
    ) -> tuple[Int[Tensor, "B T"], Float[Tensor, "B T"], Int[Tensor, " B"], Bool[Tensor, " B"]]:
        """Decode all rows and return ids, log-probabilities, lengths and which rows ended with EOS, on the CPU.

        Entries beyond a row's length have no meaning.
        """
        ends = torch.tensor(eos_ids, device=self.device)
        interval = CHECK_INTERVALS.get(self.device.type, CHECK_INTERVAL)
        self._admit(ends)
        steps = 0
        while self.running is not None and len(self.running.row):
            running = self.running
            self.slots.advance()
            logits = self.decoder.step(self.slots, running.token, running.position)
            self._draw(logits, running, ends)
            steps += 1
            if steps % interval == 0:
                self._compact(ends)
        return self._outputs(ends)

    def _draw(self, logits: Float[Tensor, "N V"], running: _RunningRows, ends: Tensor) -> None:
        """Draw each row's next token from the logits before it."""
        uniform = None if self.uniforms is None else self.uniforms[running.row, running.drawn]
        token, logprob = pick(logits, uniform, self.temperature)
        if self.logprobs.dtype != logprob.dtype:
            self.logprobs = self.logprobs.to(logprob.dtype)
        self.ids[running.row, running.drawn] = token
        self.logprobs[running.row, running.drawn] = logprob
        running.token = token
        running.position = running.position + 1
        running.drawn = (running.drawn + 1).clamp_(max=self.length)
        running.done = running.done | torch.isin(token, ends) | (running.drawn == self.length)

    def _compact(self, ends: Tensor) -> None:
        """Evict finished rows and admit waiting ones, once enough rows are finished."""
        assert self.running is not None
        done = self.running.done.cpu()
        count = int(done.sum())
        if count == 0 or (count < len(done) and count * SLACK < len(done)):
            return
        index = self._evict(~done)
        self.running = self.running.rows(index.to(self.device))
        self._admit(ends)

    def _evict(self, kept: Tensor) -> Tensor:
        is_partial = self.next_row < len(self.prompt) and self.next_row > 0
        lane = self.lane.get(int(self.prompt[self.next_row])) if is_partial else None
        index, lane = self.slots.keep(kept, lane)
        self.lane = {int(self.prompt[self.next_row]): lane} if lane is not None else {}
        return index

    def _admit(self, ends: Tensor) -> None:
        """Admit waiting rows to the free slots: prefill their prompts and draw their first tokens."""
        while self.next_row < len(self.prompt) and self.slots.live < self.size:
            rows = torch.arange(self.next_row, min(self.next_row + self.size - self.slots.live, len(self.prompt)))
            lanes, logits = self._prefill(self.prompt[rows])
            self.next_row = int(rows[-1]) + 1
            lengths = self.prompt_mask.sum(dim=1)[self.prompt[rows]]
            row = rows.to(self.device)
            new = _RunningRows(
                row, row, (lengths - 1).to(self.device), torch.zeros_like(row), torch.zeros_like(row).bool()
            )
            self._draw(logits, new, ends)
            unfinished = (~new.done).cpu().nonzero().flatten()
            self.slots.add_rows(lanes[unfinished])
            new = new.rows(unfinished.to(self.device))
            self.running = new if self.running is None else self.running.concat(new)
            self._evict(torch.ones(self.slots.live, dtype=torch.bool))  # drops prompts that no row reads any more

    def _prefill(self, prompt: Int[Tensor, " N"]) -> tuple[Int[Tensor, " N"], Float[Tensor, "N V"]]:
        """Return the lanes of the rows' prompts and the logits after them, prefilling prompts without a lane."""
        needed = prompt.unique()
        existing = {number: lane for number, lane in self.lane.items() if number == int(needed[0])}
        new = needed[len(existing) :]
        logits_parts = [] if not existing or self.last_logits is None else [self.last_logits]
        lanes = list(existing.values())
        if len(new):
            mask = self.prompt_mask[new]
            width = int(mask.sum(dim=1).max())
            mask = mask[:, -width:].to(self.device)
            logits, layers = prefill(self.model, self.prompt_ids[new][:, -width:].to(self.device), mask)
            lanes += self.slots.add_prompts(layers, mask)
            logits_parts.append(logits)
        table = torch.cat(logits_parts)
        self.last_logits, self.lane = table[-1:], {int(needed[-1]): lanes[-1]}
        index = torch.searchsorted(needed, prompt)
        return torch.tensor(lanes)[index], table[index.to(self.device)]

    def _outputs(self, ends: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ids = self.ids[:, : self.length].cpu()
        ended = torch.isin(ids, ends.cpu())
        finished = ended.any(dim=1)
        lengths = torch.where(finished, ended.int().argmax(dim=1) + 1, self.length)
        return ids, self.logprobs[:, : self.length].cpu(), lengths, finished


def distinct(prompts: Prompts) -> tuple[Int[Tensor, " L"], Int[Tensor, " B"]]:
    """Return the first row of every run of equal prompts, and for each row the number of its run."""
    ids, mask = prompts.prompt_ids, prompts.prompt_mask
    differs = ((ids[1:] != ids[:-1]) & mask[1:]).any(dim=1) | (mask[1:] != mask[:-1]).any(dim=1)
    is_first = torch.cat([torch.ones(1, dtype=torch.bool), differs])
    return is_first.nonzero().flatten(), is_first.long().cumsum(dim=0) - 1
