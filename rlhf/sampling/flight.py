"""One rollout of the fast sampler: rows wait, are decoded in slots, and land."""

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

SLACK = 8  # the batch is closed up when one row in so many is finished: closing up costs a copy
LOOKS = {"cpu": 1}  # steps between two looks at which rows are finished: on a GPU a look waits for the device
LOOK = 4


@dataclass
class _Seated:
    """The rows in slots, in the order of the slots."""

    row: Int[Tensor, " N"]  # their places in the call's rows
    token: Int[Tensor, " N"]  # the last one drawn
    position: Int[Tensor, " N"]  # where it stands in its sequence
    drawn: Int[Tensor, " N"]  # tokens so far
    done: Bool[Tensor, " N"]

    def rows(self, index: Tensor) -> _Seated:
        """These of them, in this order."""
        return _Seated(*(each[index] for each in (self.row, self.token, self.position, self.drawn, self.done)))

    def and_(self, other: _Seated) -> _Seated:
        """Followed by others."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return _Seated(*(torch.cat(pair) for pair in pairs))


class Flight:
    """The rows of one call: those that wait, those in slots, and all that has been drawn."""

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
        """`key` of None takes the most likely token everywhere; `static` as that of Slots."""
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
        # One column more than there are tokens: what a finished row goes on to draw before it leaves falls there.
        self.ids = torch.zeros(rows, self.length + 1, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(rows, self.length + 1, device=device)
        self.uniforms: Tensor | None = None
        if key is not None:
            at = torch.arange(self.length + 1, device=device).repeat(rows)
            row_ids = prompts.row_ids.to(device).repeat_interleave(self.length + 1)
            self.uniforms = uniforms(key, row_ids, at).view(rows, -1)
        self.waits = 0  # the first row that waits; all before it have come
        self.lane: dict[int, int] = {}  # of the prompt that came last, some of whose rows may wait
        self.after: Tensor | None = None  # the logits after it
        self.seated: _Seated | None = None

    def land(
        self, eos_ids: tuple[int, ...]
    ) -> tuple[Int[Tensor, "B T"], Float[Tensor, "B T"], Int[Tensor, " B"], Bool[Tensor, " B"]]:
        """Decode everything; ids, log-probs, lengths and which ended with EOS, on the CPU.

        What stands after a row's length is of no meaning.
        """
        ends = torch.tensor(eos_ids, device=self.device)
        every = LOOKS.get(self.device.type, LOOK)
        self._seat(ends)
        steps = 0
        while self.seated is not None and len(self.seated.row):
            seated = self.seated
            self.slots.advance()
            logits = self.decoder.step(self.slots, seated.token, seated.position)
            self._draw(logits, seated, ends)
            steps += 1
            if steps % every == 0:
                self._close_up(ends)
        return self._landed(ends)

    def _draw(self, logits: Float[Tensor, "N V"], seated: _Seated, ends: Tensor) -> None:
        """Each row's next token, from the logits before it."""
        uniform = None if self.uniforms is None else self.uniforms[seated.row, seated.drawn]
        token, logprob = pick(logits, uniform, self.temperature)
        if self.logprobs.dtype != logprob.dtype:
            self.logprobs = self.logprobs.to(logprob.dtype)
        self.ids[seated.row, seated.drawn] = token
        self.logprobs[seated.row, seated.drawn] = logprob
        seated.token = token
        seated.position = seated.position + 1
        seated.drawn = (seated.drawn + 1).clamp_(max=self.length)
        seated.done = seated.done | torch.isin(token, ends) | (seated.drawn == self.length)

    def _close_up(self, ends: Tensor) -> None:
        """Finished rows leave and waiting ones come, when there are enough of them."""
        assert self.seated is not None
        done = self.seated.done.cpu()
        count = int(done.sum())
        if count == 0 or (count < len(done) and count * SLACK < len(done)):
            return
        index = self._leave(~done)
        self.seated = self.seated.rows(index.to(self.device))
        self._seat(ends)

    def _leave(self, kept: Tensor) -> Tensor:
        half = self.waits < len(self.prompt) and self.waits > 0
        lane = self.lane.get(int(self.prompt[self.waits])) if half else None
        index, lane = self.slots.keep(kept, lane)
        self.lane = {int(self.prompt[self.waits]): lane} if lane is not None else {}
        return index

    def _seat(self, ends: Tensor) -> None:
        """Waiting rows take the free slots: their prompts are read, their first tokens drawn."""
        while self.waits < len(self.prompt) and self.slots.live < self.size:
            rows = torch.arange(self.waits, min(self.waits + self.size - self.slots.live, len(self.prompt)))
            lanes, logits = self._read(self.prompt[rows])
            self.waits = int(rows[-1]) + 1
            lengths = self.prompt_mask.sum(dim=1)[self.prompt[rows]]
            on = rows.to(self.device)
            new = _Seated(on, on, (lengths - 1).to(self.device), torch.zeros_like(on), torch.zeros_like(on).bool())
            self._draw(logits, new, ends)
            stay = (~new.done).cpu().nonzero().flatten()
            self.slots.add_rows(lanes[stay])
            new = new.rows(stay.to(self.device))
            self.seated = new if self.seated is None else self.seated.and_(new)
            self._leave(torch.ones(self.slots.live, dtype=torch.bool))  # prompts of whose rows none is left

    def _read(self, prompt: Int[Tensor, " N"]) -> tuple[Int[Tensor, " N"], Float[Tensor, "N V"]]:
        """The lanes of these rows' prompts, those that have none put into some, and the logits after them."""
        needed = prompt.unique()
        known = {number: lane for number, lane in self.lane.items() if number == int(needed[0])}
        new = needed[len(known) :]
        after = [] if not known or self.after is None else [self.after]
        lanes = list(known.values())
        if len(new):
            mask = self.prompt_mask[new]
            width = int(mask.sum(dim=1).max())
            mask = mask[:, -width:].to(self.device)
            logits, layers = prefill(self.model, self.prompt_ids[new][:, -width:].to(self.device), mask)
            lanes += self.slots.add_prompts(layers, mask)
            after.append(logits)
        table = torch.cat(after)
        self.after, self.lane = table[-1:], {int(needed[-1]): lanes[-1]}
        place = torch.searchsorted(needed, prompt)
        return torch.tensor(lanes)[place], table[place.to(self.device)]

    def _landed(self, ends: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ids = self.ids[:, : self.length].cpu()
        ended = torch.isin(ids, ends.cpu())
        finished = ended.any(dim=1)
        lengths = torch.where(finished, ended.int().argmax(dim=1) + 1, self.length)
        return ids, self.logprobs[:, : self.length].cpu(), lengths, finished


def distinct(prompts: Prompts) -> tuple[Int[Tensor, " L"], Int[Tensor, " B"]]:
    """The first row of every run of equal prompts, and for each row the number of its run."""
    ids, mask = prompts.prompt_ids, prompts.prompt_mask
    other = ((ids[1:] != ids[:-1]) & mask[1:]).any(dim=1) | (mask[1:] != mask[:-1]).any(dim=1)
    begins = torch.cat([torch.ones(1, dtype=torch.bool), other])
    return begins.nonzero().flatten(), begins.long().cumsum(dim=0) - 1
