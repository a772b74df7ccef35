"""Serve a reward model over HTTP by the protocol of rlhf.rewards.remote, with limits on requests."""

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

DRAINED = 8  # read up to this many times the limit of a request that is too large, so that its sender gets the reason


class Refused(Exception):
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

    @app.exception_handler(Refused)
    async def refuse(_: Request, error: Refused) -> JSONResponse:
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
            question = question_of(body)
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


async def _read_body(request: Request, limit: int) -> bytes:
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


def _parse_json(body: bytes) -> Any:
    try:
        return json.loads(body.decode("utf-8"), parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:  # broken UTF-8 and broken JSON are ValueErrors
        raise Refused(400, f"the request is not JSON: {error}") from error


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
