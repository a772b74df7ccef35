"""The reference sampler: transformers' generate on the current weights, one uniform number per (row, position).

A token is drawn by inverting the cumulative probabilities, here and, in blocks, in the fast samplers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from rlhf.algo.support import SamplingLimits, pack
from rlhf.batching import concat, extend
from rlhf.config.sections import SamplingConfig
from rlhf.models.backbone import CausalLM, autocast, evaluation_mode
from rlhf.models.text_config import text_config
from rlhf.runtime.engine import Engine
from rlhf.runtime.seeding import uniforms
from rlhf.sampling.support import limits_of
from rlhf.types import Completions, Prompts


class HFSampler:
    """Samples from the full distribution at a temperature, by inverting its cumulative sum.

    The model must come from rlhf.models.backbone, which drops the model folder's top-k and penalties; generate would
    apply them.
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
    ) -> None:
        """Create a sampler; `engine` is the one that holds the model, if any: rows are distributed over its ranks."""
        self.model = model
        self.config = config
        self.eos_ids = eos_ids
        self.pad_id = pad_id
        self.dtype = dtype
        self.device = device
        self.engine = engine or Engine(device)
        self.switch = rotation_switch(model)

    def sample(self, prompts: Prompts, *, key: int, group_size: int, greedy: bool = False) -> Completions:
        """Sample completions; see Sampler.sample."""
        repeated = repeat_rows(prompts, group_size)

        def sample(rows: Prompts) -> Completions:
            return concat([self._sample(part, key, group_size, greedy) for part in self._batches(rows)])

        with self.engine.whole(self.model, self.dtype):
            rows = self.engine.ranks.spread(repeated, sample)
        return replace(rows, completion_ids=torch.where(rows.completion_mask, rows.completion_ids, self.pad_id))

    def _batches(self, rows: Prompts) -> Iterator[Prompts]:
        """Yield batches of consecutive rows; if rotations change with the length, they change alike in a batch."""
        if self.switch is None:
            yield from rows.split(self.config.batch_size)
            return
        kinds = rotation_kinds(rows, self.config.max_new_tokens, self.switch)
        runs = kinds.unique_consecutive(return_counts=True)[1].tolist()
        for run in torch.arange(len(rows)).split(runs):
            yield from rows.rows(run).split(self.config.batch_size)

    def _may_cache(self, prompts: Prompts) -> bool:
        """Return whether keys and values may be cached: they hold until rotations change, unless generate knows that.

        Of the models with such rotations, Phi's kind have their cache computed again by generate itself.
        """
        if self.switch is None or int(rotation_kinds(prompts, self.config.max_new_tokens, self.switch).max()) <= 0:
            return True
        return getattr(text_config(self.model), "original_max_position_embeddings", None) == self.switch

    @torch.no_grad()
    def _sample(self, prompts: Prompts, key: int, group_size: int, greedy: bool) -> Completions:
        start = prompts.prompt_ids.shape[1] if self.switch is None else int(prompts.prompt_mask.sum(dim=1).max())
        draw = _DrawTokens(
            prompts.row_ids.to(self.device),
            key,
            start,
            self.config.max_new_tokens,
            self.config.temperature,
            greedy,
            limits_of(self.config),
        )
        with evaluation_mode(self.model), autocast(self.dtype, self.device):
            output = self.model.generate(  # type: ignore[operator]  # of its GenerationMixin, which its type lacks
                input_ids=prompts.prompt_ids[:, -start:].to(self.device),
                attention_mask=prompts.prompt_mask[:, -start:].long().to(self.device),
                generation_config=GenerationConfig(
                    do_sample=False,
                    num_beams=1,
                    max_new_tokens=self.config.max_new_tokens,
                    eos_token_id=list(self.eos_ids),
                    pad_token_id=self.pad_id,
                    use_cache=self._may_cache(prompts),
                ),
                logits_processor=LogitsProcessorList([draw]),
                synced_gpus=self.engine.samples_in_layers,  # ranks whose rows are complete go on with the others
            )
        completion_ids = output[:, start:].cpu()
        lengths, finished = completion_lengths(completion_ids, torch.tensor(self.eos_ids))
        mask = torch.arange(completion_ids.shape[1]) < lengths[:, None]
        return extend(
            Completions,
            prompts,
            completion_ids=completion_ids,
            completion_mask=mask,
            sampler_logprobs=torch.where(mask, draw.logprobs[:, : completion_ids.shape[1]].cpu(), 0.0),
            finished=finished,
            group_size=group_size,
            sampler_support=draw.support_of(mask),
        )


