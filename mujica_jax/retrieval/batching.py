"""Batching of the queries of many agents to one index, service, endpoint or reranker.

Queries that arrive together are answered in one batch. A query that several agents ask at the same
time is answered once for all of them.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

from mujica_jax.retrieval.errors import RetrieverOverloadedError, RetrieverTimeoutError
from mujica_jax.retrieval.statistics import Counted

# After the deadline, how long to wait for an answer that is already on its way.
COLLECTION_SECONDS = 0.1

# A text, or a text with the passages that are reranked for it.
Query = TypeVar("Query", bound=Hashable)
Result = TypeVar("Result")


class Batcher(Generic[Query, Result]):
    """A collector that puts queries into batches. Use it from one event loop at a time."""

    def __init__(
        self,
        answer: Callable[[list[Query], int], Awaitable[Sequence[Result]]],
        counted: Counted,
        *,
        max_queries: int,
        concurrency: int = 1,
        max_waiting: float = math.inf,
        deadline_seconds: float,
        late: str,
    ) -> None:
        """Collect queries for `answer(queries, k)`, which returns one result for each query.

        A batch has at most `max_queries` queries, and at most `concurrency` batches run at the same
        time. At most `max_waiting` queries wait for a batch; further ones are refused. A query that
        is not answered within `deadline_seconds` fails with the message `late`. Shared queries are
        counted in `counted`.
        """
        self._answer = answer
        self._counted = counted
        self._max_queries = max_queries
        self._concurrency = concurrency
        self.max_waiting = max_waiting
        self._deadline_seconds = deadline_seconds
        self._late = late
        self._loop: asyncio.AbstractEventLoop | None = None
        # Queries that wait for a batch, in order of arrival.
        self._waiting: dict[tuple[Query, int], asyncio.Future[Result]] = {}
        # Queries of running batches.
        self._under_way: dict[tuple[Query, int], asyncio.Future[Result]] = {}
        # Tasks of running batches.
        self._batches: set[asyncio.Task[None]] = set()

    async def ask(self, query: Query, k: int) -> Result:
        """Return the answer to one query.

        Raises RetrieverTimeoutError, RetrieverOverloadedError, and any error that `answer` raises.
        """
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            # Queries of an earlier event loop ended with that loop.
            self._loop = loop
            self._waiting = {}
            self._under_way = {}
            self._batches = set()

        future = self._waiting.get((query, k)) or self._under_way.get((query, k))
        if future is not None:
            self._counted.count(shared=1)
        else:
            future = self._enqueue(query, k, loop)

        # `asyncio.wait` does not cancel the future at the timeout, because other agents may wait
        # for it. If something blocked the event loop (such as compiling the engine), the answer may
        # have come in time without having been seen. The short second wait picks it up.
        for seconds in (self._deadline_seconds, COLLECTION_SECONDS):
            done, _ = await asyncio.wait({future}, timeout=seconds)
            if done:
                return future.result()
        raise RetrieverTimeoutError(self._late)

    def _enqueue(
        self, query: Query, k: int, loop: asyncio.AbstractEventLoop
    ) -> "asyncio.Future[Result]":
        """Add a query to the queue. Raises RetrieverOverloadedError if the queue is full."""
        if len(self._waiting) >= self.max_waiting:
            raise RetrieverOverloadedError(
                f"{len(self._waiting)} searches are waiting, and the limit is {self.max_waiting}: "
                "try again later, or send fewer at once"
            )
        future = loop.create_future()
        future.add_done_callback(_read_exception)
        self._waiting[query, k] = future
        # Start the batch later, so that queries of the same turn of the event loop join it.
        loop.call_soon(self._start)
        return future

    def _start(self) -> None:
        """Start batches of waiting queries, as far as the concurrency allows."""
        while self._waiting and len(self._batches) < self._concurrency:
            # All queries of a batch have the same k. Take the k of the query that waits longest.
            _, k = next(iter(self._waiting))
            keys = [key for key in self._waiting if key[1] == k][: self._max_queries]
            batch = {key: self._waiting.pop(key) for key in keys}
            self._under_way |= batch
            task = asyncio.ensure_future(self._run(batch, k))
            self._batches.add(task)
            task.add_done_callback(self._end_batch)

    def _end_batch(self, task: "asyncio.Task[None]") -> None:
        """Remove a finished batch, and start the next one."""
        self._batches.discard(task)
        if not task.cancelled():
            self._start()

    async def _run(self, batch: dict[tuple[Query, int], "asyncio.Future[Result]"], k: int) -> None:
        """Answer a batch of queries, and set the results or the error in their futures."""
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
    """Read the exception of a future.

    asyncio logs exceptions that were never read. Without this, it would log the failure of a query
    that nobody waits for any more.
    """
    if not future.cancelled():
        future.exception()
