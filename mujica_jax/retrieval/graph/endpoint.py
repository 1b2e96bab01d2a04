"""A knowledge graph behind a SPARQL endpoint.

The endpoint can be Wikidata's, your own QLever, or `oxigraph serve-read-only`. Its data must be in
Wikidata's vocabulary (`sparql.py`).

Answers are stored on disk by address and query. If several agents ask the same query at the same
time, it is sent once. Requests are sent again after transient errors (`http/retry.py`). At most
`queries_per_second` requests are sent. If the endpoint asks for a pause, all requests wait.
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

# Prefix of http:// or https:// in the address of an endpoint. The address of a retrieval service
# for passages has no such prefix.
SCHEME = "sparql+"
EXAMPLE = "sparql+https://HOST/sparql"
ADVICE = "check the address and that a SPARQL endpoint answers there"
HEADERS = {
    "Content-Type": "application/x-www-form-urlencoded",
    "Accept": "application/sparql-results+json",
    # Wikidata refuses requests without a user agent.
    "User-Agent": f"mujica_jax/{__version__}",
}
# Exceptions from reading a text that is not a table of SPARQL results.
NO_ANSWER = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
# Number of attempts of the check at the start of a run.
CHECK_ATTEMPTS = 3
PUBLIC_QUERIES_PER_SECOND = 10.0
PUBLIC_POLICY = RetryPolicy(timeout_seconds=60.0, deadline_seconds=180.0, first_wait_seconds=0.5)


class SparqlEndpoint(KnowledgeGraph):
    """A graph behind a SPARQL endpoint. Use it from one event loop at a time."""

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
        """Set up the client without a request. The address may begin with SCHEME.

        At most `concurrency` requests are sent at the same time.
        """
        url = address.removeprefix(SCHEME)
        super().__init__(version=url, languages=languages)
        self._client = HttpClient(
            url, api_key_variable=None, connections=concurrency, example=EXAMPLE
        )
        self._cache = cache
        self._policy = policy
        self._seconds_between_requests = 1.0 / queries_per_second
        # Earliest time of the next request, on the monotonic clock.
        self._next_request_time = 0.0
        self._random = random.Random(0)
        self._batcher = Batcher[str, list[sparql.Row]](
            self._answer,
            self,
            max_queries=1,
            concurrency=concurrency,
            deadline_seconds=policy.deadline_seconds + 1.0,
            late=str(
                deadline_exceeded(url, policy, "too many searches were waiting before this one")
            ),
        )

    async def ask(self, query: str, read: Callable[[Iterable[sparql.Row]], Read]) -> Read:
        """Run a SPARQL query, and return the result of `read(rows)`. Raises RetrievalError."""
        cached_text = self._cache.read(query) if self._cache is not None else None
        if cached_text is not None:
            # If the stored answer is damaged, ask the endpoint again.
            with contextlib.suppress(*NO_ANSWER):
                result = read(_rows(cached_text, query))
                self.count(cached=1)
                return result

        rows = await self._batcher.ask(query, 0)
        try:
            return read(rows)
        except NO_ANSWER as error:
            raise RetrieverUnavailableError(
                f"the answer of {self.version} does not fit the query ({type(error).__name__}: "
                f"{error}): {ADVICE}"
            ) from error

    async def check(self) -> None:
        """Send one small query, without the cache, to check that the endpoint works.

        Raises RetrievalError, also if its data are not in Wikidata's vocabulary.
        """
        policy = dataclasses.replace(self._policy, max_attempts=CHECK_ATTEMPTS)
        rows = await self._fetch(sparql.CLAIMS_QUERY, policy)
        if not rows:
            raise RetrieverRefusedError(
                f"{self.version} answers, but its graph has no wikibase:directClaim: give an "
                "endpoint with a graph in Wikidata's vocabulary"
            )

    async def _answer(self, queries: list[str], _: int) -> list[list[sparql.Row]]:
        """Return the rows of each query of a batch. A batch has one query."""
        return [await self._fetch(query, self._policy) for query in queries]

    async def _fetch(self, query: str, policy: RetryPolicy) -> list[sparql.Row]:
        """Send a query to the endpoint, store the answer in the cache, and return its rows."""

        async def attempt() -> list[sparql.Row]:
            start_time = time.monotonic()
            answer = await self._client.exchange(urllib.parse.urlencode({"query": query}), HEADERS)
            self.count(batches=1, search_seconds=time.monotonic() - start_time)
            try:
                text = answer.decode("utf-8-sig")
                rows = _rows(text, query)
            except NO_ANSWER as error:
                shown = self._client.shown(f"{type(error).__name__}: {error}")
                raise TransientError(f"an answer that is not a SPARQL result ({shown})") from error
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
        """Wait until the next request may be sent."""
        while (wait_seconds := self._next_request_time - time.monotonic()) > 0:
            await asyncio.sleep(wait_seconds)
        self._next_request_time = time.monotonic() + self._seconds_between_requests

    def _pause(self, error: TransientError) -> None:
        """Delay all requests for as long as the endpoint asks."""
        self.count(retries=1)
        pause_end = time.monotonic() + error.after_seconds
        self._next_request_time = max(self._next_request_time, pause_end)


def open_endpoint(
    address: str, queries_per_second: float = PUBLIC_QUERIES_PER_SECOND
) -> SparqlEndpoint:
    """Connect to an endpoint, check it, and return it. Its answers are cached on this machine.

    Call this at the start of a run, before there is an event loop. Raises UserError.
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

    Raises one of NO_ANSWER if the text is not a table of results, or has other columns than the
    query.
    """
    answer = json.loads(text)
    columns = set(answer["head"]["vars"])
    bindings = answer["results"]["bindings"]
    if columns != sparql.columns(query):
        raise ValueError("other columns than were asked for")
    return [_row(binding, columns) for binding in bindings]


def _row(binding: Any, columns: set[str]) -> sparql.Row:
    """Return the terms of a row by column. A missing term is None."""
    return {name: sparql.term_of(binding.get(name)) for name in columns}
