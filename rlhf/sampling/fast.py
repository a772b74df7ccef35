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
from rlhf.sampling.graphs import GraphDecoder
from rlhf.sampling.hf import HFSampler, repeat_rows
from rlhf.sampling.lean import LeanDecoder, fits, reaches
from rlhf.sampling.trial import STEPS, TOKENS, trial
from rlhf.types import Completions, Prompts, extend


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
        static: bool | None = None,
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
            static: whether steps are made to be recorded, and on a GPU are; None: on a GPU.
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
        self.static = device.type == "cuda" if static is None else static
        self.plain = HFSampler(
            model, config, eos_ids=eos_ids, pad_id=pad_id, dtype=dtype, device=device, engine=self.engine
        )
        self.uses: str | None = None  # lean, model or generate, once that is settled; lean: where it reaches
        self._lean_fits = lean and fits(model)

    def sample(self, prompts: Prompts, *, key: int, group_size: int, greedy: bool = False) -> Completions:
        """See Sampler.sample; `greedy` takes the most likely token instead."""
        repeated = repeat_rows(prompts, group_size)
        with self.engine.whole(self.model):
            if self.uses is None:
                self.uses = self._settle(repeated)
            if self.uses != "generate":
                return self.engine.ranks.spread(
                    repeated, lambda share: self._share(share, None if greedy else key, group_size)
                )
        return self.plain.sample(prompts, key=key, group_size=group_size, greedy=greedy)

    def _settle(self, prompts: Prompts) -> str:
        """Which decoder is used, in all processes alike: they all try the same prompts."""
        length, reason = self.config.max_new_tokens, ""
        for uses in ("lean", "model") if self._lean_fits else ("model",):
            try:
                with _quiet(self.model), autocast(self.dtype, self.device):
                    decoder = self._decoder(prompts, uses, longest=TOKENS + STEPS)
                    if uses == "lean" and not isinstance(decoder, LeanDecoder):
                        raise Unsupported("its rotations change within a few tokens")
                    trial(self.model, decoder, prompts, length=length, dtype=self.dtype, device=self.device)
                return uses
            except Unsupported as error:
                reason = str(error)
                if uses == "lean":
                    self.tell(f"decoding by the model's own modules, which is slower: {reason}")
        self.tell(f"sampling with transformers' generate, which is slower: {reason}")
        return "generate"

    def _share(self, prompts: Prompts, key: int | None, group_size: int) -> Completions:
        with _quiet(self.model), autocast(self.dtype, self.device):
            decoder = self._decoder(prompts, self.uses)
            static = self.static and isinstance(decoder, LeanDecoder)
            if static and self.device.type == "cuda":
                decoder = GraphDecoder(decoder)
            flight = Flight(prompts, self.model, decoder, self.config, key=key, device=self.device, static=static)
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

    def _decoder(self, prompts: Prompts, uses: str | None, *, longest: int | None = None) -> Decoder:
        """Make the decoder of that name; but the model's own modules for sequences that the lean one does not reach.

        `longest` is told where no sequence will have more tokens than that, as in the trial.
        """
        positions = prompts.prompt_ids.shape[1] + self.config.max_new_tokens + STEPS
        positions = positions if longest is None else min(positions, longest)
        if uses != "lean" or not reaches(self.model, positions):
            return ModelDecoder(self.model)
        return LeanDecoder(
            self.model,
            rows=min(self.config.batch_size, len(prompts)),
            positions=positions,
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
