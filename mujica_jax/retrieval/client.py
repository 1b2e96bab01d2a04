"""A client of the retrieval service (`service.py`), with the interface of a local retriever.

Queries that arrive together are sent as one request. If two agents ask the same query at the same
time, it is sent once.

A request is sent again after a transient error. Such an error is a busy or failing server, a broken
connection, a timeout, or an answer that is not JSON or does not fit the request. If the request or
its answer is too large for the service, the queries are sent in two halves. If the service refuses
a request for any other reason, it is not sent again. If there is a reranker (`reranker.py`), it
chooses the results in this process, among more passages that the service finds.
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
from mujica_jax.retrieval.reranker import Reranker
from mujica_jax.retrieval.retriever import MAX_ANSWER_BYTES, MAX_RESULTS, Health
from mujica_jax.retrieval.statistics import Counted
from mujica_jax.retrieval.text.corpus import Passage

# The largest number of queries in one request.
MAX_REQUEST_QUERIES = 64
# Timeout of the health check.
HEALTH_SECONDS = 30.0
POLICY = RetryPolicy()


class RemoteRetriever(Counted):
    """A retriever that asks a retrieval service. Use it from one event loop at a time."""

    # The route that is asked, and what to check if it does not answer.
    route = "search"
    advice = "check that `python -m mujica_jax.index serve` runs there"

    def __init__(self, url: str, *, concurrency: int = 8, policy: RetryPolicy = POLICY) -> None:
        super().__init__()
        self.url = url.rstrip("/")
        # Set by `open_remote` and `open_protocol`, after the check of the service.
        self.reranker: Reranker | None = None
        # Number of passages in the index, if the service says it.
        self.passages: int | None = None
        # The index version of the first answer. A later answer with another version is an error,
        # because results would change in the middle of a run.
        self.version: str | None = None
        self._client = HttpClient(
            f"{self.url}/{self.route}",
            api_key_variable=None,
            connections=concurrency,
            # MAX_ANSWER_BYTES limits the hits. The rest is for commas and brackets.
            max_answer_bytes=MAX_ANSWER_BYTES + 2**20,
        )
        self._policy = policy
        self._random = random.Random(0)
        self._batcher = Batcher[str, list[Passage]](
            self._answer,
            self,
            max_queries=MAX_REQUEST_QUERIES,
            concurrency=concurrency,
            deadline_seconds=policy.deadline_seconds,
            late=str(
                deadline_exceeded(
                    self.url, policy, "too many searches were waiting before this one"
                )
            ),
        )

    async def search(self, query: str, k: int) -> list[Passage]:
        """Return at most k passages, best first. Raises RetrievalError."""
        with self.counted_search():
            if self.reranker is None:
                return await self._batcher.ask(query, k)

            candidates = self.reranker.candidates_for(k)
            if self.passages is not None:
                candidates = min(candidates, self.passages)
            passages = await self._batcher.ask(query, candidates)
            best = await self.reranker.best(query, passages, k, self)
            return [passages[place] for place, _ in best]

    def check(self) -> Health:
        """Ask the service for its health once, without retries, and return it.

        The call is synchronous: it is made at the start of a run, before there is an event loop.
        Raises RetrieverUnavailableError, or RetrieverRefusedError if the index version changed.
        """
        import httpx

        try:
            response = httpx.get(f"{self.url}/healthz", timeout=HEALTH_SECONDS)
            content = response.json()
            if response.status_code != 200:
                raise RetrieverUnavailableError(
                    f"the retrieval service at {self.url} is unhealthy (status "
                    f"{response.status_code}: {content}): look at its log"
                )
            health = Health(
                version=content["version"],
                passages=content["passages"],
                seconds=content["seconds"],
                kind=content["kind"],
            )
        except (httpx.HTTPError, ValueError, RecursionError, KeyError, TypeError) as error:
            raise RetrieverUnavailableError(
                f"cannot read the health of {self.url} ({type(error).__name__}: {error}): check "
                "the address, and that `python -m mujica_jax.index serve` runs there"
            ) from error
        self._check_version(health.version)
        return health

    async def _answer(self, queries: list[str], k: int) -> list[list[Passage]]:
        """Return the passages of each query.

        The queries are sent as one request, or in two halves if that is too large.
        """

        async def attempt() -> list[list[Passage]]:
            start_time = time.monotonic()
            answer = await self._client.post(self._request(queries, k))
            self.count(batches=1, search_seconds=time.monotonic() - start_time)
            return self._read(answer, queries=len(queries), k=k)

        try:
            with as_retrieval_errors():
                return await retry(
                    attempt,
                    self._policy,
                    RetryTarget(
                        url=self.url,
                        advice=self.advice,
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

    def _request(self, queries: list[str], k: int) -> dict[str, Any]:
        """Return the JSON body of a request."""
        return {"queries": queries, "k": k}

    def _results(self, answer: dict[str, Any]) -> tuple[Any, list[list[Passage]]]:
        """Return the index version of an answer, and the passages of each query.

        Types are not checked. Raises KeyError or TypeError if something is missing.
        """
        return answer["version"], [_passages(hits) for hits in answer["results"]]

    def _read(self, answer: dict[str, Any], queries: int, k: int) -> list[list[Passage]]:
        """Return the passages of an answer, one list for each query.

        Raises TransientError if the answer is malformed or does not fit the request.
        """
        try:
            version, results = self._results(answer)
        except (KeyError, TypeError) as error:
            raise TransientError(f"a malformed answer ({type(error).__name__}: {error})") from error

        is_well_formed = all(len(passages) <= k for passages in results)
        for passages in results:
            for passage in passages:
                texts = (passage.id, passage.title, passage.text)
                is_well_formed &= all(isinstance(text, str) for text in texts)
        if len(results) != queries or not is_well_formed or not isinstance(version, str):
            raise TransientError(
                f"an answer that does not fit the request ({len(results)} results for {queries} "
                f"queries of at most {k} passages each)"
            )
        self._check_version(version)
        return results

    def _check_version(self, version: str) -> None:
        """Check that the service still serves the same index version.

        The first version is remembered. Raises RetrieverRefusedError if a later one differs.
        """
        if self.version is None:
            self.version = version
        elif version != self.version:
            raise RetrieverRefusedError(
                f"{self.url} now serves index version {version}, but this run has searched version "
                f"{self.version}: serve the earlier index again, or start a new run"
            )


def _passages(hits: Any) -> list[Passage]:
    """Return the passages of one query's results. The types of their fields are unchecked."""
    return [Passage(id=hit["id"], title=hit["title"], text=hit["text"]) for hit in hits]


