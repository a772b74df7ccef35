"""The fast sampler: one prefill per prompt, keys and values shared by its group, finished rows leave the batch."""

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
    """Samples the same completions as HFSampler, from the same random numbers (in float32).

    Before the first completions its decoders are checked against the model, the fastest first; where none agrees with
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
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Create a sampler that reads the model's current weights at every call.

        Args:
            model: the model to sample from.
            config: temperature, batch size, length.
            eos_ids: tokens that end a completion.
            pad_id: the token that fills rows after their end.
            dtype: of the arithmetic, as policy.dtype.
            device: where the model is.
            engine: the engine that holds the model, if any: rows are distributed over its ranks.
            lean: whether the lean decoder may be used; otherwise only the model's own modules are.
            static: whether steps can be recorded (see Slots), as CUDA graphs on a GPU; None: on a GPU only.
            tell: called with the reason when a slower way is used.
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
        self.uses: str | None = None  # lean, model or generate, once chosen; lean only for lengths that it `reaches`
        self._lean_fits = lean and fits(model)

    def sample(self, prompts: Prompts, *, key: int, group_size: int, greedy: bool = False) -> Completions:
        """Sample completions; see Sampler.sample."""
        repeated = repeat_rows(prompts, group_size)
        with self.engine.whole(self.model):
            if self.uses is None:
                self.uses = self._choose_decoder(repeated)
            if self.uses != "generate":
                return self.engine.ranks.spread(
                    repeated, lambda rows: self._sample_rows(rows, None if greedy else key, group_size)
                )
        return self.plain.sample(prompts, key=key, group_size=group_size, greedy=greedy)

    def _choose_decoder(self, prompts: Prompts) -> str:
        """Choose the fastest decoder that agrees with the model, alike on all ranks: they try the same prompts."""
        length, reason = self.config.max_new_tokens, ""
        for uses in ("lean", "model") if self._lean_fits else ("model",):
            try:
                with _eval_without_grad(self.model), autocast(self.dtype, self.device):
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

    def _sample_rows(self, prompts: Prompts, key: int | None, group_size: int) -> Completions:
        with _eval_without_grad(self.model), autocast(self.dtype, self.device):
            decoder = self._decoder(prompts, self.uses)
            static = self.static and isinstance(decoder, LeanDecoder)
            if static and self.device.type == "cuda":
                decoder = GraphDecoder(decoder)
            batch = Flight(prompts, self.model, decoder, self.config, key=key, device=self.device, static=static)
            ids, logprobs, lengths, finished = batch.land(self.eos_ids)
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
        """Make the named decoder, or that of the model's own modules if sequences are too long for the lean one.

        `longest` is given where no sequence will have more tokens than that, as in the trial.
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
def _eval_without_grad(model: CausalLM) -> Iterator[None]:
    """Run the body in evaluation mode without gradients, then restore the mode."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
