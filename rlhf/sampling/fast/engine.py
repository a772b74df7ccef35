"""Continuous batching: admit rows, decode them a token at a time, evict the finished, until none waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from rlhf.batching import extend
from rlhf.config.sections import SamplingConfig
from rlhf.models.backbone import CausalLM, autocast, evaluation_mode
from rlhf.models.text_config import text_config
from rlhf.runtime.device import exact_products
from rlhf.runtime.engine import Engine
from rlhf.runtime.seeding import uniforms
from rlhf.sampling.fast.decoder import (
    STEPS,
    TOKENS,
    Decoder,
    FusedDecoder,
    GraphDecoder,
    GraphRecorder,
    ModelDecoder,
    sample_token,
    sample_within,
    supports_fused_decoding,
    supports_length,
    verify_decoder,
)
from rlhf.sampling.fast.kv_cache import KVCache, UnsupportedModel
from rlhf.sampling.fast.prefix_cache import PrefixCache
from rlhf.sampling.fast.recorded import COLUMN_MULTIPLE, RecordedGeneration, RecordedSampler, RowSlots, TrialCache
from rlhf.sampling.generate import HFSampler, completion_lengths, repeat_rows, rotation_kinds
from rlhf.sampling.support import limits_of
from rlhf.types import Completions, Prompts

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
        """Return these rows followed by the rows of `other`."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return _RunningRows(*(torch.cat(pair) for pair in pairs))


@dataclass(frozen=True)
class _Generated:
    """The decoded tokens, on the CPU; entries beyond a row's length have no meaning."""

    ids: Int[Tensor, "B T"]
    logprobs: Float[Tensor, "B T"]
    lengths: Int[Tensor, " B"]
    finished: Bool[Tensor, " B"]  # ended with EOS
    supports: UInt8[Tensor, "B T W"] | None = None  # if tokens were left out, the others


