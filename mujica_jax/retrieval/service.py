"""The retrieval service: an HTTP server that searches an index for samplers on other hosts.

    POST /search    {"queries": ["..."], "k": 5} ->
                    {"version": "...", "results": [[{"id", "title", "text", "score"}, ...], ...]}
    POST /retrieve  the same in the protocol of Search-R1 and verl (`retrieve_protocol.py`)
    GET  /, /docs   a page with the routes and examples
    GET  /healthz   200 after a successful search, 503 with the reason after a failed one
    GET  /metrics   counters in Prometheus's text format

Queries that arrive together are encoded as one batch, also if they come from different clients. The
queue of waiting queries is bounded. The body of an error is {"error": sentence}, and its status is:

    400, 413        the request is wrong, or it or its answer is too large
    408             the request took too long to arrive
    429             the queue is full; the header Retry-After says when to try again
    503             the index failed
    504             the index did not answer within the deadline
"""

import asyncio
import dataclasses
import functools
import html
import json
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily
from starlette.requests import ClientDisconnect

from mujica_jax.errors import UserError
from mujica_jax.retrieval import retrieve_protocol
from mujica_jax.retrieval.errors import (
    RetrievalError,
    RetrieverOverloadedError,
    RetrieverRefusedError,
    RetrieverTimeoutError,
)
from mujica_jax.retrieval.retrieve_protocol import DEFAULT_TOPK
from mujica_jax.retrieval.retriever import MAX_ANSWER_BYTES, MAX_RESULTS, Health, IndexRetriever
from mujica_jax.retrieval.text.corpus import Hits, Passage
from mujica_jax.retrieval.text.index import Index

# The most queries in one request.
MAX_QUERIES = 256
MAX_REQUEST_BYTES = 4 * 2**20
# The longest time in which the body of a request has to arrive.
MAX_READING_SECONDS = 20.0
# HTTP status of each error of the retriever. The status of all other errors is 503.
STATUSES = {
    RetrieverOverloadedError: 429,
    RetrieverTimeoutError: 504,
    RetrieverRefusedError: 400,
}
# Extra headers of an answer, by its status.
HEADERS = {429: {"Retry-After": "1"}, 408: {"Connection": "close"}}
# The page that answers GET / and GET /docs.
PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>mujica_jax retrieval</title>
<style>body {{ max-width: 50rem; margin: 2rem auto; padding: 0 1rem; font-family: sans-serif }}</style>
</head><body><h1>mujica_jax retrieval</h1>
<p>This service searches an index of kind {kind} with {passages}.</p>
<h2>POST /search</h2>
<pre>{{"queries": ["Who directed The Purple Shore?"], "k": 5}}
-&gt; {{"version": "...", "results": [[{{"id", "title", "text", "score"}}, ...]]}}</pre>
<h2>POST /retrieve</h2>
<p>The protocol of Search-R1 and verl. <code>contents</code> is the title in quotes, a newline, and the
text.</p>
<pre>{{"queries": ["Who directed The Purple Shore?"], "topk": 3, "return_scores": true}}
-&gt; {{"result": [[{{"document": {{"id", "contents"}}, "score"}}, ...]]}}</pre>
<h2>GET /healthz, GET /metrics</h2>
<p>Health after a real search, and counters for Prometheus.</p></body></html>
"""
# Names of the Prometheus counters begin with this.
PREFIX = "mujica_retrieval_"
# Help text of each Prometheus counter.
MEANINGS = {
    "queries": "Queries that arrived",
    "cached": "Queries answered from the disk",
    "shared": "Queries answered together with an equal one that was under way",
    "batches": "Batches searched",
    "failed": "Queries that ended in an error",
    "encode_seconds": "Seconds encoding queries",
    "search_seconds": "Seconds searching",
    "reranked": "Passages that the reranker scored",
    "rerank_seconds": "Seconds reranking",
    "waiting_seconds": "Seconds of all queries from their arrival to their answer",
}


class BadRequestError(Exception):
    """The client's request is wrong. The message is one sentence."""

    def __init__(self, sentence: str, status: int = 400) -> None:
        super().__init__(sentence)
        self.status = status


class Metrics:
    """A `prometheus_client` collector of the retriever's statistics and of answers by status."""

    def __init__(self, retriever: IndexRetriever) -> None:
        self._retriever = retriever
        self.answers: dict[int, int] = {}

    def collect(self) -> Iterator[Any]:
        """Yield the counters of the retriever, and the number of answers by status."""
        statistics = dataclasses.asdict(self._retriever.statistics)
        for name, meaning in MEANINGS.items():
            yield CounterMetricFamily(PREFIX + name, meaning, value=statistics[name])
        answers = CounterMetricFamily(PREFIX + "answers", "Answers at /search", labels=["status"])
        for status, count in sorted(self.answers.items()):
            answers.add_metric([str(status)], count)
        yield answers


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Asked:
    """What a request asks for."""

    queries: list[str]
    k: int
    # Returns a passage and its score in the form of the answer.
    hit_of: Callable[[Passage, float], dict[str, Any]]
    # Returns the body of the answer from the index version and the lists of hits, both JSON.
    body_of: Callable[[bytes, bytes], bytes]


