"""Queries of many agents on their way to one index, service or endpoint: together in batches, the
same one only once.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from mujica_jax.retrieval.errors import RetrieverOverloaded, RetrieverTimeout
from mujica_jax.retrieval.statistics import Counted

HELD_UP_SECONDS = 0.1  # to collect an answer that is there

Result = TypeVar("Result")
Asked = tuple[str, int]  # query and k


class Batcher(Generic[Result]):
    """Use from one event loop at a time."""

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
        """`answer(queries, k)` gets up to `max_queries`; `concurrency` calls of it run at the same
        time. `late` is the sentence for a query without an answer within `deadline_seconds`.
        """
        self._answer, self._counted, self._deadline_seconds, self._late = (
            answer,
            counted,
            deadline_seconds,
            late,
        )
        self._max_queries, self._concurrency, self.max_waiting = (
            max_queries,
            concurrency,
            max_waiting,
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: dict[Asked, asyncio.Future[Result]] = {}
        self._under_way: dict[Asked, asyncio.Future[Result]] = {}
        self._batches: set[asyncio.Task[None]] = set()

    async def ask(self, query: str, k: int) -> Result:
        """Raises RetrieverTimeout, RetrieverOverloaded, and what `answer` raises."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # what waited in an earlier loop ended with it
            self._loop, self._waiting, self._under_way, self._batches = loop, {}, {}, set()
        future = self._waiting.get((query, k)) or self._under_way.get((query, k))
        if future is not None:
            self._counted.count(shared=1)
        else:
            if len(self._waiting) >= self.max_waiting:
                raise RetrieverOverloaded(
                    f"{len(self._waiting)} searches wait, of at most {self.max_waiting}: come back "
                    "later, or send fewer at once"
                )
            future = self._waiting[query, k] = loop.create_future()
            future.add_done_callback(
                lambda done: done.cancelled() or done.exception()
            )  # read even if nobody waits
            loop.call_soon(self._start)  # queries of the same turn of the loop come along
        # `asyncio.wait` leaves the future to others who wait for it. Where something else
        # (compiling the engine) held up the event loop, an answer that came meanwhile is not late:
        # the second wait lets it arrive.
        for seconds in (self._deadline_seconds, HELD_UP_SECONDS):
            if (await asyncio.wait({future}, timeout=seconds))[0]:
                return future.result()
        raise RetrieverTimeout(self._late)

    def _start(self) -> None:
        while self._waiting and len(self._batches) < self._concurrency:
            k = next(iter(self._waiting))[1]
            keys = [asked for asked in self._waiting if asked[1] == k][: self._max_queries]
            batch = {asked: self._waiting.pop(asked) for asked in keys}
            self._under_way |= batch
            task = asyncio.ensure_future(self._run(batch, k))
            self._batches.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._batches.discard(task)
        if not task.cancelled():
            self._start()

    async def _run(self, batch: dict[Asked, "asyncio.Future[Result]"], k: int) -> None:
        try:
            found = await self._answer([query for query, _ in batch], k)
            for future, result in zip(batch.values(), found, strict=True):
                future.set_result(result)
        except Exception as error:
            for future in batch.values():
                if not future.done():
                    future.set_exception(error)
        finally:
            for asked in batch:
                self._under_way.pop(asked, None)