class GenerationBatch:
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
        prefixes: PrefixCache,
        static: bool = False,
    ) -> None:
        """Allocate the cache and the outputs; a `key` of None decodes greedily, `static` is for `RowSlots`."""
        self.model, self.decoder, self.device, self.prefixes = model, decoder, device, prefixes
        self.temperature, self.length, self.limits = config.temperature, config.max_new_tokens, limits_of(config)
        rows = len(prompts)
        first, self.prompt = unique_prompts(prompts)
        self.row_ids = prompts.row_ids
        longest = int(prompts.prompt_mask.sum(dim=1).max())
        self.last_read = longest + self.length - 2  # position of the last token that any row reads before it is done
        self.prompt_ids = prompts.prompt_ids[first][:, -longest:]
        self.prompt_mask = prompts.prompt_mask[first][:, -longest:]
        self.size = min(config.batch_size, rows)
        window = getattr(text_config(model), "sliding_window", None)
        windows = window is not None and longest + self.length > window
        lanes = min(self.size, len(first))
        self.slots = KVCache(
            self.size,
            lanes,
            longest,
            self.length,
            device=device,
            windows=windows,
            static=static,
            dtype=decoder.dtype if static and isinstance(decoder, FusedDecoder) else None,
        )
        # One extra column: it takes the tokens that a finished row goes on to draw before it is evicted.
        self.ids = torch.zeros(rows, self.length + 1, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(rows, self.length + 1, device=device)
        self.supports: Tensor | None = None  # of each token which could be drawn, if limits leave some out
        self.uniforms: Tensor | None = None
        if key is not None:
            positions = torch.arange(self.length + 1, device=device).repeat(rows)
            row_ids = prompts.row_ids.to(device).repeat_interleave(self.length + 1)
            self.uniforms = uniforms(key, row_ids, positions).view(rows, -1)
        self.next_row = 0  # the first waiting row; all before it have been admitted
        self.lane: dict[int, int] = {}  # lane of the prompt admitted last, some of whose rows may still wait
        self.last_logits: Tensor | None = None  # the logits after that prompt
        self.running: _RunningRows | None = None

    def generate(self, eos_ids: tuple[int, ...]) -> _Generated:
        """Decode all rows."""
        ends = torch.tensor(eos_ids, dtype=torch.long, device=self.device)
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
        uniform = None
        if self.uniforms is not None:
            place = self.uniforms.device  # not always the rows' device: see runtime.seeding.uniforms
            uniform = self.uniforms[running.row.to(place), running.drawn.to(place)]
        if self.limits.are_on:
            token, logprob, support = sample_within(logits, uniform, self.temperature, self.limits)
            if self.supports is None:
                self.supports = support.new_zeros(*self.ids.shape, support.shape[1])
            self.supports[running.row, running.drawn] = support
        else:
            token, logprob = sample_token(logits, uniform, self.temperature)
        if self.logprobs.dtype != logprob.dtype:
            self.logprobs = self.logprobs.to(logprob.dtype)
        self.ids[running.row, running.drawn] = token
        self.logprobs[running.row, running.drawn] = logprob
        running.token = token
        running.position = (running.position + 1).clamp_(max=self.last_read)  # holds back finished rows alone
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
            ids, mask = self.prompt_ids[new][:, -width:], mask[:, -width:]
            logits, layers = self.prefixes.prefill(
                self.model, ids, mask, lambda number: self.row_ids[self.prompt == new[number]].tolist(), self.device
            )
            lanes += self.slots.add_prompts(layers, mask.to(self.device))
            logits_parts.append(logits)
        table = torch.cat(logits_parts)
        self.last_logits, self.lane = table[-1:], {int(needed[-1]): lanes[-1]}
        index = torch.searchsorted(needed, prompt)
        return torch.tensor(lanes)[index], table[index.to(self.device)]

    def _outputs(self, ends: Tensor) -> _Generated:
        ids = self.ids[:, : self.length].cpu()
        supports = None if self.supports is None else self.supports[:, : self.length].cpu()
        return _Generated(ids, self.logprobs[:, : self.length].cpu(), *completion_lengths(ids, ends.cpu()), supports)


def unique_prompts(prompts: Prompts) -> tuple[Int[Tensor, " L"], Int[Tensor, " B"]]:
    """Return the first row of every run of equal prompts, and for each row the number of its run."""
    ids, mask = prompts.prompt_ids, prompts.prompt_mask
    differs = ((ids[1:] != ids[:-1]) & mask[1:]).any(dim=1) | (mask[1:] != mask[:-1]).any(dim=1)
    is_first = torch.cat([torch.ones(1, dtype=torch.bool), differs])
    return is_first.nonzero().flatten(), is_first.long().cumsum(dim=0) - 1


def changing_rotations(switch: int) -> str:
    """Return the reason why a longrope model's rows that may go beyond `switch` tokens are not sampled fast."""
    return f"rows may go beyond {switch:,} tokens, where the model's rotations change (longrope)"


class KeptSteps:
    """The memory of recorded steps between rollouts: one copy of a model's weights, for one sampler or several."""

    def __init__(self) -> None:
        """Keep nothing yet."""
        self.decoder: FusedDecoder | None = None
        self.steps: WeakKeyDictionary[FastSampler, RecordedSampler] = WeakKeyDictionary()

    def free(self) -> None:
        """Free the copy and the steps that read it, which have caches of their own."""
        self.decoder = None
        self.steps.clear()


class FastSampler:
    """Samples the same completions as HFSampler, from the same random numbers (in float32).

    Before the first completions its decoders are checked against the model, the fastest first; if none agrees with
    the model, HFSampler takes over.
    """

    def __init__(
        self,
        model: CausalLM,
        config: SamplingConfig,
        *,
        eos_ids: tuple[int, ...],
        pad_id: int,
        dtype: str,
        device: torch.device,
        engine: Engine | None = None,
        lean: bool = True,
        static: bool | None = None,
        kept: KeptSteps | None = None,
        warn: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Create a sampler that reads the model's current weights at every call.

        Args:
            eos_ids: tokens that end a completion.
            pad_id: the token that fills rows after their end.
            dtype: of the arithmetic, as policy.dtype.
            device: where the model is.
            engine: the engine that holds the model, if any: rows are distributed over its ranks.
            lean: whether FusedDecoder may be used; otherwise only the model's own modules are.
            static: whether steps can be recorded (see KVCache), as CUDA graphs on a GPU; None: on a GPU only.
            kept: the memory of recorded steps, if other samplers from the same model share it.
            warn: called with the reason when a slower way is used.
        """
        self.model = model
        self.config = config
        self.eos_ids = eos_ids
        self.pad_id = pad_id
        self.dtype = dtype
        self.device = device
        self.engine = engine or Engine(device)
        self.warn = warn
        self.static = device.type == "cuda" if static is None else static
        self.plain = HFSampler(
            model, config, eos_ids=eos_ids, pad_id=pad_id, dtype=dtype, device=device, engine=self.engine
        )
        self.prefixes = PrefixCache(config.batch_size)
        self._warned_of_rotations = False
        # recorded, lean, model or generate, once chosen; the first two only for lengths that they support
        self.uses: str | None = None
        self.kept = kept or KeptSteps()  # its steps are for as many rows, and as long prompts, as there were so far
        self._lean_fits = lean and supports_fused_decoding(model)

    def sample(self, prompts: Prompts, *, key: int, group_size: int, greedy: bool = False) -> Completions:
        """Sample completions; see Sampler.sample."""
        repeated = repeat_rows(prompts, group_size)
        with self.engine.whole(self.model, self.dtype):
            if self.uses is None:
                self.uses = self._choose_decoder(repeated)
            if self.uses != "generate" and not self._changes_rotations(repeated):
                return self.engine.ranks.spread(
                    repeated, lambda rows: self._sample_rows(rows, None if greedy else key, group_size)
                )
        return self.plain.sample(prompts, key=key, group_size=group_size, greedy=greedy)

    def release(self) -> None:
        """Free the copy of the weights and the cache that recorded steps keep; the next call makes them again."""
        self.kept.free()

    def _changes_rotations(self, prompts: Prompts) -> bool:
        """Return whether rotations of a longrope model may differ between rows or change on the way.

        The cache would hold keys of other rotations; generate computes it again.
        """
        switch = self.plain.switch
        if switch is None:
            return False
        kinds = rotation_kinds(prompts, self.config.max_new_tokens, switch)
        changes = bool((kinds != kinds[0]).any() or kinds[0] > 0)
        if changes and not self._warned_of_rotations:
            self._warned_of_rotations = True
            self.warn(f"sampling with transformers' generate, which is slower: {changing_rotations(switch)}")
        return changes

    def _choose_decoder(self, prompts: Prompts) -> str:
        """Choose the fastest decoder that agrees with the model, alike on all ranks: they try the same prompts."""
        length, reason = self.config.max_new_tokens, ""
        for uses in self._candidates():
            try:
                with (
                    torch.no_grad(),
                    evaluation_mode(self.model),
                    autocast(self.dtype, self.device),
                    exact_products(self.device),
                ):
                    decoder = self._decoder(prompts, uses, longest=TOKENS + STEPS)
                    if uses != "model" and not isinstance(decoder, FusedDecoder):
                        raise UnsupportedModel("its rotations change within a few tokens")
                    verify_decoder(
                        self.model,
                        decoder,
                        prompts,
                        length=length,
                        dtype=self.dtype,
                        device=self.device,
                        cache=self._trial_cache if uses == "recorded" else None,
                    )
                return uses
            except UnsupportedModel as error:
                reason = str(error)
                if uses != "model":
                    slower = "the model's own modules" if uses == "lean" else "steps recorded again as rows come and go"
                    self.warn(f"decoding by {slower}, which is slower: {reason}")
        self.warn(f"sampling with transformers' generate, which is slower: {reason}")
        return "generate"

    def _candidates(self) -> list[str]:
        """Return the decoders to try, the fastest first."""
        lean = ["lean", "model"] if self._lean_fits else ["model"]
        records = self._lean_fits and self.static and self.device.type == "cuda" and not limits_of(self.config).are_on
        return ["recorded", *lean] if records else lean

    def _trial_cache(self, lanes: int, rows: int, width: int, length: int) -> TrialCache:
        dtype = torch.bfloat16 if self.dtype == "bfloat16" else self._fused_decoder(rows, width + length).dtype
        return TrialCache(lanes, width, length, dtype=dtype, device=self.device)

    def _sample_rows(self, prompts: Prompts, key: int | None, group_size: int) -> Completions:
        with torch.no_grad(), evaluation_mode(self.model), autocast(self.dtype, self.device):
            if self.uses == "recorded" and self._may_copy_prompts(prompts):
                ids, logprobs = self._replay(prompts, key)
                ends = torch.tensor(self.eos_ids, dtype=torch.long)
                drawn = _Generated(ids, logprobs, *completion_lengths(ids, ends))
            else:
                drawn = self._generate(prompts, key)
        width = int(drawn.lengths.max())
        mask = torch.arange(width) < drawn.lengths[:, None]
        supports = drawn.supports
        return extend(
            Completions,
            prompts,
            completion_ids=torch.where(mask, drawn.ids[:, :width], self.pad_id),
            completion_mask=mask,
            sampler_logprobs=torch.where(mask, drawn.logprobs[:, :width], 0.0),
            finished=drawn.finished,
            group_size=group_size,
            sampler_support=None if supports is None else supports[:, :width] * mask[..., None],
        )

    def _generate(self, prompts: Prompts, key: int | None) -> _Generated:
        """Decode over a cache in which the rows of a prompt share it."""
        decoder = self._decoder(prompts, self.uses)
        static = self.static and isinstance(decoder, FusedDecoder)
        if static and self.device.type == "cuda":
            decoder = GraphDecoder(decoder, self._recorder)
        batch = GenerationBatch(
            prompts,
            self.model,
            decoder,
            self.config,
            key=key,
            device=self.device,
            prefixes=self.prefixes,
            static=static,
        )
        return batch.generate(self.eos_ids)

    @cached_property
    def _recorder(self) -> GraphRecorder:
        return GraphRecorder()

    def _may_copy_prompts(self, prompts: Prompts) -> bool:
        """Return whether a copy of its prompt for every row at most doubles the cache, and rotations reach as far."""
        longest = int(prompts.prompt_mask.sum(dim=1).max())
        alone = len(unique_prompts(prompts)[0]) == len(prompts)
        return (alone or longest <= self.config.max_new_tokens) and supports_length(
            self.model, self._positions(prompts)
        )

    def _replay(self, prompts: Prompts, key: int | None) -> tuple[Int[Tensor, "B T"], Float[Tensor, "B T"]]:
        """Decode by recorded steps, on buffers that stay as long as the rows of a rollout fit into them.

        There is one set of them for rollouts of all sizes: fewer rows take the steps of the next larger bucket.
        """
        _, prompt = unique_prompts(prompts)
        longest, length = int(prompts.prompt_mask.sum(dim=1).max()), self.config.max_new_tokens
        size = min(self.config.batch_size, len(prompts))
        longest = -(-longest // COLUMN_MULTIPLE) * COLUMN_MULTIPLE
        decoder = self._refreshed_decoder(size, longest + length)
        kept = self.kept.steps.get(self)
        if kept is None or kept.slots.prompt < longest or kept.slots.size < size:
            if kept is not None:
                longest, size = max(longest, kept.slots.prompt), max(size, kept.slots.size)
            self.kept.steps.pop(self, None)
            kept = None  # frees its memory before the next one takes more
            slots = RowSlots(size, longest, length, dtype=decoder.dtype, device=self.device)
            kept = self.kept.steps[self] = RecordedSampler(
                decoder,
                slots,
                self._recorder,
                length=length,
                temperature=self.config.temperature,
                ends=self.eos_ids,
            )
        return RecordedGeneration(kept, self.model, prompts, prompt, key=key, prefixes=self.prefixes).generate()

    def _refreshed_decoder(self, rows: int, positions: int) -> FusedDecoder:
        """Return the decoder that all recorded steps share, with the current weights; made again if it is too short."""
        kept = self.kept.decoder
        if kept is None or kept.positions < positions or not kept.refresh(self.model):
            kept = None
            self.release()  # or there were two copies of the weights for a moment
            kept = self.kept.decoder = self._fused_decoder(rows, positions)
        return kept

    def _positions(self, prompts: Prompts) -> int:
        return prompts.prompt_ids.shape[1] + self.config.max_new_tokens + STEPS

    def _fused_decoder(self, rows: int, positions: int) -> FusedDecoder:
        low = torch.bfloat16 if self.dtype == "bfloat16" else None
        return FusedDecoder(self.model, rows=rows, positions=positions, low=low)

    def _decoder(self, prompts: Prompts, uses: str | None, *, longest: int | None = None) -> Decoder:
        """Make the named decoder, or the one of the model's own modules if sequences are too long for the lean one.

        `longest` is given if no sequence will have more tokens than that, as in the trial.
        """
        positions = self._positions(prompts)
        positions = positions if longest is None else min(positions, longest)
        if uses not in ("lean", "recorded") or not supports_length(self.model, positions):
            return ModelDecoder(self.model)
        return self._fused_decoder(min(self.config.batch_size, len(prompts)), positions)