def completion_lengths(
    ids: Int[Tensor, "B T"], ends: Int[Tensor, " E"]
) -> tuple[Int[Tensor, " B"], Bool[Tensor, " B"]]:
    """Count each row's tokens up to and including the first that ends it, and flag the rows that have one."""
    ended = torch.isin(ids, ends)
    finished = ended.any(dim=1)
    return torch.where(finished, ended.int().argmax(dim=1) + 1, ids.shape[1]), finished


def rotation_switch(model: CausalLM) -> int | None:
    """Return the length (tokens) beyond which a longrope model rotates all of a sequence differently; else None."""
    parameters = getattr(text_config(model), "rope_parameters", None) or {}
    kinds = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
    lengths = [int(kind["original_max_position_embeddings"]) for kind in kinds if kind.get("rope_type") == "longrope"]
    return min(lengths, default=None)


def rotation_kinds(prompts: Prompts, max_new_tokens: int, switch: int) -> Int[Tensor, " B"]:
    """Return for each row 0 if it never goes beyond `switch`, -1 if its prompt does, else its prompt's length.

    Rows of one number change rotations at the same token, or never.
    """
    lengths = prompts.prompt_mask.sum(dim=1)
    longest_read = lengths + max_new_tokens - 1  # the last token drawn is not read
    return torch.where(lengths > switch, -1, torch.where(longest_read <= switch, 0, lengths))


def repeat_rows(prompts: Prompts, group_size: int) -> Prompts:
    """Repeat each prompt `group_size` times in consecutive rows, each with its own row id."""
    repeated = prompts.rows(torch.arange(len(prompts)).repeat_interleave(group_size))
    return Prompts(
        prompt_ids=repeated.prompt_ids,
        prompt_mask=repeated.prompt_mask,
        row_ids=repeated.row_ids * group_size + torch.arange(len(repeated)) % group_size,
        references=repeated.references,
    )


class _DrawTokens(LogitsProcessor):
    """Draws the token itself: all scores but that token's become -inf, so that generate's argmax selects it."""

    def __init__(
        self,
        rows: Int[Tensor, " B"],
        key: int,
        start: int,
        max_new_tokens: int,
        temperature: float,
        greedy: bool,
        limits: SamplingLimits,
    ) -> None:
        self.rows, self.key, self.start, self.limits = rows, key, start, limits
        self.temperature, self.greedy = temperature, greedy
        self.logprobs = torch.zeros(len(rows), max_new_tokens, device=rows.device)
        self.supports: list[Tensor] = []  # by position, of all rows: which tokens could be drawn

    def __call__(self, input_ids: Int[Tensor, "B L"], scores: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        position = input_ids.shape[1] - self.start
        wide = scores if scores.dtype == torch.float64 else scores.float()
        log_softmax = (wide / self.temperature).log_softmax(dim=-1)
        if self.limits.are_on:
            support = self.limits.support(log_softmax.exp())
            log_softmax = log_softmax.masked_fill(~support, -torch.inf).log_softmax(dim=-1)
            self.supports.append(pack(support))
        if self.greedy:
            token = wide.argmax(dim=-1)
        else:
            uniform = uniforms(self.key, self.rows, torch.full_like(self.rows, position))
            token = draw(log_softmax.to(uniform.device), uniform).to(scores.device)
        if self.logprobs.dtype != log_softmax.dtype:
            self.logprobs = self.logprobs.to(log_softmax.dtype)
        self.logprobs[:, position] = log_softmax.gather(1, token[:, None]).squeeze(1)
        return torch.full_like(scores, -torch.inf).scatter_(1, token[:, None], 0.0)

    def support_of(self, mask: Bool[Tensor, "B T"]) -> UInt8[Tensor, "B T W"] | None:
        """Return which tokens could be drawn, packed and zero outside the mask; None if all could."""
        if not self.supports:
            return None
        return torch.stack(self.supports[: mask.shape[1]], dim=1).cpu() * mask[..., None]


def draw(log_softmax: Float[Tensor, "B V"], uniform: Float[Tensor, " B"]) -> Int[Tensor, " B"]:
    """Return the token at which the cumulative probability first exceeds `uniform`, summed in float64."""
    cumulative = log_softmax.double().exp().cumsum(dim=-1)
    threshold = uniform * cumulative[:, -1]
    return torch.searchsorted(cumulative, threshold[:, None], right=True).squeeze(1).clamp(max=log_softmax.shape[1] - 1)
