"""An index behind HTTP, for samplers on other hosts.

    POST /search    {"queries": ["..."], "k": 5} ->
                    {"version": "...", "results": [[{"id", "title", "text", "score"}, ...], ...]}
    GET  /healthz   200 after a real search, 503 with the reason where that fails
    GET  /metrics   Prometheus's text format

The line before the index is bounded: who comes when it is full is answered with 429 and Retry-After
at once. 400 and 413 say what is wrong with a request, 503 and 504 that the index broke or was late;
all of them as {"error": sentence}. Queries of all clients that arrive together are encoded
together.
"""

import asyncio
import dataclasses
import json
import signal
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily
from starlette.requests import ClientDisconnect

from mujica_jax.errors import UserError
from mujica_jax.retrieval.errors import (
    RetrievalError,
    RetrieverOverloadedError,
    RetrieverRefusedError,
    RetrieverTimeoutError,
)
from mujica_jax.retrieval.retriever import MAX_ANSWER_BYTES, Health, IndexRetriever
from mujica_jax.retrieval.text.corpus import Hits
from mujica_jax.retrieval.text.index import Index

MAX_QUERIES = 256  # of a request
MAX_RESULTS = 1000  # of a query
MAX_REQUEST_BYTES = 4 * 2**20
MAX_READING_SECONDS = 20.0  # until all of a request is there
# The status of other errors is 503.
STATUSES = {
    RetrieverOverloadedError: 429,
    RetrieverTimeoutError: 504,
    RetrieverRefusedError: 400,
}
HEADERS = {429: {"Retry-After": "1"}, 408: {"Connection": "close"}}  # by status
PREFIX = "mujica_retrieval_"
MEANINGS = {
    "queries": "Queries that arrived",
    "cached": "Queries answered from the disk",
    "shared": "Queries answered together with an equal one that was under way",
    "batches": "Batches searched",
    "failed": "Queries that ended in an error",
    "encode_seconds": "Seconds encoding queries",
    "search_seconds": "Seconds searching",
    "waiting_seconds": "Seconds of all queries from their arrival to their answer",
}


class BadRequestError(Exception):
    """A mistake of the client's, in one sentence."""

    def __init__(self, sentence: str, status: int = 400) -> None:
        super().__init__(sentence)
        self.status = status


class Metrics:
    """A collector for `prometheus_client`: the retriever's statistics and the answers by status."""

    def __init__(self, retriever: IndexRetriever) -> None:
        self._retriever = retriever
        self.answers: dict[int, int] = {}

    def collect(self) -> Iterator[Any]:
        statistics = dataclasses.asdict(self._retriever.statistics)
        for name, meaning in MEANINGS.items():
            yield CounterMetricFamily(PREFIX + name, meaning, value=statistics[name])
        answers = CounterMetricFamily(PREFIX + "answers", "Answers at /search", labels=["status"])
        for status, count in sorted(self.answers.items()):
            answers.add_metric([str(status)], count)
        yield answers


class _Service:
    """The three routes of the service of one retriever."""

    def __init__(self, retriever: IndexRetriever, kind: str) -> None:
        self._retriever = retriever
        self._kind = kind  # of the index
        # The file of passages is read by one thread at a time.
        self._reading = asyncio.Lock()
        self._health_check: asyncio.Task[Health] | None = None
        self._metrics = Metrics(retriever)
        self._registry = CollectorRegistry()
        # The registry only collects from it.
        self._registry.register(self._metrics)  # pyright: ignore[reportArgumentType]

    async def search(self, request: Request) -> Response:
        """Answer POST /search, and count the answer by its status."""
        try:
            status = 200
            content = await self._search(request)
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

        Requests that come while one search is under way share its result: however many there are,
        other searches wait for a single one.
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

    async def _search(self, request: Request) -> bytes:
        """Return the results of a request. Raises BadRequestError or RetrievalError."""
        retriever = self._retriever
        queries, k = _read(await _read_body(request), passages=len(retriever.index.passages))
        different_queries = len(set(queries))
        if different_queries > retriever.max_waiting:
            raise BadRequestError(
                f"the request has {different_queries} queries and at most "
                f"{retriever.max_waiting} may wait here: send fewer at once",
                status=413,
            )
        results = await asyncio.gather(*(retriever.hits(query, k) for query in queries))
        async with self._reading:
            return await asyncio.to_thread(_answer, retriever.index, results)


def make_app(retriever: IndexRetriever, kind: str) -> FastAPI:
    """Return the service of one retriever; `kind` is the index's."""
    app = FastAPI(title="mujica_jax retrieval", docs_url=None, redoc_url=None, openapi_url=None)
    service = _Service(retriever, kind)
    app.add_api_route("/search", service.search, methods=["POST"], response_model=None)
    app.add_api_route("/healthz", service.health, methods=["GET"], response_model=None)
    app.add_api_route("/metrics", service.metrics, methods=["GET"], response_model=None)
    return app


def open_port(host: str, port: int) -> socket.socket:
    """Bind a socket before anything is loaded. Raise UserError where the port is taken.

    Port 0 takes any.
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
    """Return the address at which a bound socket is reached."""
    host, port = server_socket.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve_until_told(app: FastAPI, server_socket: socket.socket, announcement: str) -> None:
    """Serve until SIGTERM or SIGINT; requests under way are answered first.

    The announcement is printed once the port answers.
    """
    server = make_server(app)

    def end_server(*_: object) -> None:
        server.should_exit = True

    # While it runs, the server handles the signals itself. When it has ended it raises those that
    # it got once more; before it starts and then they come here.
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

    Requests under way are answered first.
    """
    return uvicorn.Server(
        uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=30)
    )


async def _read_body(request: Request) -> bytes:
    """Return the body of a request. Raise BadRequestError where it is too large or too slow."""
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
        raise BadRequestError("the request broke off") from error
    except TimeoutError as error:
        if not timer.expired():
            raise
        raise BadRequestError(
            f"the request was not there within {MAX_READING_SECONDS:g} s: send it again",
            status=408,
        ) from error
    return bytes(body)


def _read(body: bytes, passages: int) -> tuple[list[str], int]:
    """Return the queries and k of a request. Raise BadRequestError where they are none."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the request is no JSON ({error})") from error

    queries: Any = None
    k: Any = None
    if isinstance(content, dict):
        queries = content.get("queries")
        k = content.get("k")
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise BadRequestError('the request needs "queries", a list of texts, and "k"')
    if not 1 <= len(queries) <= MAX_QUERIES:
        raise BadRequestError(f"the request has {len(queries)} queries: send 1 to {MAX_QUERIES}")
    max_k = min(passages, MAX_RESULTS)
    if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= max_k:
        raise BadRequestError(f"k is {k!r}: give 1 to {max_k}")
    return queries, k


def _answer(index: Index, results: Sequence[Hits]) -> bytes:
    """Return the JSON of an answer. Raise BadRequestError where it would be too large."""
    result_texts = []
    size = 0  # bytes
    for hits in results:
        hit_texts = []
        for position, score in hits:
            passage = index.passages[position]
            hit = {
                "id": passage.id,
                "title": passage.title,
                "text": passage.text,
                "score": round(score, 6),
            }
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
    version_text = json.dumps(index.version).encode()
    return b'{"version":%b,"results":[%b]}' % (version_text, b",".join(result_texts))
