"""Preference pairs, demonstrations and labelled completions: encoded once, put into batches by index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedTokenizerBase

from rlhf.config.data import PreferencesConfig, SftConfig
from rlhf.data.dialects import DEMONSTRATIONS, LABELLED, PAIRS, DemoText, LabelledText, PairText
from rlhf.data.encode import Encoder, make_encoder
from rlhf.data.lengths import Limit, cut_start, limit_of
from rlhf.data.load import Ids, Usable, check_ids, encoded_rows
from rlhf.data.pad import left_pad, right_pad
from rlhf.data.row import Row
from rlhf.data.skips import Skips
from rlhf.data.stream import BatchStream, epoch_order
from rlhf.types import Demonstrations, Labelled, PreferencePairs


@dataclass(frozen=True)
class PairSet:
    """Encoded preference pairs; `texts` are the same rows as the model reads them, before any cut."""

    prompts: tuple[list[int], ...]
    chosen: tuple[list[int], ...]
    rejected: tuple[list[int], ...]
    texts: tuple[PairText, ...]
    pad_id: int
    skips: Skips

    def __len__(self) -> int:
        return len(self.texts)

    def collate(self, indices: Sequence[int]) -> PreferencePairs:
        """These pairs as one batch."""
        prompt_ids, prompt_mask = left_pad([self.prompts[i] for i in indices], self.pad_id)
        chosen_ids, chosen_mask = right_pad([self.chosen[i] for i in indices], self.pad_id)
        rejected_ids, rejected_mask = right_pad([self.rejected[i] for i in indices], self.pad_id)
        return PreferencePairs(
            prompt_ids=prompt_ids,
            prompt_mask=prompt_mask,
            chosen_ids=chosen_ids,
            chosen_mask=chosen_mask,
            rejected_ids=rejected_ids,
            rejected_mask=rejected_mask,
            margins=torch.tensor([self.texts[i].margin for i in indices], dtype=torch.float32),
        )


@dataclass(frozen=True)
class DemonstrationSet:
    """Encoded prompts with the completions to imitate: the loss is over all of a completion, its EOS included."""

    prompts: tuple[list[int], ...]
    completions: tuple[list[int], ...]
    texts: tuple[DemoText, ...]
    pad_id: int
    skips: Skips

    def __len__(self) -> int:
        return len(self.texts)

    def collate(self, indices: Sequence[int]) -> Demonstrations:
        """These demonstrations as one batch."""
        prompt_ids, prompt_mask = left_pad([self.prompts[i] for i in indices], self.pad_id)
        completion_ids, completion_mask = right_pad([self.completions[i] for i in indices], self.pad_id)
        return Demonstrations(
            prompt_ids=prompt_ids,
            prompt_mask=prompt_mask,
            completion_ids=completion_ids,
            completion_mask=completion_mask,
            loss_mask=completion_mask.clone(),
        )


@dataclass(frozen=True)
class LabelledSet:
    """Encoded completions, each with its label."""

    prompts: tuple[list[int], ...]
    completions: tuple[list[int], ...]
    texts: tuple[LabelledText, ...]
    pad_id: int
    skips: Skips

    def __len__(self) -> int:
        return len(self.texts)

    def collate(self, indices: Sequence[int]) -> Labelled:
        """These labelled completions as one batch."""
        prompt_ids, prompt_mask = left_pad([self.prompts[i] for i in indices], self.pad_id)
        completion_ids, completion_mask = right_pad([self.completions[i] for i in indices], self.pad_id)
        return Labelled(
            prompt_ids=prompt_ids,
            prompt_mask=prompt_mask,
            completion_ids=completion_ids,
            completion_mask=completion_mask,
            loss_mask=completion_mask.clone(),
            desirable=torch.tensor([self.texts[i].desirable for i in indices], dtype=torch.bool),
        )


def load_pairs(
    config: PreferencesConfig, tokenizer: PreTrainedTokenizerBase, *, chat_template: str, context: int | None = None
) -> PairSet:
    """The preference pairs of a data set, encoded; no side is longer than `max_tokens`, or than the model's context."""
    encoder = make_encoder(tokenizer, chat_template)
    skips = Skips(config.path, fatal=config.bad_rows == "error")
    limit = limit_of(config.max_tokens, context, config.too_long)
    rows = list(
        encoded_rows(
            config,
            PAIRS,
            encoder,
            skips,
            completions=lambda found: (found.chosen, found.rejected),
            fit=lambda usable, ids: _prompt_cut(usable.row, ids, encoder, limit, skips),
        )
    )
    return PairSet(
        prompts=tuple(ids.prompt for _, ids in rows),
        chosen=tuple(ids.completions[0] for _, ids in rows),
        rejected=tuple(ids.completions[1] for _, ids in rows),
        texts=tuple(replace(usable.found, prompt=usable.text.prompt) for usable, _ in rows),
        pad_id=encoder.pad_id,
        skips=skips,
    )


