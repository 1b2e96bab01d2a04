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
    RetrieverOverloaded,
    RetrieverRefused,
    RetrieverTimeout,
)
from mujica_jax.retrieval.retriever import MAX_ANSWER_BYTES, Health, IndexRetriever
from mujica_jax.retrieval.text.corpus import Hits
from mujica_jax.retrieval.text.index import Index

MAX_QUERIES = 256  # of a request
MAX_RESULTS = 1000  # of a query
MAX_REQUEST_BYTES = 4 * 2**20
MAX_READING_SECONDS = 20.0  # until all of a request is there
STATUSES = {
    RetrieverOverloaded: 429,
    RetrieverTimeout: 504,
    RetrieverRefused: 400,
}  # of all others: 503
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


class BadRequest(Exception):
    """What the client did wrong, in one sentence."""

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


def make_app(retriever: IndexRetriever, kind: str) -> FastAPI:
    """The service of one retriever; `kind` is the index's."""
    app = FastAPI(title="mujica_jax retrieval", docs_url=None, redoc_url=None, openapi_url=None)
    metrics, registry = Metrics(retriever), CollectorRegistry()
    reading = asyncio.Lock()  # of the passages: their file is read by one thread at a time
    registry.register(metrics)  # pyright: ignore[reportArgumentType]  # it collects, which is all that is asked

    async def answered(request: Request) -> tuple[int, str | bytes]:
        try:
            queries, k = _read(await _read_body(request), len(retriever.index.passages))
            if (different := len(set(queries))) > retriever.max_waiting:
                raise BadRequest(
                    f"the request has {different} queries and at most {retriever.max_waiting} may "
                    "wait here: send fewer at once",
                    413,
                )
            found = await asyncio.gather(*(retriever.hits(query, k) for query in queries))
            async with reading:
                return 200, await asyncio.to_thread(_answer, retriever.index, found)
        except BadRequest as error:
            return error.status, json.dumps({"error": str(error)})
        except RetrievalError as error:
            return STATUSES.get(type(error), 503), json.dumps({"error": str(error)})

    async def search(request: Request) -> Response:
        status, content = await answered(request)
        metrics.answers[status] = metrics.answers.get(status, 0) + 1
        return Response(content, status, HEADERS.get(status), "application/json")

    checking: asyncio.Task[Health] | None = None

    async def healthz() -> JSONResponse:
        # who asks while one search is under way hears of that one: however many ask, searches wait
        # for one
        nonlocal checking
        if checking is None or checking.done():
            checking = asyncio.create_task(retriever.health())
        try:
            health = await asyncio.shield(checking)
        except RetrievalError as error:
            return JSONResponse({"error": str(error)}, 503)
        return JSONResponse(dataclasses.asdict(dataclasses.replace(health, kind=kind)))

    async def metrics_text() -> PlainTextResponse:
        return PlainTextResponse(generate_latest(registry).decode())

    app.add_api_route("/search", search, methods=["POST"], response_model=None)
    app.add_api_route("/healthz", healthz, methods=["GET"], response_model=None)
    app.add_api_route("/metrics", metrics_text, methods=["GET"], response_model=None)
    return app


def open_port(host: str, port: int) -> socket.socket:
    """Bound before anything is loaded, so that a port that is taken is one sentence. Port 0 takes
    any."""
    opened = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        opened.bind((host, port))
    except (OSError, OverflowError) as error:
        opened.close()
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"{host}:{port} cannot be opened ({reason}): choose another --host or --port"
        ) from error
    return opened


def address_of(opened: socket.socket) -> str:
    host, port = opened.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve_until_told(app: FastAPI, opened: socket.socket, told: str) -> None:
    """Prints `told` once the port answers. SIGTERM and SIGINT end it from then on: requests under
    way are answered first.
    """
    server = make_server(app)
    # The server takes the signals over, and sends those that it got on when it has ended; until
    # then and meanwhile they come here.
    before = {
        number: signal.signal(number, lambda *_: setattr(server, "should_exit", True))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    opened.listen(server.config.backlog)
    print(told, flush=True)
    server.run(sockets=[opened])
    for number, handler in before.items():
        signal.signal(number, handler)


def make_server(app: FastAPI) -> uvicorn.Server:
    """`run(sockets=[...])` serves until SIGTERM or SIGINT; requests under way are answered
    first."""
    return uvicorn.Server(
        uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=30)
    )


async def _read_body(request: Request) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(MAX_READING_SECONDS) as timer:
            async for part in request.stream():
                body += part
                if len(body) > MAX_REQUEST_BYTES:
                    raise BadRequest(
                        f"the request has more than {MAX_REQUEST_BYTES:,} bytes: send fewer "
                        "queries at once",
                        413,
                    )
    except ClientDisconnect as error:
        raise BadRequest("the request broke off") from error
    except TimeoutError as error:
        if not timer.expired():
            raise
        raise BadRequest(
            f"the request was not there within {MAX_READING_SECONDS:g} s: send it again", 408
        ) from error
    return bytes(body)


def _read(body: bytes, passages: int) -> tuple[list[str], int]:
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the request is no JSON ({error})") from error
    queries, k = (asked.get("queries"), asked.get("k")) if isinstance(asked, dict) else (None, None)
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise BadRequest('the request needs "queries", a list of texts, and "k"')
    if not 1 <= len(queries) <= MAX_QUERIES:
        raise BadRequest(f"the request has {len(queries)} queries: send 1 to {MAX_QUERIES}")
    most = min(passages, MAX_RESULTS)
    if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= most:
        raise BadRequest(f"k is {k!r}: give 1 to {most}")
    return queries, k


def _answer(index: Index, found: Sequence[Hits]) -> bytes:
    """Raises BadRequest where it would be too large."""
    results, size = [], 0
    for hits in found:
        shown = []
        for position, score in hits:
            passage = index.passages[position]
            hit = {
                "id": passage.id,
                "title": passage.title,
                "text": passage.text,
                "score": round(score, 6),
            }
            shown.append(json.dumps(hit, ensure_ascii=False).encode())
            size += len(shown[-1])
            if size > MAX_ANSWER_BYTES:
                raise BadRequest(
                    f"the answer would have more than {MAX_ANSWER_BYTES:,} bytes: send fewer "
                    "queries at once, or a smaller k",
                    413,
                )
        results.append(b"[" + b",".join(shown) + b"]")
    return b'{"version":%b,"results":[%b]}' % (
        json.dumps(index.version).encode(),
        b",".join(results),
    )
