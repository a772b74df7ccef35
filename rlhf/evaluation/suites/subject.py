"""The model that a suite measures: what it says of texts, and what it writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf.config.data import ChatFormat
from rlhf.config.sections import Dtype, SamplingConfig
from rlhf.data.annotated import CompletionRows
from rlhf.data.chat import Rendered, load_tokenizer
from rlhf.data.conversation import Prompt
from rlhf.data.encode import Encoder, make_encoder
from rlhf.data.pad import left_pad
from rlhf.data.row import BadRow
from rlhf.errors import DataError, ModelError
from rlhf.evaluation.suites.settings import Writing
from rlhf.models.backbone import (
    CausalLM,
    autocast,
    check_vocabulary,
    context_length,
    eos_ids,
    freeze,
    load_causal_lm,
    load_model_config,
    place,
)
from rlhf.models.logprobs import completion_outputs
from rlhf.rewards.texts import decode
from rlhf.sampling.choice import make_sampler
from rlhf.sampling.sampler import Sampler
from rlhf.types import Completions, Prompts, concat


@dataclass(frozen=True, kw_only=True)
class Said:
    """What a model says of whole completions."""

    logprobs: Float[Tensor, " N"]  # summed over tokens; nats, float64
    greedy: Bool[Tensor, " N"]  # every token is the model's most likely one


@dataclass(frozen=True)
class Subject:
    """A frozen model with its encoder and its sampler."""

    path: str
    model: CausalLM
    encoder: Encoder
    sampler: Sampler
    sampling: Writing
    dtype: str
    device: torch.device
    rows_per_pass: int

    @property
    def context(self) -> int | None:
        """The longest sequence it reads, where its configuration says."""
        return context_length(self.model)

    def ask(self, text: str) -> Rendered:
        """A question as the model is given it: a user's turn where there is a chat template, else the text itself.

        Raises:
            DataError: the chat template refuses it.
        """
        asked: Prompt = [{"role": "user", "content": text}] if self.encoder.template.source else text
        try:
            return self.encoder.render(asked)
        except BadRow as bad:
            raise DataError(f"{self.path}: {bad}; chat_template=none asks without the template") from bad

    def sample(
        self, ids: Sequence[list[int]], texts: Sequence[str], *, key: int, count: int = 1, greedy: bool = False
    ) -> Completions:
        """Sample `count` completions of each prompt, given as token ids and as the text a reward reads.

        Those of one prompt stand together; prompt i has the random numbers of row i, whatever the batches are. Prompts
        of like length share a batch: the sampler pads its cache to the longest.
        """
        size = max(1, self.sampling.batch_size // count)
        order = sorted(range(len(ids)), key=lambda number: len(ids[number]))
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
        """Each completion as text, without special tokens."""
        return decode(completions, self.encoder.tokenizer).completions

    def logprobs(self, rows: CompletionRows, *, temperature: float = 1.0) -> Float[Tensor, " N"]:
        """The log-probability of every completion, summed over its tokens, in nats; float64."""
        return self.says(rows, temperature=temperature).logprobs

    @torch.no_grad()
    def says(self, rows: CompletionRows, *, temperature: float = 1.0) -> Said:
        """What the model says of every completion; rows of like length share a pass."""
        found = Said(
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
                    temperature=temperature,
                )
            at = torch.tensor(part)
            found.logprobs[at] = tokens.logprobs.double().sum(dim=1).cpu()
            found.greedy[at] = (tokens.first_choice | ~batch.completion_mask).all(dim=1).cpu()
        return found

    def writing(self, sampling: Writing) -> Subject:
        """The same model, writing in another way."""
        sampler = _sampler(self.model, self.encoder, sampling, self.dtype, self.device)
        return replace(self, sampling=sampling, sampler=sampler)


def load_subject(
    folder: str,
    *,
    path: str,
    sampling: Writing,
    chat_template: str | ChatFormat,
    dtype: Dtype,
    device: torch.device,
    rows_per_pass: int,
    trust_remote_code: bool,
    encoder: Encoder | None = None,
) -> Subject:
    """The causal LM in a folder or under a hub id, ready to be measured.

    Args:
        folder: where the weights are.
        path: what the user called it.
        sampling: how it writes.
        chat_template: as `data.chat_template`.
        dtype: of the arithmetic.
        device: where it runs.
        rows_per_pass: rows of a forward pass; memory only.
        trust_remote_code: run code that comes with a hub model.
        encoder: of the model this one is compared with, whose token ids it must share; None: its own.

    Raises:
        ModelError: there is none, it is a reward model, or its vocabulary is another than the encoder's.
    """
    architectures = load_model_config(folder, trust_remote_code=trust_remote_code).architectures or []
    if any("SequenceClassification" in name for name in architectures):
        raise ModelError(f"{path} is a reward model: it writes nothing. Name a run of a policy, or a causal LM")
    if encoder is None:
        encoder = make_encoder(load_tokenizer(folder, trust_remote_code=trust_remote_code), chat_template)
    model = load_causal_lm(folder, dtype=dtype, trust_remote_code=trust_remote_code)
    check_vocabulary(model, encoder.tokenizer, folder)
    model = place(freeze(model), device)
    sampler = _sampler(model, encoder, sampling, dtype, device)
    return Subject(path, model, encoder, sampler, sampling, dtype, device, rows_per_pass)


def _sampler(model: CausalLM, encoder: Encoder, sampling: Writing, dtype: str, device: torch.device) -> Sampler:
    return make_sampler(
        model,
        SamplingConfig(**sampling.model_dump()),
        eos_ids=tuple(sorted({*eos_ids(model, encoder.tokenizer), *encoder.end_ids})),
        pad_id=encoder.pad_id,
        dtype=dtype,
        device=device,
    )
