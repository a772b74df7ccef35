"""Data sets for the preference losses: pairs, or single labelled completions, with reference log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf.config.data import ChatFormat, PreferencesConfig
from rlhf.data.dialects import LABELLED, PAIRS
from rlhf.data.files import load_rows
from rlhf.data.pairs import CompletionRows, LabelledSet, PairSet, load_labelled, load_pairs
from rlhf.data.skips import Skips
from rlhf.types import AnnotatedLabelled, AnnotatedPairs, extend


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

    def collate(self, indices: Sequence[int]) -> AnnotatedLabelled:
        """Collate the completions at `indices` into one batch."""
        return extend(
            AnnotatedLabelled,
            self.rows.collate(indices),
            desirable=torch.tensor([self.desirable[i] for i in indices], dtype=torch.bool),
            ref_logprobs=self.ref_logprobs[torch.tensor(list(indices), dtype=torch.long)],
        )


def rows_of(dataset: PairSet | LabelledSet) -> CompletionRows:
    """Return one row per completion; for pairs, all chosen completions first, then all rejected ones."""
    if isinstance(dataset, LabelledSet):
        return CompletionRows(dataset.prompts, dataset.completions, dataset.pad_id)
    learned = dataset.chosen_learned + dataset.rejected_learned
    return CompletionRows(dataset.prompts * 2, dataset.chosen + dataset.rejected, dataset.pad_id, learned)


def labels_of(dataset: PairSet | LabelledSet) -> tuple[bool, ...]:
    """Return the label of each row of `rows_of`: chosen completions are desirable, rejected ones are not."""
    if isinstance(dataset, LabelledSet):
        return tuple(text.desirable for text in dataset.texts)
    return (True,) * len(dataset) + (False,) * len(dataset)


def load_judgments(
    config: PreferencesConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    chat_template: str | ChatFormat,
    context: int | None = None,
) -> PairSet | LabelledSet:
    """Load labelled completions if the columns of the data set say so, otherwise preference pairs."""
    columns = {name for row in load_rows(config, Skips(config.path)) for name in row.values}
    is_pairs, is_labelled = (any(set(shape.columns) <= columns for shape in use.shapes) for use in (PAIRS, LABELLED))
    load = load_labelled if is_labelled and not is_pairs else load_pairs
    return load(config, tokenizer, chat_template=chat_template, context=context)


__all__ = [
    "AnnotatedLabelledSet",
    "AnnotatedPairSet",
    "CompletionRows",
    "labels_of",
    "load_judgments",
    "rows_of",
]
