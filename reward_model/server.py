"""Serve a reward model over HTTP by the protocol of rlhf.rewards.remote: limits, and concurrent requests in batches."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, NoReturn, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from reward_model.text_scorer import Row, TextScorer, parse_request
from rlhf.errors import DataError, RewardError

T = TypeVar("T")
Scores = list[float | None]


class Batcher:
    """A queue of requests, scored in batches by a single thread, the only one that uses the model and the tokenizer.

    No request is delayed on purpose: one that finds the model free is scored at once, and those that arrive meanwhile
    form the next batch.
    """

    def __init__(self, score: Callable[[Sequence[Row]], Scores], *, max_batch: int) -> None:
        """Create a batcher that gives `score` at most `max_batch` rows, except for a single request that has more."""
        self.score = score
        self.max_batch = max_batch
        self.batches = 0
        self._waiting: asyncio.Queue[tuple[list[Row], asyncio.Future[Scores]]] = asyncio.Queue()
        self._carried_over: tuple[list[Row], asyncio.Future[Scores]] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward-model")

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run `work` in the model's thread and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def submit(self, rows: list[Row]) -> Scores:
        """Score these rows and return the scores in the same order."""
        answer: asyncio.Future[Scores] = asyncio.get_running_loop().create_future()
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

    async def _next_batch(self) -> list[tuple[list[Row], asyncio.Future[Scores]]]:
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