def load_labelled(
    config: PreferencesConfig, tokenizer: PreTrainedTokenizerBase, *, chat_template: str, context: int | None = None
) -> LabelledSet:
    """The labelled completions of a data set, encoded and limited like pairs."""
    encoder = make_encoder(tokenizer, chat_template)
    skips = Skips(config.path, fatal=config.bad_rows == "error")
    limit = limit_of(config.max_tokens, context, config.too_long)
    rows = list(
        encoded_rows(
            config,
            LABELLED,
            encoder,
            skips,
            completions=lambda found: (found.completion,),
            fit=lambda usable, ids: _prompt_cut(usable.row, ids, encoder, limit, skips),
        )
    )
    return LabelledSet(
        prompts=tuple(ids.prompt for _, ids in rows),
        completions=tuple(ids.completions[0] for _, ids in rows),
        texts=tuple(replace(usable.found, prompt=usable.text.prompt) for usable, _ in rows),
        pad_id=encoder.pad_id,
        skips=skips,
    )


def load_demonstrations(
    config: SftConfig, tokenizer: PreTrainedTokenizerBase, *, chat_template: str, context: int | None = None
) -> DemonstrationSet:
    """The texts of a data set to imitate, encoded.

    The prompt of a plain text is the BOS, or its first token where the tokenizer puts no BOS before a text.
    """
    encoder = make_encoder(tokenizer, chat_template)
    skips = Skips(config.path, fatal=config.bad_rows == "error")
    limit = limit_of(config.max_tokens, context, config.too_long)
    rows = list(
        encoded_rows(
            config,
            DEMONSTRATIONS,
            encoder,
            skips,
            completions=lambda found: (found.completion,),
            fit=lambda usable, ids: _end_cut(usable, ids, limit, skips),
        )
    )
    return DemonstrationSet(
        prompts=tuple(ids.prompt for _, ids in rows),
        completions=tuple(ids.completions[0] for _, ids in rows),
        texts=tuple(replace(usable.found, prompt=usable.text.prompt) for usable, _ in rows),
        pad_id=encoder.pad_id,
        skips=skips,
    )


def _prompt_cut(row: Row, ids: Ids, encoder: Encoder, limit: Limit, skips: Skips) -> Ids | None:
    """A row whose longest side fits the limit, its prompt cut at the start if that is wanted."""
    check_ids(ids)
    excess = limit.excess(row, len(ids.prompt) + max(map(len, ids.completions)), skips)
    if not excess:
        return None if excess is None else ids
    prompt = cut_start(ids.prompt, excess, encoder.head(ids.prompt))
    if prompt is None:
        skips.leave_out(row, limit.reason, "a completion leaves the prompt no room")
        return None
    skips.cut += 1
    return Ids(prompt, ids.completions, whole=False)


def _end_cut(usable: Usable[DemoText], ids: Ids, limit: Limit, skips: Skips) -> Ids | None:
    """A row that fits the limit, its end cut off, EOS and all, if that is wanted."""
    if not ids.prompt and not usable.text.prompt and len(ids.completions[0]) > 1:
        ids = Ids(ids.completions[0][:1], (ids.completions[0][1:],))
    else:
        check_ids(ids)
    completion = ids.completions[0]
    excess = limit.excess(usable.row, len(ids.prompt) + len(completion), skips)
    if not excess:
        return None if excess is None else ids
    if excess >= len(completion):
        skips.leave_out(usable.row, limit.reason, "its prompt alone")
        return None
    skips.cut += 1
    return Ids(ids.prompt, (completion[:-excess],), whole=False)


__all__ = [
    "BatchStream",
    "DemonstrationSet",
    "Labelled",
    "LabelledSet",
    "PairSet",
    "epoch_order",
    "load_demonstrations",
    "load_labelled",
    "load_pairs",
]