class _Service:
    """The routes of the service of one retriever."""

    def __init__(self, retriever: IndexRetriever, kind: str) -> None:
        self._retriever = retriever
        # Kind of the index, such as "bm25".
        self._kind = kind
        # Only one thread at a time may read the file of passages.
        self._reading = asyncio.Lock()
        self._health_check: asyncio.Task[Health] | None = None
        self._metrics = Metrics(retriever)
        self._registry = CollectorRegistry()
        # The type wants a full Collector, but the registry only calls `collect`.
        self._registry.register(self._metrics)  # pyright: ignore[reportArgumentType]

    async def search(self, request: Request) -> Response:
        """Answer POST /search, and count the answer by its status."""
        return await self._answered(request, _read)

    async def retrieve(self, request: Request) -> Response:
        """Answer POST /retrieve, and count the answer by its status."""
        return await self._answered(request, _read_retrieve)

    async def page(self) -> HTMLResponse:
        """Answer GET / and GET /docs."""
        passages = f"{len(self._retriever.index.passages):,} passages"
        return HTMLResponse(PAGE.format(kind=html.escape(self._kind), passages=passages))

    async def _answered(self, request: Request, read: Callable[[bytes, int], _Asked]) -> Response:
        """Return the answer to a request whose body `read` understands, and count it."""
        try:
            status = 200
            content = await self._search(request, read)
        except BadRequestError as error:
            status = error.status
            content = json.dumps({"error": str(error)})
        except RetrievalError as error:
            status = STATUSES.get(type(error), 503)
            content = json.dumps({"error": str(error)})
        self._metrics.answers[status] = self._metrics.answers.get(status, 0) + 1
        return Response(content, status, HEADERS.get(status), "application/json")

    async def health(self) -> JSONResponse:
        """Answer GET /healthz.

        Requests that arrive during a health check share its result. Any number of them at the same
        time costs only one search.
        """
        if self._health_check is None or self._health_check.done():
            self._health_check = asyncio.create_task(self._retriever.health())
        try:
            health = await asyncio.shield(self._health_check)
        except RetrievalError as error:
            return JSONResponse({"error": str(error)}, 503)
        return JSONResponse(dataclasses.asdict(dataclasses.replace(health, kind=self._kind)))

    async def metrics(self) -> PlainTextResponse:
        """Answer GET /metrics."""
        return PlainTextResponse(generate_latest(self._registry).decode())

    async def _search(self, request: Request, read: Callable[[bytes, int], _Asked]) -> bytes:
        """Return the JSON body that answers a request. Raises BadRequestError or RetrievalError."""
        retriever = self._retriever
        asked = read(await _read_body(request), len(retriever.index.passages))
        different_queries = len(set(asked.queries))
        if different_queries > retriever.max_waiting:
            raise BadRequestError(
                f"the request has {different_queries} different queries, but the queue of this "
                f"service holds at most {retriever.max_waiting}: send fewer at once",
                status=413,
            )
        results = await asyncio.gather(*(retriever.hits(query, asked.k) for query in asked.queries))
        async with self._reading:
            hits = await asyncio.to_thread(_hits, retriever.index, results, asked.hit_of)
        return asked.body_of(json.dumps(retriever.version).encode(), hits)


def make_app(retriever: IndexRetriever, kind: str) -> FastAPI:
    """Return the web application that serves one retriever. `kind` is the kind of its index."""
    app = FastAPI(title="mujica_jax retrieval", docs_url=None, redoc_url=None, openapi_url=None)
    service = _Service(retriever, kind)
    app.add_api_route("/search", service.search, methods=["POST"], response_model=None)
    app.add_api_route("/retrieve", service.retrieve, methods=["POST"], response_model=None)
    for route in ("/", "/docs"):
        app.add_api_route(route, service.page, methods=["GET"], response_model=None)
    app.add_api_route("/healthz", service.health, methods=["GET"], response_model=None)
    app.add_api_route("/metrics", service.metrics, methods=["GET"], response_model=None)
    return app


def open_port(host: str, port: int) -> socket.socket:
    """Bind a socket and return it. Port 0 takes any free port.

    Call this before the index is loaded, so that a taken port is reported at once. Raises UserError
    if the port cannot be opened.
    """
    server_socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    server_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server_socket.bind((host, port))
    except (OSError, OverflowError) as error:
        server_socket.close()
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"{host}:{port} cannot be opened ({reason}): choose another --host or --port"
        ) from error
    return server_socket


def address_of(server_socket: socket.socket) -> str:
    """Return the URL of a bound socket, such as "http://127.0.0.1:8000"."""
    host, port = server_socket.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve_until_told(app: FastAPI, server_socket: socket.socket, announcement: str) -> None:
    """Serve until SIGTERM or SIGINT. Requests under way are still answered before the server ends.

    The announcement is printed when the port accepts connections.
    """
    server = make_server(app)

    def end_server(*_: object) -> None:
        server.should_exit = True

    # uvicorn handles both signals itself while it runs, and raises them again when it has ended.
    # These handlers catch signals before it starts and those that it raises again.
    earlier_handlers = {
        number: signal.signal(number, end_server) for number in (signal.SIGTERM, signal.SIGINT)
    }
    server_socket.listen(server.config.backlog)
    print(announcement, flush=True)
    server.run(sockets=[server_socket])
    for number, handler in earlier_handlers.items():
        signal.signal(number, handler)


