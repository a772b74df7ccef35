"""Data sets of preference pairs, demonstrations and labelled completions, encoded once and collated by index.

Pairs and labelled completions may be annotated with the reference's log-probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf.batching import extend
from rlhf.config.data import ChatFormat, Learn, PreferencesConfig, SftConfig
from rlhf.data.conversation import Message, assistant_turn
from rlhf.data.datasets import (
    EncodedRow,
    Entry,
    Fit,
    PreparedRow,
    RowPipeline,
    check_ids,
)
from rlhf.data.files import load_rows
from rlhf.data.formats import DEMONSTRATIONS, LABELLED, PAIRS, DemoText, LabelledText, PairText
from rlhf.data.rows import DataRow, RowCounts
from rlhf.data.templates import Rendered, TemplateRenderer, conversation_rows
from rlhf.data.tokenizer import (
    Encoder,
    LengthLimit,
    left_pad,
    length_limit,
    make_encoder,
    right_pad,
    right_pad_flags,
    truncate_start,
)
from rlhf.types import (
    AnnotatedLabelledCompletions,
    AnnotatedPairs,
    Demonstrations,
    LabelledCompletions,
    PreferencePairs,
)

Flags = tuple[list[bool], ...]  # for each row, which tokens of its completion the assistant wrote; empty: all

T = TypeVar("T", PairText, DemoText, LabelledText)


@dataclass(frozen=True)
class CompletionRows:
    """Prompts and completions as token ids, one completion per row."""

    prompts: tuple[list[int], ...]
    completions: tuple[list[int], ...]
    pad_id: int
    learned: Flags = ()

    def __len__(self) -> int:
        return len(self.prompts)

    def by_length(self) -> list[int]:
        """Return the row indices by length, longest first: little padding, and the peak of memory comes at once."""
        lengths = [len(p) + len(c) for p, c in zip(self.prompts, self.completions, strict=True)]
        return sorted(range(len(self)), key=lambda row: (-lengths[row], row))

    def by_prompt(self) -> list[int]:
        """Return the row indices prompt by prompt, the prompt with the longest row first: each is computed once."""
        longest: dict[tuple[int, ...], int] = {}
        for prompt, completion in zip(self.prompts, self.completions, strict=True):
            key = tuple(prompt)
            longest[key] = max(longest.get(key, 0), len(prompt) + len(completion))
        return sorted(range(len(self)), key=lambda row: (-longest[tuple(self.prompts[row])], self.prompts[row], row))

    def at(self, indices: Sequence[int]) -> CompletionRows:
        """Return the rows at `indices` as a data set of their own."""
        return CompletionRows(
            tuple(self.prompts[i] for i in indices),
            tuple(self.completions[i] for i in indices),
            self.pad_id,
            tuple(self.learned[i] for i in indices) if self.learned else (),
        )

    def collate(self, indices: Sequence[int]) -> Demonstrations:
        """Collate the rows at `indices` into one batch."""
        prompt_ids, prompt_mask = left_pad([self.prompts[i] for i in indices], self.pad_id)
        completion_ids, completion_mask = right_pad([self.completions[i] for i in indices], self.pad_id)
        learned = right_pad_flags([self.learned[i] for i in indices]) if self.learned else completion_mask.clone()
        return Demonstrations(
            prompt_ids=prompt_ids,
            prompt_mask=prompt_mask,
            completion_ids=completion_ids,
            completion_mask=completion_mask,
            loss_mask=learned,
        )


@dataclass(frozen=True)
class PairSet:
    """Encoded preference pairs; `texts` are the same rows as rendered text, before truncation."""

    prompts: tuple[list[int], ...]
    chosen: tuple[list[int], ...]
    rejected: tuple[list[int], ...]
    texts: tuple[PairText, ...]
    pad_id: int
    skips: RowCounts
    chosen_learned: Flags = ()
    rejected_learned: Flags = ()

    def __len__(self) -> int:
        return len(self.texts)

    def collate(self, indices: Sequence[int]) -> PreferencePairs:
        """Collate the pairs at `indices` into one batch."""
        chosen = CompletionRows(self.prompts, self.chosen, self.pad_id, self.chosen_learned).collate(indices)
        rejected = CompletionRows(self.prompts, self.rejected, self.pad_id, self.rejected_learned).collate(indices)
        return PreferencePairs(
            prompt_ids=chosen.prompt_ids,
            prompt_mask=chosen.prompt_mask,
            chosen_ids=chosen.completion_ids,
            chosen_mask=chosen.completion_mask,
            rejected_ids=rejected.completion_ids,
            rejected_mask=rejected.completion_mask,
            chosen_learned=chosen.loss_mask,
            rejected_learned=rejected.loss_mask,
            margins=torch.tensor([self.texts[i].margin for i in indices], dtype=torch.float32),
        )


@dataclass(frozen=True)
class DemonstrationSet:
    """Encoded prompts and completions; `learned` marks the completion tokens to train on, end tokens included."""

    prompts: tuple[list[int], ...]
    completions: tuple[list[int], ...]
    texts: tuple[DemoText, ...]
    pad_id: int
    skips: RowCounts
    learned: Flags = ()

    def __len__(self) -> int:
        return len(self.texts)

    def collate(self, indices: Sequence[int]) -> Demonstrations:
        """Collate the demonstrations at `indices` into one batch."""
        return CompletionRows(self.prompts, self.completions, self.pad_id, self.learned).collate(indices)


@dataclass(frozen=True)
class LabelledSet:
    """Encoded prompts and completions, each with a label."""

    prompts: tuple[list[int], ...]
    completions: tuple[list[int], ...]
    texts: tuple[LabelledText, ...]
    pad_id: int
    skips: RowCounts

    def __len__(self) -> int:
        return len(self.texts)

    def collate(self, indices: Sequence[int]) -> LabelledCompletions:
        """Collate the labelled completions at `indices` into one batch."""
        rows = CompletionRows(self.prompts, self.completions, self.pad_id).collate(indices)
        return LabelledCompletions(
            **vars(rows), desirable=torch.tensor([self.texts[i].desirable for i in indices], dtype=torch.bool)
        )


@dataclass(frozen=True)
class AnnotatedPairSet:
    """Preference pairs with reference log-probabilities of both sides; zero for a loss without a reference model."""

    pairs: PairSet
    chosen_ref_logprobs: Float[Tensor, " N"]
    rejected_ref_logprobs: Float[Tensor, " N"]

    def __len__(self) -> int:
        return len(self.pairs)

    def collate(self, indices: Sequence[int]) -> AnnotatedPairs:
        """Collate the pairs at `indices` into one batch."""
        rows = torch.tensor(list(indices), dtype=torch.long)
        return extend(
            AnnotatedPairs,
            self.pairs.collate(indices),
            chosen_ref_logprobs=self.chosen_ref_logprobs[rows],
            rejected_ref_logprobs=self.rejected_ref_logprobs[rows],
        )


@dataclass(frozen=True)
class AnnotatedLabelledSet:
    """Single completions, each with its label and its reference log-probability."""

    rows: CompletionRows
    desirable: tuple[bool, ...]
    ref_logprobs: Float[Tensor, " N"]

    def __len__(self) -> int:
        return len(self.rows)

    def collate(self, indices: Sequence[int]) -> AnnotatedLabelledCompletions:
        """Collate the completions at `indices` into one batch."""
        return extend(
            AnnotatedLabelledCompletions,
            self.rows.collate(indices),
            desirable=torch.tensor([self.desirable[i] for i in indices], dtype=torch.bool),
            ref_logprobs=self.ref_logprobs[torch.tensor(list(indices), dtype=torch.long)],
        )


def completion_rows(dataset: PairSet | LabelledSet) -> CompletionRows:
    """Return one row per completion; for pairs, all chosen completions first, then all rejected ones."""
    if isinstance(dataset, LabelledSet):
        return CompletionRows(dataset.prompts, dataset.completions, dataset.pad_id)
    learned = dataset.chosen_learned + dataset.rejected_learned
    return CompletionRows(dataset.prompts * 2, dataset.chosen + dataset.rejected, dataset.pad_id, learned)


def completion_labels(dataset: PairSet | LabelledSet) -> tuple[bool, ...]:
    """Return the label of each row of `completion_rows`: chosen completions are desirable, rejected ones are not."""
    if isinstance(dataset, LabelledSet):
        return tuple(text.desirable for text in dataset.texts)
    return (True,) * len(dataset) + (False,) * len(dataset)


def pair_pipeline(
    config: PreferencesConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    chat_template: str | ChatFormat,
    context: int | None = None,
) -> RowPipeline[PairText, PairSet]:
    """Describe how rows become preference pairs, each side within `config.max_tokens` and `context` tokens."""
    encoder = make_encoder(tokenizer, chat_template)
    limit = length_limit(config.max_tokens, context, config.too_long)

    def collect(rows: Sequence[Entry[PairText]], skips: RowCounts) -> PairSet:
        all_ids = [ids for _, ids in rows]
        return PairSet(
            prompts=tuple(ids.prompt for ids in all_ids),
            chosen=tuple(ids.completions[0] for ids in all_ids),
            rejected=tuple(ids.completions[1] for ids in all_ids),
            texts=tuple(_rendered_pair(usable) for usable, _ in rows),
            pad_id=encoder.pad_id,
            skips=skips,
            chosen_learned=_flags(all_ids, 0),
            rejected_learned=_flags(all_ids, 1),
        )

    return RowPipeline(config, PAIRS, encoder, _prompt_truncation(encoder, limit), collect)


def _rendered_pair(usable: PreparedRow[PairText]) -> PairText:
    """Return the pair with the rendered prompt, and with whole rendered sides if they have several turns."""
    pair = replace(usable.parsed, prompt=usable.text.prompt)
    if not pair.sides:
        return pair
    chosen, rejected = usable.text.completions
    return replace(pair, chosen=chosen, rejected=rejected)


def _flags(rows: Sequence[EncodedRow], which: int) -> Flags:
    if not any(ids.learned for ids in rows):
        return ()
    return tuple(ids.learned[which] if ids.learned else [True] * len(ids.completions[which]) for ids in rows)


def labelled_pipeline(
    config: PreferencesConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    chat_template: str | ChatFormat,
    context: int | None = None,
) -> RowPipeline[LabelledText, LabelledSet]:
    """Describe how rows become labelled completions, with the limits of `pair_pipeline`."""
    encoder = make_encoder(tokenizer, chat_template)
    limit = length_limit(config.max_tokens, context, config.too_long)

    def collect(rows: Sequence[Entry[LabelledText]], skips: RowCounts) -> LabelledSet:
        return LabelledSet(
            prompts=tuple(ids.prompt for _, ids in rows),
            completions=tuple(ids.completions[0] for _, ids in rows),
            texts=tuple(replace(usable.parsed, prompt=usable.text.prompt) for usable, _ in rows),
            pad_id=encoder.pad_id,
            skips=skips,
        )

    return RowPipeline(config, LABELLED, encoder, _prompt_truncation(encoder, limit), collect)


def preference_pipeline(
    config: PreferencesConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    chat_template: str | ChatFormat,
    context: int | None = None,
) -> RowPipeline[Any, Any]:
    """Describe how rows become labelled completions if their columns say so, otherwise preference pairs."""
    columns = {name for row in load_rows(config, RowCounts(config.path)) for name in row.values}
    is_pairs, is_labelled = (any(set(shape.columns) <= columns for shape in use.shapes) for use in (PAIRS, LABELLED))
    pipeline: Callable[..., Any] = labelled_pipeline if is_labelled and not is_pairs else pair_pipeline
    result: RowPipeline[Any, Any] = pipeline(config, tokenizer, chat_template=chat_template, context=context)
    return result


def demonstration_pipeline(
    config: SftConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    chat_template: str | ChatFormat,
    context: int | None = None,
) -> RowPipeline[DemoText, DemonstrationSet]:
    """Describe how rows become demonstrations; `config.learn` selects what of a conversation is trained on.

    The prompt of a plain text is the BOS, or its first token if the tokenizer puts no BOS before a text.
    """
    encoder = make_encoder(tokenizer, chat_template)
    limit = length_limit(config.max_tokens, context, config.too_long)

    def collect(rows: Sequence[Entry[DemoText]], skips: RowCounts) -> DemonstrationSet:
        all_ids = [ids for _, ids in rows]
        return DemonstrationSet(
            prompts=tuple(ids.prompt for ids in all_ids),
            completions=tuple(ids.completions[0] for ids in all_ids),
            texts=tuple(replace(usable.parsed, prompt=usable.text.prompt) for usable, _ in rows),
            pad_id=encoder.pad_id,
            skips=skips,
            learned=_flags(all_ids, 0),
        )

    return RowPipeline(
        config,
        DEMONSTRATIONS,
        encoder,
        lambda usable, ids, skips: _truncate_end(usable, ids, limit, skips),
        collect,
        render=lambda demo: demonstration_rows(encoder, demo, config.learn),
    )


def demonstration_rows(encoder: Encoder, demo: DemoText, learn: Learn) -> list[Rendered]:
    """Render a demonstration as one row or several; `learn` is the value of data.sft.learn."""
    if isinstance(demo.prompt, str):
        rendered = encoder.render(demo.prompt, demo.completions)
        if learn != "all" or not rendered.prompt:
            return [rendered]
        return [Rendered("", (rendered.prompt + rendered.completions[0],), templated=False)]
    answer: list[Message] = list(demo.turns) or [assistant_turn(demo.completion)]
    writer = TemplateRenderer(encoder.tokenizer, encoder.template, demo.tools)
    return conversation_rows(writer, [*demo.prompt, *answer], learn, given=0 if demo.whole else len(demo.prompt))


def _prompt_truncation(encoder: Encoder, limit: LengthLimit) -> Fit[T]:
    def fit(usable: PreparedRow[T], ids: EncodedRow, skips: RowCounts) -> EncodedRow | None:
        return _truncate_prompt(usable.row, ids, encoder, limit, skips)

    return fit


def _truncate_prompt(
    row: DataRow, ids: EncodedRow, encoder: Encoder, limit: LengthLimit, skips: RowCounts
) -> EncodedRow | None:
    """Fit a row's longest side to the limit, cutting the start of its prompt if `too_long` is "truncate".

    Returns None for a row that is left out.
    """
    check_ids(ids)
    excess = limit.tokens_to_cut(row, len(ids.prompt) + max(map(len, ids.completions)), skips)
    if not excess:
        return None if excess is None else ids
    prompt = truncate_start(ids.prompt, excess, encoder.head(ids.prompt))
    if prompt is None:
        skips.skip(row, limit.reason, "a completion leaves the prompt no room")
        return None
    skips.cut += 1
    return replace(ids, prompt=prompt, whole=False)


def _truncate_end(
    usable: PreparedRow[DemoText], ids: EncodedRow, limit: LengthLimit, skips: RowCounts
) -> EncodedRow | None:
    """Fit a row to the limit, cutting off its end (EOS included) if `too_long` is "truncate".

    Returns None for a row that is left out.
    """
    if not ids.prompt and not usable.text.prompt and len(ids.completions[0]) > 1:
        ids = EncodedRow(ids.completions[0][:1], (ids.completions[0][1:],))
    else:
        check_ids(ids)
    completion = ids.completions[0]
    excess = limit.tokens_to_cut(usable.row, len(ids.prompt) + len(completion), skips)
    if not excess:
        return None if excess is None else ids
    learned = tuple(flags[:-excess] for flags in ids.learned)
    if excess >= len(completion) or (learned and not any(learned[0])):
        skips.skip(usable.row, limit.reason, "its prompt alone")
        return None
    skips.cut += 1
    return EncodedRow(ids.prompt, (completion[:-excess],), whole=False, learned=learned)
