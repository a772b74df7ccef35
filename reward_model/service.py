"""A reward model over HTTP: the protocol of rlhf.rewards.remote, with limits."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, NoReturn

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from reward_model.batching import Batcher
from reward_model.text_scorer import TextScorer, question_of
from rlhf.errors import DataError

DRAINED = 8  # times the limit: so much of a request that is too large is read, so that its sender hears why


class Refused(Exception):
    """A request that is not answered with scores."""

    def __init__(self, status: int, why: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(why)
        self.status, self.headers = status, headers


def make_app(scorer: TextScorer, *, name: str, max_request_bytes: int, token: str | None) -> FastAPI:
    """The application: POST /score, GET /health.

    Args:
        scorer: has the model.
        name: of the model, for /health.
        max_request_bytes: a longer request is refused with 413.
        token: where there is one, /score wants it as the bearer; it is never part of an answer or a log line.
    """
    batcher = Batcher(scorer.scores, max_batch=scorer.max_batch)

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        worker = asyncio.create_task(batcher.run())
        yield
        worker.cancel()
        with suppress(asyncio.CancelledError):
            await worker
        batcher.close()

    # Its pages of documentation load scripts from elsewhere.
    app = FastAPI(lifespan=life, docs_url=None, redoc_url=None, openapi_url=None)

    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> JSONResponse:
        return JSONResponse({"error": str(error)}, error.status, headers=error.headers)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok", "model": name, "vocabulary": scorer.vocabulary}

    @app.post("/score")
    async def score(request: Request) -> JSONResponse:
        if token is not None:
            _check_token(request, token)
        asked = _parsed(await _body(request, max_request_bytes))
        try:
            question = question_of(asked)
            rows = await batcher.in_thread(lambda: scorer.rows(question))
        except DataError as error:
            raise Refused(422, str(error)) from error
        return JSONResponse({"scores": await batcher.submit(rows)})

    app.state.batcher = batcher
    return app


def _check_token(request: Request, token: str) -> None:
    given = request.headers.get("authorization", "")
    if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
        raise Refused(401, "this server wants a token: Authorization: Bearer ...", {"WWW-Authenticate": "Bearer"})


async def _body(request: Request, limit: int) -> bytes:
    parts, size = list[bytes](), 0
    async for part in request.stream():
        size += len(part)
        if size <= limit:
            parts.append(part)
        elif size > DRAINED * limit:
            break
    if size > limit:
        raise Refused(413, f"the request is larger than {limit} bytes: score fewer completions at a time")
    return b"".join(parts)


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:  # broken UTF-8 and broken JSON are ValueErrors
        raise Refused(400, f"the request is not JSON: {error}") from error


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
