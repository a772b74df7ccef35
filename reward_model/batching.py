"""Batch concurrent requests, so that those that arrive at the same time are scored together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from reward_model.text_scorer import Row

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