def open_remote(
    url: str, retriever: str, top_k: int, reranker: Reranker | None = None
) -> RemoteRetriever:
    """Connect to a retrieval service, check it, and return its retriever, with the `reranker`.

    `retriever` is the kind of retriever in the configuration. With "bm25" the service must serve a
    BM25 index, and with any other kind it must serve a dense index. The index must have at least
    `top_k` passages. Raises UserError.
    """
    remote = RemoteRetriever(url)
    try:
        health = remote.check()
    except RetrievalError as error:
        raise UserError(str(error)) from error
    if (health.kind == "bm25") != (retriever == "bm25"):
        raise UserError(
            f"retriever is {retriever!r}, but {url} serves an index of kind {health.kind!r}: give "
            "the address of another service, or set another retriever"
        )
    if top_k > health.passages:
        raise UserError(
            f"top_k is {top_k}, but the index at {url} has only {health.passages:,} passages: "
            "lower top_k"
        )
    if reranker is not None and reranker.candidates_for(top_k) > MAX_RESULTS:
        raise UserError(
            f"the reranker takes {reranker.candidates_for(top_k)} candidates, but a retrieval "
            f"service gives at most {MAX_RESULTS} passages for a query: lower rerank_candidates"
        )
    remote.reranker = reranker
    remote.passages = health.passages
    return remote
