"""The retriever of another host: `service.py` behind the interface of a local index.

Queries that arrive together are sent as one request. The same query is sent only once at a time. A
request is sent again after a transient error: a busy or failing server, a broken connection, an
attempt without an answer, or an answer that is no JSON or does not fit the request. A request that
is too large for the service, or whose answer is too large, is sent in two halves. A request that
the service refuses for another reason is not sent again.
"""

import random
import time
from typing import Any

from mujica_jax.errors import UserError
from mujica_jax.http.client import HttpClient, PayloadTooLargeError, TransientError
from mujica_jax.http.retry import RetryPolicy, RetryTarget, deadline_exceeded, retry
from mujica_jax.retrieval.batching import Batcher
from mujica_jax.retrieval.errors import (
    RetrievalError,
    RetrieverRefusedError,
    RetrieverUnavailableError,
    as_retrieval_errors,
)
from mujica_jax.retrieval.retriever import MAX_ANSWER_BYTES, Health
from mujica_jax.retrieval.statistics import Counted
from mujica_jax.retrieval.text.corpus import Passage

MAX_REQUEST_QUERIES = 64
HEALTH_SECONDS = 30.0
POLICY = RetryPolicy()


class RemoteRetriever(Counted):
    """A retrieval service. Use from one event loop at a time."""

    def __init__(self, url: str, *, concurrency: int = 8, policy: RetryPolicy = POLICY) -> None:
        super().__init__()
        self.url = url.rstrip("/")
        # The index's version in the first answer. Another one later is refused: results would
        # change in a run.
        self.version: str | None = None
        self._client = HttpClient(
            f"{self.url}/search",
            api_key_variable=None,
            connections=concurrency,
            max_answer_bytes=MAX_ANSWER_BYTES + 2**20,  # with commas and brackets
        )
        self._policy = policy
        self._random = random.Random(0)
        self._batcher = Batcher[list[Passage]](
            self._answer,
            self,
            max_queries=MAX_REQUEST_QUERIES,
            concurrency=concurrency,
            deadline_seconds=policy.deadline_seconds,
            late=str(deadline_exceeded(self.url, policy, "too many searches before this one")),
        )

    async def search(self, query: str, k: int) -> list[Passage]:
        """Return at most k passages, best first. Raises RetrievalError."""
        with self.counted_search():
            return await self._batcher.ask(query, k)

    def check(self) -> Health:
        """Return the service's own health from one request without retries.

        It is for the start of a run, before there is an event loop.
        """
        import httpx

        try:
            response = httpx.get(f"{self.url}/healthz", timeout=HEALTH_SECONDS)
            content = response.json()
            if response.status_code != 200:
                raise RetrieverUnavailableError(
                    f"{self.url} is not well (status {response.status_code}: {content})"
                )
            health = Health(
                version=content["version"],
                passages=content["passages"],
                seconds=content["seconds"],
                kind=content["kind"],
            )
        except (httpx.HTTPError, ValueError, RecursionError, KeyError, TypeError) as error:
            raise RetrieverUnavailableError(
                f"{self.url} gives no health ({type(error).__name__}: {error}): check the address "
                "and that `python -m mujica_jax.index serve` runs there"
            ) from error
        self._check_version(health.version)
        return health

    async def _answer(self, queries: list[str], k: int) -> list[list[Passage]]:
        """Return the passages of each query, from one request or from two halves of it."""

        async def attempt() -> list[list[Passage]]:
            start_time = time.monotonic()
            answer = await self._client.post({"queries": queries, "k": k})
            self.count(batches=1, search_seconds=time.monotonic() - start_time)
            return self._read(answer, queries=len(queries), k=k)

        try:
            with as_retrieval_errors():
                return await retry(
                    attempt,
                    self._policy,
                    RetryTarget(
                        url=self.url,
                        advice="check that `python -m mujica_jax.index serve` runs there",
                    ),
                    pause_random=self._random,
                    on_retry=lambda error: self.count(retries=1),
                )
        except RetrieverRefusedError as refused:
            if len(queries) == 1 or not isinstance(refused.__cause__, PayloadTooLargeError):
                raise

        half = len(queries) // 2
        first_half = await self._answer(queries[:half], k)
        second_half = await self._answer(queries[half:], k)
        return [*first_half, *second_half]

    def _read(self, answer: dict[str, Any], queries: int, k: int) -> list[list[Passage]]:
        """Return the passages of an answer.

        Raises TransientError if it does not answer this request.
        """
        try:
            version = answer["version"]
            results = [_passages(hits) for hits in answer["results"]]
        except (KeyError, TypeError) as error:
            raise TransientError(
                f"an answer that is none ({type(error).__name__}: {error})"
            ) from error

        is_well_formed = all(len(passages) <= k for passages in results)
        for passages in results:
            for passage in passages:
                texts = (passage.id, passage.title, passage.text)
                is_well_formed &= all(isinstance(text, str) for text in texts)
        if len(results) != queries or not is_well_formed or not isinstance(version, str):
            raise TransientError(
                f"an answer of {len(results)} results to {queries} queries for {k} passages each"
            )
        self._check_version(version)
        return results

    def _check_version(self, version: str) -> None:
        """Check that the service still serves the index that it served first."""
        if self.version is None:
            self.version = version
        elif version != self.version:
            raise RetrieverRefusedError(
                f"{self.url} serves version {version} of its index and version {self.version} was "
                "searched before: serve that one again, or begin anew"
            )


def _passages(hits: Any) -> list[Passage]:
    """Return the passages of one query's results, not yet checked."""
    return [Passage(id=hit["id"], title=hit["title"], text=hit["text"]) for hit in hits]


def open_remote(url: str, retriever: str, top_k: int) -> RemoteRetriever:
    """Return the retriever of a service after a check of its health, kind and size.

    The kind must be the one that the configuration names, and it must have `top_k` passages.
    Raises UserError.
    """
    remote = RemoteRetriever(url)
    try:
        health = remote.check()
    except RetrievalError as error:
        raise UserError(str(error)) from error
    if (health.kind == "bm25") != (retriever == "bm25"):
        raise UserError(
            f"retriever is {retriever} and {url} serves an index of kind {health.kind}: give "
            "another address or retriever"
        )
    if top_k > health.passages:
        raise UserError(
            f"top_k is {top_k} and {url} serves an index of {health.passages:,} passages: lower "
            "top_k"
        )
    return remote
