"""The fast sampler: one prefill a prompt, its keys and values shared by its group, finished rows gone at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from rlhf.config.sections import SamplingConfig
from rlhf.models.backbone import CausalLM, autocast
from rlhf.runtime.engine import Engine
from rlhf.sampling.decoders import Decoder, ModelDecoder, Unsupported
from rlhf.sampling.flight import Flight
from rlhf.sampling.hf import HFSampler, repeat_rows
from rlhf.sampling.lean import LeanDecoder, fits
from rlhf.sampling.trial import STEPS, trial
from rlhf.types import Completions, Prompts, extend

Make = Callable[[Prompts], Decoder]


class FastSampler:
    """Samples as HFSampler does: the same numbers decide, so the same completions come out (float32).

    Before the first completions its decoders are tried against the model, the leanest first; where none says what the
    model says, HFSampler takes over.
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
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        """A sampler over the live weights.

        Args:
            model: what is sampled from.
            config: how.
            eos_ids: tokens that end a completion.
            pad_id: what follows the end.
            dtype: of the arithmetic, as policy.dtype.
            device: where the model is.
            engine: the one that the model was given to, if it was: rows are dealt to its processes.
            lean: without it only the model's own modules are used.
            tell: hears why HFSampler took over.
        """
        self.model = model
        self.config = config
        self.eos_ids = eos_ids
        self.pad_id = pad_id
        self.dtype = dtype
        self.device = device
        self.engine = engine or Engine(device)
        self.tell = tell
        self.plain = HFSampler(
            model, config, eos_ids=eos_ids, pad_id=pad_id, dtype=dtype, device=device, engine=self.engine
        )
        self._untried: list[Make] = [*([self._lean] if lean and fits(model) else []), lambda _: ModelDecoder(model)]
        self._make: Make | None = None  # the one that passed its trial

    def sample(self, prompts: Prompts, *, key: int, group_size: int, greedy: bool = False) -> Completions:
        """See Sampler.sample; `greedy` takes the most likely token instead."""
        repeated = repeat_rows(prompts, group_size)
        with self.engine.whole(self.model):
            if self._make is None and self._untried:
                self._try(repeated)
            make = self._make
            if make is not None:
                return self.engine.ranks.spread(
                    repeated, lambda share: self._share(share, make, None if greedy else key, group_size)
                )
        return self.plain.sample(prompts, key=key, group_size=group_size, greedy=greedy)

    def _try(self, prompts: Prompts) -> None:
        """Settle which decoder is used, in all processes alike: they all try the same prompts."""
        for number, decoder in enumerate(self._decoders(prompts)):
            try:
                with _quiet(self.model), autocast(self.dtype, self.device):
                    self._trial(decoder, prompts)
            except Unsupported as error:
                reason = str(error)
                continue
            self._make = self._untried[number]
            break
        else:
            self.tell(f"sampling with transformers' generate, which is slower: {reason}")
        self._untried = []

    def _trial(self, decoder: Decoder, prompts: Prompts) -> None:
        length = self.config.max_new_tokens
        trial(self.model, decoder, prompts, length=length, dtype=self.dtype, device=self.device)

    def _share(self, prompts: Prompts, make: Make, key: int | None, group_size: int) -> Completions:
        with _quiet(self.model), autocast(self.dtype, self.device):
            flight = Flight(prompts, self.model, make(prompts), self.config, key=key, device=self.device)
            ids, logprobs, lengths, finished = flight.land(self.eos_ids)
        width = int(lengths.max())
        mask = torch.arange(width) < lengths[:, None]
        return extend(
            Completions,
            prompts,
            completion_ids=torch.where(mask, ids[:, :width], self.pad_id),
            completion_mask=mask,
            sampler_logprobs=torch.where(mask, logprobs[:, :width], 0.0),
            finished=finished,
            group_size=group_size,
        )

    def _decoders(self, prompts: Prompts) -> Iterator[Decoder]:
        for make in self._untried:
            with torch.no_grad():
                yield make(prompts)

    def _lean(self, prompts: Prompts) -> Decoder:
        return LeanDecoder(
            self.model,
            rows=min(self.config.batch_size, len(prompts)),
            positions=prompts.prompt_ids.shape[1] + self.config.max_new_tokens + STEPS,
            low=torch.bfloat16 if self.dtype == "bfloat16" else None,
        )


@contextmanager
def _quiet(model: CausalLM) -> Iterator[None]:
    """Evaluation mode and no gradient, then the mode as it was."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
