"""The retriever interface that environments use, and the retriever over a local index.

`Retriever` is the interface: an environment passes a query and gets passages back.
`IndexRetriever` implements it with an index in this process, and stores results on disk if it gets
a cache. `RemoteRetriever` (`client.py`) implements it with a retrieval service. Both can have a
reranker (`reranker.py`), which orders the passages that the search finds.
"""

import asyncio
import dataclasses
import json
import operator
import time
from collections.abc import Sequence
from typing import Protocol

from mujica_jax.errors import UserError
from mujica_jax.retrieval.batching import Batcher
from mujica_jax.retrieval.errors import (
    RetrieverRefusedError,
    RetrieverTimeoutError,
    RetrieverUnavailableError,
)
from mujica_jax.retrieval.reranker import Reranker
from mujica_jax.retrieval.search_cache import SearchCache
from mujica_jax.retrieval.statistics import Counted, RetrievalStatistics
from mujica_jax.retrieval.text.corpus import Hits, Passage
from mujica_jax.retrieval.text.corpus_records import check_text
from mujica_jax.retrieval.text.index import Index

# The largest number of queries that an index searches at once.
MAX_BATCH_QUERIES = 256
# The query that the health check searches for.
HEALTH_QUERY = "health"
# The most results for one query of a retrieval service: the largest k.
MAX_RESULTS = 1000
# The largest answer of a retrieval service.
MAX_ANSWER_BYTES = 64 * 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Health:
    """The result of a health check."""

    # Version of the index (a hash of its content).
    version: str
    # Number of passages in the index.
    passages: int
    # Duration of the search that the check made.
    seconds: float
    # Kind of the index, such as "bm25". Only a service fills this in.
    kind: str = ""


class Retriever(Protocol):
    """The interface of everything that searches passages."""

    @property
    def statistics(self) -> RetrievalStatistics:
        """Counters of the searches so far."""
        ...

    async def search(self, query: str, k: int) -> Sequence[Passage]:
        """Return at most k passages, best first. Raises RetrievalError."""
        ...


class IndexRetriever(Counted):
    """A retriever over an index in this process. Use it from one event loop at a time.

    By default, searches run in a thread. With `inline`, they run in the event loop itself. This
    blocks the loop and has no deadline, so it is meant for an index that answers in a fraction of a
    millisecond. In return, the order in which agents act does not depend on the clock. A reranker
    always works in a thread.
    """

    def __init__(
        self,
        index: Index,
        *,
        cache: SearchCache | None = None,
        reranker: Reranker | None = None,
        inline: bool = False,
        deadline_seconds: float = 60.0,
        max_waiting: int = 4096,
    ) -> None:
        """Search `index`, and store results in `cache` if there is one.

        With a `reranker`, it chooses the results among more passages that the index finds. At most
        `max_waiting` queries wait; further ones are refused. A query that is not answered
        within `deadline_seconds` fails.
        """
        super().__init__()
        self.index = index
        self.reranker = reranker
        self.max_waiting = max_waiting
        self._cache = cache
        self._inline = inline
        self._deadline_seconds = deadline_seconds
        self._late = f"the index gave no answer within the deadline of {deadline_seconds:g} s"
        self._batcher = Batcher[str, Hits](
            self._answer,
            self,
            max_queries=MAX_BATCH_QUERIES,
            max_waiting=max_waiting,
            deadline_seconds=deadline_seconds,
            late=self._late,
        )

    @property
    def version(self) -> str:
        """A hash of everything that search results depend on."""
        if self.reranker is None:
            return self.index.version
        return f"{self.index.version}-{self.reranker.version}"

    async def search(self, query: str, k: int) -> list[Passage]:
        """Return at most k passages, best first. Raises RetrievalError."""
        return [self.index.passages[position] for position, _ in await self.hits(query, k)]

    async def hits(self, query: str, k: int) -> Hits:
        """Return the (position, score) pairs of at most k passages, best first.

        Raises RetrievalError.
        """
        with self.counted_search():
            try:
                # Check before batching: a bad query would make its whole batch fail.
                check_text(query)
            except UserError as error:
                raise RetrieverRefusedError(str(error)) from error
            if self.reranker is None:
                return await self._index_hits(query, k)

            candidates = min(self.reranker.candidates_for(k), len(self.index.passages))
            hits = await self._index_hits(query, candidates)
            passages = [self.index.passages[position] for position, _ in hits]
            best = await self.reranker.best(query, passages, k, self)
            return [(hits[place][0], score) for place, score in best]

    async def _index_hits(self, query: str, k: int) -> Hits:
        """Return the results of the index, from the cache if they are there."""
        cached_hits = self._read_cache(query, k)
        if cached_hits is not None:
            self.count(cached=1)
            return cached_hits
        return await self._batcher.ask(query, k)

    async def health(self) -> Health:
        """Search and rerank once, without caches, and return the health. Raises RetrievalError."""
        start_time = time.monotonic()
        try:
            async with asyncio.timeout(self._deadline_seconds):
                await asyncio.to_thread(self._search, [HEALTH_QUERY], 1, is_cached=False)
                if self.reranker is not None:
                    await self.reranker.check()
        except TimeoutError as error:
            raise RetrieverTimeoutError(self._late) from error
        return Health(
            version=self.version,
            passages=len(self.index.passages),
            seconds=time.monotonic() - start_time,
        )

    def _read_cache(self, query: str, k: int) -> Hits | None:
        """Return the cached result of a query, or None.

        A damaged or changed cache file can hold an entry that this index cannot have produced. Such
        an entry also gives None, and the query is searched again.
        """
        if self._cache is None:
            return None
        text = self._cache.read(query, k)
        if text is None:
            return None
        try:
            hits = [
                (operator.index(position), float(score)) for position, score in json.loads(text)
            ]
        except (TypeError, ValueError, OverflowError, RecursionError):
            return None

        # Every position must exist in the index, and must occur only once.
        passages = len(self.index.passages)
        positions = {position for position, _ in hits if 0 <= position < passages}
        is_valid = len(positions) == len(hits) <= k
        return hits if is_valid else None

    async def _answer(self, queries: Sequence[str], k: int) -> list[Hits]:
        """Search for a batch of queries, in a thread unless `inline` is set."""
        if self._inline:
            return self._search(queries, k)
        return await asyncio.to_thread(self._search, queries, k)

    def _search(self, queries: Sequence[str], k: int, *, is_cached: bool = True) -> list[Hits]:
        """Return the results of a batch of queries, and store them in the cache if `is_cached`.

        Raises RetrieverUnavailableError if the index fails.
        """
        start_time = time.monotonic()
        try:
            encoded = self.index.encode(queries)
            encoded_time = time.monotonic()
            results = self.index.search_encoded(encoded, k)
        # The disk failed (OSError), or a device ran out of memory (RuntimeError).
        except (OSError, RuntimeError) as error:
            raise RetrieverUnavailableError(f"the index failed ({error})") from error
        self.count(
            batches=1,
            encode_seconds=encoded_time - start_time,
            search_seconds=time.monotonic() - encoded_time,
        )

        if is_cached and self._cache is not None:
            rows = [
                (query, k, json.dumps(hits)) for query, hits in zip(queries, results, strict=True)
            ]
            self._cache.write(rows)
        return results
