"""Requests that come at the same time are scored together."""

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
    """One thread does all the work, so that neither model nor tokenizer is used by two; what waits goes together.

    Nothing waits on purpose: a request that finds the model free is scored at once, those that come meanwhile are the
    next batch.
    """

    def __init__(self, score: Callable[[Sequence[Row]], Scores], *, max_batch: int) -> None:
        """`score` is given at most `max_batch` rows, but for a single request that has more."""
        self.score = score
        self.max_batch = max_batch
        self.batches = 0
        self._waiting: asyncio.Queue[tuple[list[Row], asyncio.Future[Scores]]] = asyncio.Queue()
        self._left: tuple[list[Row], asyncio.Future[Scores]] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward-model")

    async def in_thread(self, work: Callable[[], T]) -> T:
        """What `work` gives, in the thread of the model."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def submit(self, rows: list[Row]) -> Scores:
        """The scores of these rows, in their order."""
        answer: asyncio.Future[Scores] = asyncio.get_running_loop().create_future()
        await self._waiting.put((rows, answer))
        return await answer

    async def run(self) -> None:
        """Score what comes, until cancelled."""
        while True:
            together = await self._together()
            self.batches += 1
            rows = [row for part, _ in together for row in part]
            (found,) = await asyncio.gather(self.in_thread(partial(self.score, rows)), return_exceptions=True)
            start = 0
            for part, answer in together:
                if not answer.done():  # the client may have gone
                    if isinstance(found, BaseException):
                        answer.set_exception(found)
                    else:
                        answer.set_result(found[start : start + len(part)])
                start += len(part)

    async def _together(self) -> list[tuple[list[Row], asyncio.Future[Scores]]]:
        first = self._left or await self._waiting.get()
        self._left, together, count = None, [first], len(first[0])
        while not self._waiting.empty():
            item = self._waiting.get_nowait()
            if count + len(item[0]) > self.max_batch:
                self._left = item
                break
            together.append(item)
            count += len(item[0])
        return together

    def close(self) -> None:
        """Let the thread go."""
        self._thread.shutdown(wait=True)