def make_server(app: FastAPI) -> uvicorn.Server:
    """Return a server whose `run(sockets=[...])` serves until SIGTERM or SIGINT.

    Requests under way are still answered before it ends, for at most 30 seconds.
    """
    return uvicorn.Server(
        uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=30)
    )


async def _read_body(request: Request) -> bytes:
    """Return the body of a request. Raises BadRequestError if it is too large or too slow."""
    body = bytearray()
    try:
        async with asyncio.timeout(MAX_READING_SECONDS) as timer:
            async for part in request.stream():
                body += part
                if len(body) > MAX_REQUEST_BYTES:
                    raise BadRequestError(
                        f"the request has more than {MAX_REQUEST_BYTES:,} bytes: send fewer "
                        "queries at once",
                        status=413,
                    )
    except ClientDisconnect as error:
        raise BadRequestError("the client closed the connection") from error
    except TimeoutError as error:
        if not timer.expired():
            raise
        raise BadRequestError(
            f"the whole request did not arrive within {MAX_READING_SECONDS:g} s: send it again",
            status=408,
        ) from error
    return bytes(body)


def _read(body: bytes, passages: int) -> _Asked:
    """Return what a request to /search asks for. Raises BadRequestError if it is invalid.

    `passages` is the number of passages in the index, the upper limit of k.
    """
    content = _object(body)
    queries = _queries(content, '"queries" (a list of strings) and "k" (an integer)')
    k = content.get("k")
    max_k = min(passages, MAX_RESULTS)
    if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= max_k:
        raise BadRequestError(f"k is {k!r}: give 1 to {max_k}")
    return _Asked(queries=queries, k=k, hit_of=_hit, body_of=_body)


def _read_retrieve(body: bytes, passages: int) -> _Asked:
    """Return what a request to /retrieve asks for. Raises BadRequestError if it is invalid.

    As in other servers, a topk above the number of passages returns all of them.
    """
    content = _object(body)
    queries = _queries(content, '"queries" (a list of strings)')
    topk = DEFAULT_TOPK if content.get("topk") is None else content["topk"]
    if not isinstance(topk, int) or isinstance(topk, bool) or not 1 <= topk <= MAX_RESULTS:
        raise BadRequestError(f"topk is {topk!r}: give 1 to {MAX_RESULTS}")
    return_scores = content.get("return_scores", False)
    if not isinstance(return_scores, bool):
        raise BadRequestError(f"return_scores is {return_scores!r}: give true or false")
    hit_of = functools.partial(retrieve_protocol.hit_of, return_scores=return_scores)
    return _Asked(queries=queries, k=min(topk, passages), hit_of=hit_of, body_of=_body_of_retrieve)


def _object(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a request's body. Something else counts as an empty object."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the request is not JSON ({error})") from error
    return content if isinstance(content, dict) else {}


def _queries(content: dict[str, Any], fields: str) -> list[str]:
    """Return the queries of a request. `fields` names the fields that it needs."""
    queries = content.get("queries")
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise BadRequestError(f"the request needs {fields}")
    if not 1 <= len(queries) <= MAX_QUERIES:
        raise BadRequestError(f"the request has {len(queries)} queries: send 1 to {MAX_QUERIES}")
    return queries


def _hit(passage: Passage, score: float) -> dict[str, Any]:
    """Return one hit of an answer to /search."""
    return {
        "id": passage.id,
        "title": passage.title,
        "text": passage.text,
        "score": round(score, 6),
    }


def _body(version: bytes, hits: bytes) -> bytes:
    """Return the body of an answer to /search."""
    return b'{"version":%b,"results":[%b]}' % (version, hits)


def _body_of_retrieve(version: bytes, hits: bytes) -> bytes:
    """Return the body of an answer to /retrieve, which has no place for the version."""
    return b'{"result":[%b]}' % hits


def _hits(
    index: Index,
    results: Sequence[Hits],
    hit_of: Callable[[Passage, float], dict[str, Any]],
) -> bytes:
    """Return the JSON lists of hits, one for each query, with commas between them.

    Raises BadRequestError if they would be too large.
    """
    result_texts = []
    size = 0  # bytes of all hits
    for hits in results:
        hit_texts = []
        for position, score in hits:
            hit = hit_of(index.passages[position], score)
            hit_text = json.dumps(hit, ensure_ascii=False).encode()
            hit_texts.append(hit_text)
            size += len(hit_text)
            if size > MAX_ANSWER_BYTES:
                raise BadRequestError(
                    f"the answer would have more than {MAX_ANSWER_BYTES:,} bytes: send fewer "
                    "queries at once, or a smaller k",
                    status=413,
                )
        result_texts.append(b"[" + b",".join(hit_texts) + b"]")
    return b",".join(result_texts)
