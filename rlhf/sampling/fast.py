"""The fast sampler: one prefill a prompt, its keys and values shared by its group, finished rows gone at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor

from rlhf.config.sections import SamplingConfig
from rlhf.models.backbone import CausalLM, autocast
from rlhf.runtime.engine import Engine
from rlhf.sampling.decoders import Decoder, ModelDecoder
from rlhf.sampling.flight import Flight
from rlhf.sampling.hf import repeat_rows
from rlhf.sampling.lean import LeanDecoder, fits
from rlhf.types import Completions, Prompts, extend


class FastSampler:
    """Samples as HFSampler does: the same numbers decide, so the same completions come out (float32)."""

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
    ) -> None:
        """`engine` is the one that the model was given to, if it was; without `lean` the model's own modules are used."""
        self.model = model
        self.config = config
        self.eos_ids = eos_ids
        self.pad_id = pad_id
        self.dtype = dtype
        self.device = device
        self.engine = engine or Engine(device)
        self.lean = lean and fits(model)

    def sample(self, prompts: Prompts, *, key: int, group_size: int, greedy: bool = False) -> Completions:
        """See Sampler.sample; `greedy` takes the most likely token instead."""
        repeated = repeat_rows(prompts, group_size)
        with self.engine.whole(self.model):
            return self.engine.ranks.spread(repeated, lambda share: self._share(share, key, group_size, greedy))

    @torch.no_grad()
    def _share(self, prompts: Prompts, key: int, group_size: int, greedy: bool) -> Completions:
        was_training = self.model.training
        self.model.eval()
        try:
            with autocast(self.dtype, self.device):
                flight = Flight(
                    prompts,
                    self.model,
                    self._decoder(prompts),
                    self.config,
                    key=None if greedy else key,
                    windows=True,
                    device=self.device,
                )
                ids, logprobs, lengths, finished = flight.land(self.eos_ids)
        finally:
            self.model.train(was_training)
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

    def _decoder(self, prompts: Prompts) -> Decoder:
        if not self.lean:
            return ModelDecoder(self.model)
        return LeanDecoder(
            self.model,
            rows=min(self.config.batch_size, len(prompts)),
            positions=prompts.prompt_ids.shape[1] + self.config.max_new_tokens,
            low=torch.bfloat16 if self.dtype == "bfloat16" else None,
        )
