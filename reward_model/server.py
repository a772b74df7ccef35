"""Serve a reward model over HTTP by the protocol of rlhf.rewards.remote: limits, and concurrent requests in batches.

Requests are texts, or token ids if they mean the same to the reward model.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import math
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from transformers import PreTrainedTokenizerBase

from reward_model.model import score_rows
from reward_model.source import OWN_TEMPLATE, encode_rows, render_for_reward_model, truncate_row
from rlhf.config.data import ChatFormat
from rlhf.data.conversation import is_messages, messages, tools_of
from rlhf.data.rows import BadRow
from rlhf.data.templates import Tools
from rlhf.data.tokenizer import left_pad, make_encoder, right_pad, vocabulary_digest
from rlhf.errors import DataError, RewardError
from rlhf.models.backbone import context_length, freeze
from rlhf.models.scalar_head import ScalarHeadModel
from rlhf.references import MESSAGES

T = TypeVar("T")
RowScores = list[float | None]


class Batcher:
    """A queue of requests, scored in batches by a single thread, the only one that uses the model and the tokenizer.

    No request is delayed on purpose: one that finds the model free is scored at once, and those that arrive meanwhile
    form the next batch.
    """

    def __init__(self, score: Callable[[Sequence[TokenRow]], RowScores], *, max_batch: int) -> None:
        """Create a batcher that gives `score` at most `max_batch` rows, except for a single request that has more."""
        self.score = score
        self.max_batch = max_batch
        self.batches = 0
        self._waiting: asyncio.Queue[tuple[list[TokenRow], asyncio.Future[RowScores]]] = asyncio.Queue()
        self._carried_over: tuple[list[TokenRow], asyncio.Future[RowScores]] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward-model")

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run `work` in the model's thread and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def submit(self, rows: list[TokenRow]) -> RowScores:
        """Score these rows and return the scores in the same order."""
        answer: asyncio.Future[RowScores] = asyncio.get_running_loop().create_future()
        await self._waiting.put((rows, answer))
        return await answer

    async def run(self) -> None:
        """Score requests as they arrive, until cancelled."""
        while True:
            batch = await self._next_batch()
            self.batches += 1
            rows = [row for part, _ in batch for row in part]
            (outcome,) = await asyncio.gather(self.in_thread(partial(self.score, rows)), return_exceptions=True)
            start = 0
            for part, answer in batch:
                if not answer.done():  # the client may have disconnected
                    if isinstance(outcome, BaseException):
                        answer.set_exception(outcome)
                    else:
                        answer.set_result(outcome[start : start + len(part)])
                start += len(part)

    async def _next_batch(self) -> list[tuple[list[TokenRow], asyncio.Future[RowScores]]]:
        first = self._carried_over or await self._waiting.get()
        self._carried_over, batch, count = None, [first], len(first[0])
        while not self._waiting.empty():
            item = self._waiting.get_nowait()
            if count + len(item[0]) > self.max_batch:
                self._carried_over = item
                break
            batch.append(item)
            count += len(item[0])
        return batch

    def close(self) -> None:
        """Wait for the thread to finish and shut it down."""
        self._thread.shutdown(wait=True)


DRAIN_FACTOR = (
    8  # read up to this many times the limit of a request that is too large, so that its sender gets the reason
)


class RequestRefused(Exception):
    """A request that is answered with an error instead of scores."""

    def __init__(self, status: int, reason: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(reason)
        self.status, self.headers = status, headers


def make_app(scorer: TextScorer, *, name: str, max_request_bytes: int, token: str | None) -> FastAPI:
    """Build the application, which answers POST /score and GET /health.

    Args:
        scorer: the scorer, which holds the model.
        name: name of the model, for /health.
        max_request_bytes: a longer request is refused with status 413.
        token: if given, /score requires it as the bearer token; it is never part of an answer or a log line.
    """
    batcher = Batcher(scorer.scores, max_batch=scorer.max_batch)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        worker = asyncio.create_task(batcher.run())
        yield
        worker.cancel()
        with suppress(asyncio.CancelledError):
            await worker
        batcher.close()

    # FastAPI's documentation pages would load scripts from other sites.
    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)

    @app.exception_handler(RequestRefused)
    async def refuse(_: Request, error: RequestRefused) -> JSONResponse:
        return JSONResponse({"error": str(error)}, error.status, headers=error.headers)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok", "model": name, "vocabulary": scorer.vocabulary}

    @app.post("/score")
    async def score(request: Request) -> JSONResponse:
        if token is not None:
            _check_token(request, token)
        body = _parse_json(await _read_body(request, max_request_bytes))
        try:
            question = parse_request(body)
            rows, parts = await batcher.in_thread(lambda: scorer.rows(question))
        except (DataError, RewardError) as error:  # the model cannot read a row: its template refuses it, say
            raise RequestRefused(422, str(error)) from error
        return JSONResponse({"scores": await batcher.submit(rows), "parts": parts})

    app.state.batcher = batcher
    return app


def _check_token(request: Request, token: str) -> None:
    given = request.headers.get("authorization", "")
    if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
        raise RequestRefused(
            401, "this server wants a token: Authorization: Bearer ...", {"WWW-Authenticate": "Bearer"}
        )


async def _read_body(request: Request, limit: int) -> bytes:
    parts, size = list[bytes](), 0
    async for part in request.stream():
        size += len(part)
        if size <= limit:
            parts.append(part)
        elif size > DRAIN_FACTOR * limit:
            break
    if size > limit:
        raise RequestRefused(413, f"the request is larger than {limit} bytes: score fewer completions at a time")
    return b"".join(parts)


def _parse_json(body: bytes) -> Any:
    try:
        return json.loads(body.decode("utf-8"), parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:  # broken UTF-8 and broken JSON are ValueErrors
        raise RequestRefused(400, f"the request is not JSON: {error}") from error


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


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
    tools: tuple[Tools, ...] = ()  # per prompt, the schemas of the tools in it


TokenRow = tuple[list[int], list[int]]  # the token ids of a prompt and of its completion
Parts = dict[str, list[float]]  # named numbers, one per row, beside the scores


class TextScorer:
    """Scores like RewardModelSource: by the ids that were sent if they mean the same, otherwise by the texts."""

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

    def rows(self, question: ScoreRequest) -> tuple[list[TokenRow], Parts]:
        """Return the token ids to score, with rows longer than the model's context cut (see truncate_row).

        If the model has a context, the part "cut" is 1 for each row that was cut and else 0.

        Raises:
            DataError: the model cannot score a row; the message names it.
            RewardError: the model's chat template refuses a conversation.
        """
        sent = question.tokens
        if sent is not None and sent.vocabulary == self.vocabulary:
            rows = list(zip(sent.prompts, sent.completions, strict=True))
        else:
            messages = question.messages or [None] * len(question.prompts)
            tools = question.tools or [()] * len(question.prompts)
            texts = zip(question.prompts, question.completions, messages, tools, strict=True)
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

    def scores(self, rows: Sequence[TokenRow]) -> list[float | None]:
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
    sent, tools = _conversations(body.get("references"), len(prompts))
    return ScoreRequest(
        prompts=prompts,
        completions=completions,
        finished=finished,
        tokens=_tokens(body, len(prompts)),
        messages=sent,
        tools=tools,
    )


def _conversations(references: Any, count: int) -> tuple[tuple[object, ...], tuple[Tools, ...]]:
    """Return each prompt's messages and tools from the references, if these were sent."""
    if not isinstance(references, list) or len(references) != count:
        return (), ()
    rows = [row if isinstance(row, dict) else {} for row in references]
    try:
        turns = tuple(
            messages(row[MESSAGES], f"references[{number}].{MESSAGES}") if is_messages(row.get(MESSAGES)) else None
            for number, row in enumerate(rows)
        )
        return turns, tuple(map(tools_of, rows))
    except BadRow as bad:
        raise DataError(str(bad)) from bad


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
