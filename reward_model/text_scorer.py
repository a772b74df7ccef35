"""Score requests that arrive over HTTP: texts, or token ids if they mean the same to the reward model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from reward_model.model import score_rows
from reward_model.source import OWN_TEMPLATE, encode_rows, render_for_reward_model, truncate_row
from rlhf.config.data import ChatFormat
from rlhf.data.conversation import is_messages
from rlhf.data.prompts import MESSAGES
from rlhf.data.tokenize import left_pad, make_encoder, right_pad
from rlhf.data.tokenizer import vocabulary_digest
from rlhf.errors import DataError
from rlhf.models.backbone import context_length, freeze
from rlhf.models.scalar_head import ScalarHeadModel


@dataclass(frozen=True, kw_only=True)
class RequestTokens:
    """The token ids of the texts, and a digest of the vocabulary that they belong to."""

    vocabulary: str
    prompts: list[list[int]]
    completions: list[list[int]]


@dataclass(frozen=True, kw_only=True)
class ScoreRequest:
    """A request to score completions, with one entry per row in each list."""

    prompts: list[str]
    completions: list[str]
    finished: list[bool]
    tokens: RequestTokens | None
    messages: tuple[object, ...] = ()  # per prompt, the conversation that it was rendered from, or None


Row = tuple[list[int], list[int]]  # the token ids of a prompt and of its completion
Parts = dict[str, list[float]]  # named numbers, one per row, beside the scores


class TextScorer:
    """Scores as RewardModelSource does: by the ids that were sent if they mean the same, otherwise by the texts."""

    def __init__(
        self,
        model: ScalarHeadModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_batch: int,
        dtype: str = "float32",
        chat: ChatFormat = OWN_TEMPLATE,
    ) -> None:
        """Freeze the model, which stays on its device; `tokenizer` is the reward model's own.

        `chat` is the format of the conversations that it was trained on.
        """
        freeze(model)
        self.model, self.max_batch, self.dtype = model, max_batch, dtype
        self.encoder = make_encoder(tokenizer, chat)
        self.vocabulary = vocabulary_digest(tokenizer)
        self.size = len(tokenizer)
        self.context = context_length(model.classifier)

    def rows(self, question: ScoreRequest) -> tuple[list[Row], Parts]:
        """Return the token ids to score, with rows longer than the model's context cut (see truncate_row).

        Where the model has a context, the part "cut" is 1 for each row that was cut and else 0.

        Raises:
            DataError: the model cannot score a row; the message names it.
            RewardError: the model's chat template refuses a conversation.
        """
        sent = question.tokens
        if sent is not None and sent.vocabulary == self.vocabulary:
            rows = list(zip(sent.prompts, sent.completions, strict=True))
        else:
            messages = question.messages or [None] * len(question.prompts)
            texts = zip(question.prompts, question.completions, messages, strict=True)
            rendered = [render_for_reward_model(self.encoder, *row) for row in texts]
            rows = list(zip(*encode_rows(self.encoder, rendered, question.finished), strict=True))
        parts: Parts = {}
        if self.context is not None:
            parts["cut"] = [float(len(prompt) + len(completion) > self.context) for prompt, completion in rows]
            bos = self.encoder.tokenizer.bos_token_id
            rows = [truncate_row(prompt, completion, self.context, bos=bos) for prompt, completion in rows]
        for number, (prompt, completion) in enumerate(rows):
            self._check(number, prompt, completion)
        return rows, parts

    def _check(self, number: int, prompt: list[int], completion: list[int]) -> None:
        if not completion:
            raise DataError(f"row {number}: the completion is empty")
        if not all(0 <= token < self.size for token in (*prompt, *completion)):
            raise DataError(f"row {number}: a token id that is not in the vocabulary of {self.size}")

    def scores(self, rows: Sequence[Row]) -> list[float | None]:
        """Score each row; None stands for a score that is NaN or infinite, which JSON cannot represent."""
        if not rows:
            return []
        prompts, prompt_mask = left_pad([prompt for prompt, _ in rows], self.encoder.pad_id)
        completions, completion_mask = right_pad([completion for _, completion in rows], self.encoder.pad_id)
        values: list[float] = (
            score_rows(
                self.model,
                prompts,
                prompt_mask,
                completions,
                completion_mask,
                micro_batch_size=self.max_batch,
                dtype=self.dtype,
            )
            .float()
            .tolist()
        )
        return [value if math.isfinite(value) else None for value in values]


def parse_request(body: Any) -> ScoreRequest:
    """Build the request from a JSON value.

    Raises:
        DataError: the value is not a valid request; the message says why.
    """
    if not isinstance(body, dict):
        raise DataError(f"expected an object with prompts and completions, found {_kind(body)}")
    prompts, completions = (_texts(body, key) for key in ("prompts", "completions"))
    if len(prompts) != len(completions):
        raise DataError(f"{len(prompts)} prompts but {len(completions)} completions")
    finished = body.get("finished")
    if finished is None:
        finished = [True] * len(prompts)
    if not _is_list(finished, bool) or len(finished) != len(prompts):
        raise DataError(f"finished must be a list of {len(prompts)} booleans, one a completion")
    return ScoreRequest(
        prompts=prompts,
        completions=completions,
        finished=finished,
        tokens=_tokens(body, len(prompts)),
        messages=_messages(body.get("references"), len(prompts)),
    )


def _messages(references: Any, count: int) -> tuple[object, ...]:
    """Return each prompt's messages from the references, if these were sent."""
    if not isinstance(references, list) or len(references) != count:
        return ()
    sent = [row.get(MESSAGES) if isinstance(row, dict) else None for row in references]
    return tuple(messages if is_messages(messages) else None for messages in sent)


def _texts(body: dict[str, Any], key: str) -> list[str]:
    texts = body.get(key)
    if not _is_list(texts, str):
        raise DataError(f"{key} must be a list of strings" + ("" if key in body else "; it is missing"))
    assert isinstance(texts, list)
    for number, text in enumerate(texts):
        if not _is_unicode(text):
            raise DataError(f"{key}[{number}] is not Unicode text: it has half of a surrogate pair")
    return texts


def _tokens(body: dict[str, Any], count: int) -> RequestTokens | None:
    sent = body.get("tokens")
    if sent is None:
        return None
    if not isinstance(sent, dict) or not isinstance(sent.get("vocabulary"), str):
        raise DataError("tokens must be an object with vocabulary, prompts and completions")
    for key in ("prompts", "completions"):
        rows = sent.get(key)
        if not isinstance(rows, list) or len(rows) != count or not all(_is_list(row, int) for row in rows):
            raise DataError(f"tokens.{key} must be a list of {count} lists of token ids")
    return RequestTokens(vocabulary=sent["vocabulary"], prompts=sent["prompts"], completions=sent["completions"])


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(entry) is kind for entry in value)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _kind(value: Any) -> str:
    return {list: "a list", str: "a string", type(None): "null"}.get(type(value), f"a {type(value).__name__}")
