"""A knowledge graph behind a SPARQL endpoint.

It may be Wikidata's, a QLever of one's own, or `oxigraph serve-read-only`.

Answers are kept on disk by address and query, and the same query goes there once at a time.
Requests are sent again after transient errors (`http/retry.py`), not faster than
`queries_per_second`; when the endpoint asks for a pause, all of them wait. The endpoint's data must
be in Wikidata's vocabulary (`sparql.py`).
"""

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import random
import time
import urllib.parse
from collections.abc import Callable, Iterable
from typing import Any

from mujica_jax import __version__
from mujica_jax.config.cache_folders import cache_folder
from mujica_jax.errors import UserError
from mujica_jax.http.client import HttpClient, TransientError
from mujica_jax.http.retry import RetryPolicy, RetryTarget, deadline_exceeded, retry
from mujica_jax.retrieval.batching import Batcher
from mujica_jax.retrieval.errors import (
    RetrievalError,
    RetrieverRefusedError,
    RetrieverUnavailableError,
    as_retrieval_errors,
)
from mujica_jax.retrieval.graph import sparql
from mujica_jax.retrieval.graph.knowledge_graph import KnowledgeGraph, Read
from mujica_jax.retrieval.search_cache import SearchCache

# Stands before http:// or https://, and tells such an address from that of a service of passages.
SCHEME = "sparql+"
EXAMPLE = "sparql+https://HOST/sparql"
ADVICE = "check the address and that a SPARQL endpoint answers there"
HEADERS = {
    "Content-Type": "application/x-www-form-urlencoded",
    "Accept": "application/sparql-results+json",
    # Wikidata refuses requests without one.
    "User-Agent": f"mujica_jax/{__version__}",
}
# What reading a text raises that is no table of results.
NO_ANSWER = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
CHECK_ATTEMPTS = 3
PUBLIC_QUERIES_PER_SECOND = 10.0
PUBLIC_POLICY = RetryPolicy(timeout_seconds=60.0, deadline_seconds=180.0, first_wait_seconds=0.5)


class SparqlEndpoint(KnowledgeGraph):
    """A graph behind a SPARQL endpoint. Use from one event loop at a time."""

    def __init__(
        self,
        address: str,
        *,
        cache: SearchCache | None = None,
        languages: tuple[str, ...] = sparql.LANGUAGES,
        queries_per_second: float = PUBLIC_QUERIES_PER_SECOND,
        concurrency: int = 4,
        policy: RetryPolicy = PUBLIC_POLICY,
    ) -> None:
        """Make no request yet. The address may begin with SCHEME."""
        url = address.removeprefix(SCHEME)
        super().__init__(version=url, languages=languages)
        self._client = HttpClient(
            url, api_key_variable=None, connections=concurrency, example=EXAMPLE
        )
        self._cache = cache
        self._policy = policy
        self._seconds_between_requests = 1.0 / queries_per_second
        self._next_request_time = 0.0  # when the next request may go
        self._random = random.Random(0)
        self._batcher = Batcher[list[sparql.Row]](
            self._answer,
            self,
            max_queries=1,
            concurrency=concurrency,
            deadline_seconds=policy.deadline_seconds + 1.0,
            late=str(deadline_exceeded(url, policy, "too many searches before this one")),
        )

    async def ask(self, query: str, read: Callable[[Iterable[sparql.Row]], Read]) -> Read:
        """Return what `read` makes of the rows of a SPARQL query. Raises RetrievalError."""
        cached_text = self._cache.read(query) if self._cache is not None else None
        if cached_text is not None:
            # A damaged answer is asked for again.
            with contextlib.suppress(*NO_ANSWER):
                result = read(_rows(cached_text, query))
                self.count(cached=1)
                return result

        rows = await self._batcher.ask(query, 0)
        try:
            return read(rows)
        except NO_ANSWER as error:
            raise RetrieverUnavailableError(
                f"{self.version} answered something else than was asked ({type(error).__name__}: "
                f"{error}): {ADVICE}"
            ) from error

    async def check(self) -> None:
        """Check by one small query, past the cache, that the graph can be read here.

        Raises RetrievalError.
        """
        policy = dataclasses.replace(self._policy, max_attempts=CHECK_ATTEMPTS)
        rows = await self._fetch(sparql.CLAIMS_QUERY, policy)
        if not rows:
            raise RetrieverRefusedError(
                f"{self.version} knows no wikibase:directClaim: it answers, and holds no graph in "
                "Wikidata's vocabulary"
            )

    async def _answer(self, queries: list[str], _: int) -> list[list[sparql.Row]]:
        """Return the rows of each query of a batch, which has one."""
        return [await self._fetch(query, self._policy) for query in queries]

    async def _fetch(self, query: str, policy: RetryPolicy) -> list[sparql.Row]:
        """Return the rows of a query from the endpoint, and write its answer into the cache."""

        async def attempt() -> list[sparql.Row]:
            start_time = time.monotonic()
            answer = await self._client.exchange(urllib.parse.urlencode({"query": query}), HEADERS)
            self.count(batches=1, search_seconds=time.monotonic() - start_time)
            try:
                text = answer.decode("utf-8-sig")
                rows = _rows(text, query)
            except NO_ANSWER as error:
                shown = self._client.shown(f"{type(error).__name__}: {error}")
                raise TransientError(f"an answer that is no SPARQL result ({shown})") from error
            if self._cache is not None:
                self._cache.write([(query, 0, text)])
            return rows

        with as_retrieval_errors():
            return await retry(
                attempt,
                policy,
                RetryTarget(url=self.version, advice=ADVICE),
                pause_random=self._random,
                before_attempt=self._wait_for_turn,
                on_retry=self._pause,
            )

    async def _wait_for_turn(self) -> None:
        """Wait until the next request may go."""
        while (wait_seconds := self._next_request_time - time.monotonic()) > 0:
            await asyncio.sleep(wait_seconds)
        self._next_request_time = time.monotonic() + self._seconds_between_requests

    def _pause(self, error: TransientError) -> None:
        """Let all requests wait as long as the endpoint asks for."""
        self.count(retries=1)
        pause_end = time.monotonic() + error.after_seconds
        self._next_request_time = max(self._next_request_time, pause_end)


def open_endpoint(
    address: str, queries_per_second: float = PUBLIC_QUERIES_PER_SECOND
) -> SparqlEndpoint:
    """Return an endpoint that answers, with a cache of all its answers on this machine.

    It is called at the start of a run, before there is an event loop. Raises UserError.
    """
    name = hashlib.sha256(address.removeprefix(SCHEME).encode()).hexdigest()[:16]
    cache = SearchCache(cache_folder("searches"), f"sparql-{name}")
    endpoint = SparqlEndpoint(address, cache=cache, queries_per_second=queries_per_second)
    try:
        asyncio.run(endpoint.check())
    except RetrievalError as error:
        raise UserError(str(error)) from error
    return endpoint


def _rows(text: str, query: str) -> list[sparql.Row]:
    """Return the rows of an answer.

    Raises one of NO_ANSWER where the text is no table of results, or of others than the query's.
    """
    answer = json.loads(text)
    columns = set(answer["head"]["vars"])
    bindings = answer["results"]["bindings"]
    if columns != sparql.columns(query):
        raise ValueError("other columns than were asked for")
    return [_row(binding, columns) for binding in bindings]


def _row(binding: Any, columns: set[str]) -> sparql.Row:
    """Return the terms of a row by column; None where it has none."""
    return {name: sparql.term_of(binding.get(name)) for name in columns}
