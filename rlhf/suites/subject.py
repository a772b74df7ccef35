"""The model that a suite evaluates: its prompts, its answers, and the ends at which answers are cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf.batching import concat, widen
from rlhf.config.data import ChatFormat
from rlhf.config.run import Dtype
from rlhf.config.sections import SamplingConfig
from rlhf.data.conversation import Prompt
from rlhf.data.pairs import CompletionRows
from rlhf.data.rows import BadRow
from rlhf.data.templates import Rendered
from rlhf.data.tokenizer import Encoder, left_pad, load_tokenizer, make_encoder, right_pad
from rlhf.errors import DataError
from rlhf.models.backbone import (
    CausalLM,
    autocast,
    check_vocabulary,
    context_length,
    eos_ids,
    freeze,
    load_causal_lm,
    move_to,
)
from rlhf.models.logprobs import completion_outputs
from rlhf.rewards.source import decode, unpadded_ids
from rlhf.runtime.device import usable_dtype
from rlhf.sampling.sampler import Sampler, make_sampler
from rlhf.types import Completions, Prompts

if TYPE_CHECKING:
    from rlhf.suites.suite import SuiteSamplingConfig


@dataclass(frozen=True, kw_only=True)
class SequenceScores:
    """A model's log-probabilities of completions; in one of several turns the assistant's tokens alone count."""

    logprobs: Float[Tensor, " N"]  # summed over tokens; nats, float64
    greedy: Bool[Tensor, " N"]  # every token is the model's most likely one


@dataclass(frozen=True)
class Subject:
    """A frozen model with its encoder and sampler."""

    path: str
    model: CausalLM
    encoder: Encoder
    sampler: Sampler
    sampling: SuiteSamplingConfig
    dtype: str
    device: torch.device
    rows_per_pass: int

    @property
    def context(self) -> int | None:
        """Return the longest sequence the model reads, in tokens; None if its configuration does not say."""
        return context_length(self.model)

    def render_question(self, text: str) -> Rendered:
        """Render a question as a prompt: a user's turn if there is a chat template, else the text itself.

        Raises:
            DataError: the chat template rejects it.
        """
        prompt: Prompt = [{"role": "user", "content": text}] if self.encoder.template.source else text
        try:
            return self.encoder.render(prompt)
        except BadRow as bad:
            raise DataError(f"{self.path}: {bad}; chat_template=none asks without the template") from bad

    def sample(
        self, ids: Sequence[list[int]], texts: Sequence[str], *, key: int, count: int = 1, greedy: bool = False
    ) -> Completions:
        """Sample `count` completions of each prompt, given as token ids and as the text a reward reads.

        The completions of one prompt are adjacent. Prompt i uses the random numbers of row i, in any
        batches. Prompts of similar length share a batch, because the sampler pads its cache to the longest.
        """
        size = max(1, self.sampling.batch_size // count)
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
        drawn = [
            self.sampler.sample(
                self._prompts(ids, texts, order[start : start + size]), key=key, group_size=count, greedy=greedy
            )
            for start in range(0, len(order), size)
        ]
        position = torch.tensor(order).argsort()
        return concat(drawn).rows((position[:, None] * count + torch.arange(count)).flatten())

    def _prompts(self, ids: Sequence[list[int]], texts: Sequence[str], part: Sequence[int]) -> Prompts:
        prompt_ids, mask = left_pad([ids[i] for i in part], self.encoder.pad_id)
        return Prompts(
            prompt_ids=prompt_ids,
            prompt_mask=mask,
            row_ids=torch.tensor(list(part)),
            references=tuple({"prompt": texts[i]} for i in part),
        )

    def texts(self, completions: Completions) -> list[str]:
        """Decode every completion, without special tokens."""
        return decode(completions, self.encoder.tokenizer).completions

    def logprobs(self, rows: CompletionRows) -> Float[Tensor, " N"]:
        """Compute the log-probability of every completion, as in `score`."""
        return self.score(rows).logprobs

    @torch.no_grad()
    def score(self, rows: CompletionRows) -> SequenceScores:
        """Compute the log-probability of every completion at temperature 1, and whether it is the greedy one.

        Rows of similar length share a forward pass.
        """
        result = SequenceScores(
            logprobs=torch.zeros(len(rows), dtype=torch.float64), greedy=torch.zeros(len(rows), dtype=torch.bool)
        )
        order = rows.by_length()
        for start in range(0, len(order), self.rows_per_pass):
            part = order[start : start + self.rows_per_pass]
            batch = rows.collate(part).to(self.device)
            with autocast(self.dtype, self.device):
                tokens = completion_outputs(
                    self.model,
                    batch.prompt_ids,
                    batch.prompt_mask,
                    batch.completion_ids,
                    batch.completion_mask,
                    temperature=1.0,
                )
            index = torch.tensor(part)
            result.logprobs[index] = widen(torch.where(batch.loss_mask, tokens.logprobs, 0.0)).sum(dim=1).cpu().double()
            result.greedy[index] = (tokens.first_choice | ~batch.loss_mask).all(dim=1).cpu()
        return result

    def with_sampling(self, sampling: SuiteSamplingConfig) -> Subject:
        """Return the same model with other sampling settings."""
        sampler = _sampler(self.model, self.encoder, sampling, self.dtype, self.device)
        return replace(self, sampling=sampling, sampler=sampler)


def load_subject(
    folder: str,
    *,
    path: str,
    sampling: SuiteSamplingConfig,
    chat_template: str | ChatFormat,
    dtype: Dtype,
    device: torch.device,
    rows_per_pass: int,
    trust_remote_code: bool,
    encoder: Encoder | None = None,
) -> Subject:
    """Load a causal LM from a folder or by a hub id, frozen and ready to be evaluated.

    Args:
        folder: the folder of the weights, or a hub id.
        path: the name that the user gave it, for messages.
        chat_template: as `data.chat_template`.
        dtype: the precision of the arithmetic.
        encoder: the encoder of the model to compare with, whose token ids it must share; None: the model's own.

    Raises:
        ModelError: there is no model, it is a reward model, or its vocabulary does not match the encoder's.
    """
    if encoder is None:
        encoder = make_encoder(load_tokenizer(folder, trust_remote_code=trust_remote_code), chat_template)
    dtype = usable_dtype(dtype, device)
    model = load_causal_lm(folder, dtype=dtype, trust_remote_code=trust_remote_code)
    check_vocabulary(model, encoder.tokenizer, folder)
    model = move_to(freeze(model), device)
    sampler = _sampler(model, encoder, sampling, dtype, device)
    return Subject(path, model, encoder, sampler, sampling, dtype, device, rows_per_pass)


def _sampler(
    model: CausalLM, encoder: Encoder, sampling: SuiteSamplingConfig, dtype: str, device: torch.device
) -> Sampler:
    """Make a sampler that stops at the EOS ids of the model and the end ids of the encoder."""
    return make_sampler(
        model,
        SamplingConfig(**sampling.model_dump()),
        eos_ids=tuple(sorted({*eos_ids(model, encoder.tokenizer), *encoder.stop_ids})),
        pad_id=encoder.pad_id,
        dtype=dtype,
        device=device,
    )


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """Cut a text before the first stop text in it."""
    ends = [start for stop in stops if stop and (start := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text


def cut_completions_at_stop(
    completions: Completions, subject: Subject, stops: Sequence[str]
) -> tuple[Completions, int]:
    """Cut completions before their first stop text and end them with EOS; return all of them and how many were cut.

    If any was cut, the `sampler_logprobs` of all of them are zero.
    """
    texts = decode(completions, subject.encoder.tokenizer)
    _, ids = unpadded_ids(completions)
    shortened = [i for i, text in enumerate(texts.completions) if cut_at_stop(text, stops) != text]
    if not shortened:
        return completions, 0
    for i in shortened:
        rendered = Rendered(texts.prompts[i], (cut_at_stop(texts.completions[i], stops),), templated=False)
        ids[i] = subject.encoder.completions([rendered], 0)[0]
    ended = torch.zeros(len(completions), dtype=torch.bool)
    ended[shortened] = True
    return with_completions(completions, ids, subject, finished=completions.finished | ended), len(shortened)


def with_completions(
    prompts: Completions, ids: Sequence[list[int]], subject: Subject, *, finished: torch.Tensor
) -> Completions:
    """Replace the completions of a batch by others, given as token ids; `sampler_logprobs` are zero."""
    completion_ids, mask = right_pad(ids, subject.encoder.pad_id)
    return Completions(
        prompt_ids=prompts.prompt_ids,
        prompt_mask=prompts.prompt_mask,
        row_ids=prompts.row_ids,
        references=prompts.references,
        completion_ids=completion_ids,
        completion_mask=mask,
        sampler_logprobs=torch.zeros(completion_ids.shape),
        finished=finished,
        group_size=prompts.group_size,
    )
