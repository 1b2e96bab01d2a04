"""Batching of many agents' queries to one index, service or endpoint.

Queries that arrive together go there in one batch, and the same query only once.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar

from mujica_jax.retrieval.errors import RetrieverOverloadedError, RetrieverTimeoutError
from mujica_jax.retrieval.statistics import Counted

COLLECTION_SECONDS = 0.1  # to collect an answer that is there

Result = TypeVar("Result")
QueryAndK = tuple[str, int]


class Batcher(Generic[Result]):
    """Collects queries into batches. Use from one event loop at a time."""

    def __init__(
        self,
        answer: Callable[[list[str], int], Awaitable[Sequence[Result]]],
        counted: Counted,
        *,
        max_queries: int,
        concurrency: int = 1,
        max_waiting: float = math.inf,
        deadline_seconds: float,
        late: str,
    ) -> None:
        """Batch queries for `answer(queries, k)`, which gets up to `max_queries` at once.

        `concurrency` calls of it run at the same time. `late` is the error message of a query
        without an answer within `deadline_seconds`.
        """
        self._answer = answer
        self._counted = counted
        self._max_queries = max_queries
        self._concurrency = concurrency
        self.max_waiting = max_waiting
        self._deadline_seconds = deadline_seconds
        self._late = late
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: dict[QueryAndK, asyncio.Future[Result]] = {}
        self._under_way: dict[QueryAndK, asyncio.Future[Result]] = {}
        self._batches: set[asyncio.Task[None]] = set()

    async def ask(self, query: str, k: int) -> Result:
        """Return the answer to one query.

        Raises RetrieverTimeoutError, RetrieverOverloadedError, and what `answer` raises.
        """
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            # What waited in an earlier loop ended with it.
            self._loop = loop
            self._waiting = {}
            self._under_way = {}
            self._batches = set()

        future = self._waiting.get((query, k)) or self._under_way.get((query, k))
        if future is not None:
            self._counted.count(shared=1)
        else:
            future = self._enqueue(query, k, loop)

        # `asyncio.wait` leaves the future to others who wait for it. Where something else
        # (compiling the engine) held up the event loop, an answer that came meanwhile is not late:
        # the second wait lets it arrive.
        for seconds in (self._deadline_seconds, COLLECTION_SECONDS):
            done, _ = await asyncio.wait({future}, timeout=seconds)
            if done:
                return future.result()
        raise RetrieverTimeoutError(self._late)

    def _enqueue(
        self, query: str, k: int, loop: asyncio.AbstractEventLoop
    ) -> "asyncio.Future[Result]":
        """Put a new query into the line. Raise RetrieverOverloadedError where that is full."""
        if len(self._waiting) >= self.max_waiting:
            raise RetrieverOverloadedError(
                f"{len(self._waiting)} searches wait, of at most {self.max_waiting}: come back "
                "later, or send fewer at once"
            )
        future = loop.create_future()
        future.add_done_callback(_read_exception)
        self._waiting[query, k] = future
        # Queries of the same turn of the loop come along.
        loop.call_soon(self._start)
        return future

    def _start(self) -> None:
        """Start batches of waiting queries, as far as the concurrency allows."""
        while self._waiting and len(self._batches) < self._concurrency:
            # A batch has one k: that of the query that waits longest.
            _, k = next(iter(self._waiting))
            keys = [key for key in self._waiting if key[1] == k][: self._max_queries]
            batch = {key: self._waiting.pop(key) for key in keys}
            self._under_way |= batch
            task = asyncio.ensure_future(self._run(batch, k))
            self._batches.add(task)
            task.add_done_callback(self._end_batch)

    def _end_batch(self, task: "asyncio.Task[None]") -> None:
        """Make place for the next batch."""
        self._batches.discard(task)
        if not task.cancelled():
            self._start()

    async def _run(self, batch: dict[QueryAndK, "asyncio.Future[Result]"], k: int) -> None:
        """Answer a batch of queries."""
        try:
            results = await self._answer([query for query, _ in batch], k)
            for future, result in zip(batch.values(), results, strict=True):
                future.set_result(result)
        except Exception as error:
            for future in batch.values():
                if not future.done():
                    future.set_exception(error)
        finally:
            for key in batch:
                self._under_way.pop(key, None)


def _read_exception(future: "asyncio.Future[Any]") -> None:
    """Read a future's exception, so that asyncio does not report it where nobody waits."""
    if not future.cancelled():
        future.exception()
