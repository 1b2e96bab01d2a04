"""What an environment searches passages with, and the retriever over an index of this process.

Queries that arrive together are encoded and searched together, the same query at the same time only once; results are kept on disk where
a cache is given. A remote retriever (`client.py`) has the same interface.
"""

import asyncio
import dataclasses
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from mujica_jax.errors import UserError
from mujica_jax.retrieval.errors import (
    RetrievalError,
    RetrieverOverloaded,
    RetrieverRefused,
    RetrieverTimeout,
    RetrieverUnavailable,
)
from mujica_jax.retrieval.search_cache import HitsCache
from mujica_jax.retrieval.text.corpus import Passage
from mujica_jax.retrieval.text.corpus_records import check_text
from mujica_jax.retrieval.text.index import Hits, Index

MOST_QUERIES = 256  # in one batch
HEALTH_QUERY = "health"
HELD_UP_SECONDS = 0.1  # to collect an answer that is there


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetrievalStatistics:
    """Counted since the retriever was made."""

    queries: int = 0
    cached: int = 0  # answered from the disk
    shared: int = 0  # answered with the same query of somebody else at the same time
    batches: int = 0
    failed: int = 0
    retries: int = 0
    encode_seconds: float = 0.0
    search_seconds: float = 0.0
    waiting_seconds: float = 0.0  # of all queries, from their arrival to their answer

    def with_more(self, **amounts: float) -> "RetrievalStatistics":
        return dataclasses.replace(self, **{name: getattr(self, name) + amount for name, amount in amounts.items()})

    def sentence(self) -> str:
        return (
            f"{self.queries:,} searches ({self.cached:,} cached, {self.shared:,} shared, {self.failed:,} failed) in {self.batches:,} "
            f"batches: {self.encode_seconds:.1f} s encoding, {self.search_seconds:.1f} s searching"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Health:
    version: str  # of the index
    passages: int
    seconds: float  # that one search took
    kind: str = ""  # of the index, where a service says it


class Retriever(Protocol):
    @property
    def statistics(self) -> RetrievalStatistics: ...

    async def search(self, query: str, k: int) -> Sequence[Passage]:
        """At most k passages, best first. Raises RetrievalError."""
        ...

    async def health(self) -> Health:
        """After one real search, past every cache. Raises RetrievalError."""
        ...


class IndexRetriever:
    """An index of this process. Use from one event loop at a time.

    `inline` searches without a thread, which holds up the event loop and has no deadline: for an index that answers in a fraction of a
    millisecond, so that what agents do in the meantime does not depend on the clock.
    """

    def __init__(
        self,
        index: Index,
        *,
        cache: HitsCache | None = None,
        inline: bool = False,
        deadline_seconds: float = 60.0,
        most_waiting: int = 4096,
    ) -> None:
        self.index = index
        self._cache, self._inline = cache, inline
        self._deadline_seconds, self.most_waiting = deadline_seconds, most_waiting
        self._statistics, self._counting = RetrievalStatistics(), threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: dict[tuple[str, int], asyncio.Future[Hits]] = {}
        self._under_way: dict[tuple[str, int], asyncio.Future[Hits]] = {}
        self._draining: asyncio.Task[None] | None = None

    @property
    def statistics(self) -> RetrievalStatistics:
        return self._statistics

    async def search(self, query: str, k: int) -> list[Passage]:
        return [self.index.passages[position] for position, _ in await self.hits(query, k)]

    async def hits(self, query: str, k: int) -> Hits:
        """Positions and scores, as the index gives them. Raises RetrievalError."""
        began = time.monotonic()
        self._count(queries=1)
        try:
            check_text(query)  # in a batch it would fail the others too
            found = self._cached(query, k)
            if found is not None:
                self._count(cached=1)
                return found
            return await self._asked(query, k)
        except UserError as error:
            self._count(failed=1)
            raise RetrieverRefused(str(error)) from error
        except RetrievalError:
            self._count(failed=1)
            raise
        finally:
            self._count(waiting_seconds=time.monotonic() - began)

    async def health(self) -> Health:
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._deadline_seconds):
                await asyncio.to_thread(self._answer, [HEALTH_QUERY], 1, keep=False)
        except TimeoutError as error:
            raise self._too_late() from error
        return Health(version=self.index.version, passages=len(self.index.passages), seconds=time.monotonic() - began)

    async def _asked(self, query: str, k: int) -> Hits:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # what waited in an earlier loop ended with it
            self._loop, self._waiting, self._under_way, self._draining = loop, {}, {}, None
        key = (query, k)
        future = self._waiting.get(key) or self._under_way.get(key)
        if future is not None:
            self._count(shared=1)
        else:
            if len(self._waiting) >= self.most_waiting:
                raise RetrieverOverloaded(
                    f"{len(self._waiting)} searches wait, of at most {self.most_waiting}: come back later, or send fewer at once"
                )
            future = loop.create_future()
            future.add_done_callback(lambda done: done.cancelled() or done.exception())  # heard even if nobody waits
            self._waiting[key] = future
            if self._draining is None or self._draining.done():
                self._draining = loop.create_task(self._drain())
        # `asyncio.wait` leaves the future to others who may wait for the same one. Where something else (compiling the engine) held up the
        # event loop, an answer that came meanwhile is not late: the second wait lets it arrive.
        for seconds in (self._deadline_seconds, HELD_UP_SECONDS):
            if (await asyncio.wait({future}, timeout=seconds))[0]:
                return future.result()
        raise self._too_late()

    async def _drain(self) -> None:
        """Search what waits, batch by batch, until nothing does."""
        while self._waiting:
            await asyncio.sleep(0)  # who asks in the same turn of the loop comes along
            k = next(iter(self._waiting))[1]
            keys = [key for key in self._waiting if key[1] == k][:MOST_QUERIES]
            batch = self._under_way = {key: self._waiting.pop(key) for key in keys}
            queries = [query for query, _ in keys]
            try:
                found = self._answer(queries, k) if self._inline else await asyncio.to_thread(self._answer, queries, k)
                for future, hits in zip(batch.values(), found, strict=True):
                    future.set_result(hits)
            except Exception as error:
                for future in batch.values():
                    future.set_exception(error)
            finally:
                self._under_way = {}

    def _cached(self, query: str, k: int) -> Hits | None:
        """None for a position that the index has not: a file that somebody changed is searched again."""
        found = self._cache.get(query, k) if self._cache is not None else None
        if found is not None and all(0 <= position < len(self.index.passages) for position, _ in found):
            return found
        return None

    def _answer(self, queries: Sequence[str], k: int, *, keep: bool = True) -> list[Hits]:
        began = time.monotonic()
        try:
            encoded = self.index.encode(queries)
            middle = time.monotonic()
            found = self.index.search_encoded(encoded, k)
        except UserError as error:
            raise RetrieverRefused(str(error)) from error
        except (OSError, RuntimeError) as error:  # a disk, or a device that ran out of memory
            raise RetrieverUnavailable(f"the index failed ({error})") from error
        ended = time.monotonic()
        self._count(batches=1, encode_seconds=middle - began, search_seconds=ended - middle)
        if keep and self._cache is not None:
            self._cache.put(queries, k, found)
        return found

    def _count(self, **amounts: float) -> None:
        with self._counting:  # searches count from their thread
            self._statistics = self._statistics.with_more(**amounts)

    def _too_late(self) -> RetrieverTimeout:
        return RetrieverTimeout(f"the index gave no answer within the deadline of {self._deadline_seconds:g} s")
