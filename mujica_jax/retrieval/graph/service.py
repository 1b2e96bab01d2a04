"""A graph behind HTTP, for samplers on other hosts: a SPARQL endpoint that reads, which `sparql_endpoint.py` and other clients ask.

    POST /sparql    the query as a form (`query=...`) or as application/sparql-query -> SPARQL 1.1 results in JSON
    GET  /sparql?query=...
    GET  /healthz   200 after a real query, 503 with the reason where that fails
    GET  /metrics   Prometheus's text format

What is under way is bounded: who comes when it is full is answered with 429 and Retry-After at once. A query that takes longer than the
deadline is answered with 504 and stopped, one that needs too much memory or answers too much with 400 (`graph_readers.py`). Queries that
would make this host ask others (SERVICE) are refused. 400 and 413 say what is wrong with a request; all errors as {"error": sentence}.
"""

import asyncio
import contextlib
import re
import time
import urllib.parse
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from mujica_jax.retrieval.errors import RetrievalError, RetrieverOverloaded, RetrieverRefused, RetrieverTimeout
from mujica_jax.retrieval.graph import sparql
from mujica_jax.retrieval.graph.query_pool import GraphReaders
from mujica_jax.retrieval.retriever import RetrievalStatistics
from mujica_jax.retrieval.service import HEADERS, BadRequest, Metrics, read_body, status_of

if TYPE_CHECKING:
    import fastapi

RESULTS = "application/sparql-results+json"

# SERVICE asks another host where a variable, an IRI, a prefixed name or SILENT follows it. Whether it stands inside a text or a comment is
# not asked: who reads `<` as another token than the store does could be led to take a command for a text.
_prefix = r"""[^\s<>"'{}|^`\\/?#,;():]"""  # a character of it; a long one is not waited for, so that no query takes long to look at
_service = re.compile(rf"(?<!/)service(?:\s|#[^\n\r]*+)*+(?:silent|[?$<]|{_prefix}{{32}}|{_prefix}*+:)", re.IGNORECASE)
_variable = re.compile(r"[?$]\w+")
_escape = re.compile(r"\\u([0-9A-Fa-f]{4})|\\U([0-9A-Fa-f]{8})")


class GraphQueries:
    """Queries of others to a graph's readers, at most `most_waiting` of them at a time. Use from one event loop."""

    def __init__(self, readers: GraphReaders, *, version: str, most_waiting: int, deadline_seconds: float) -> None:
        self.readers, self.version = readers, version
        self._most_waiting, self._deadline_seconds = most_waiting, deadline_seconds
        self._under_way = 0
        self._statistics = RetrievalStatistics()

    @property
    def statistics(self) -> RetrievalStatistics:
        return self._statistics

    async def answer(self, query: str) -> bytes:
        """SPARQL 1.1 results in JSON. Raises RetrievalError."""
        began = time.monotonic()
        self._count(queries=1)
        try:
            return await self._answered(query)
        except RetrievalError:
            self._count(failed=1)
            raise
        finally:
            self._count(waiting_seconds=time.monotonic() - began)

    async def _answered(self, query: str) -> bytes:
        if asks_others(query):
            raise RetrieverRefused(
                "the query holds the word SERVICE before a name and other hosts are not asked from here: ask them yourself"
            )
        if self._under_way >= self._most_waiting:
            raise RetrieverOverloaded(
                f"{self._under_way} queries are under way, of at most {self._most_waiting}: come back later, or send fewer at once"
            )
        self._under_way += 1
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._deadline_seconds) as timer:
                return await self.readers.answer(query)
        except TimeoutError as error:
            if not timer.expired():
                raise
            raise RetrieverTimeout(
                f"the graph gave no answer within the deadline of {self._deadline_seconds:g} s: ask for less, as with LIMIT"
            ) from error
        finally:
            self._under_way -= 1
            self._count(batches=1, search_seconds=time.monotonic() - began)

    def _count(self, **amounts: float) -> None:
        self._statistics = self._statistics.with_more(**amounts)


def asks_others(query: str) -> bool:
    """Whether a query may make the store ask another host. Escapes that stand for letters are read as these."""
    plain = _escape.sub(lambda found: chr(min(int(found[1] or found[2], 16), 0x10FFFF)), query)
    return any(_service.search(_variable.sub("?v", text)) for text in (query, plain))


def make_graph_app(queries: GraphQueries) -> "fastapi.FastAPI":
    import fastapi
    from fastapi.responses import JSONResponse, PlainTextResponse, Response
    from prometheus_client import CollectorRegistry, generate_latest

    @contextlib.asynccontextmanager
    async def lifespan(_: fastapi.FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await queries.readers.close()

    app = fastapi.FastAPI(title="mujica_jax graph", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    metrics, registry = Metrics(queries, "/sparql"), CollectorRegistry()
    registry.register(metrics)  # pyright: ignore[reportArgumentType]  # it collects, which is all that is asked

    async def sparql_results(request: fastapi.Request) -> Response:
        try:
            response = Response(await queries.answer(await _query(request)), media_type=RESULTS)
        except BadRequest as error:
            response = JSONResponse({"error": str(error)}, error.status, HEADERS.get(error.status))
        except RetrievalError as error:
            status = status_of(error)
            response = JSONResponse({"error": error.reason}, status, HEADERS.get(status))
        metrics.answers[response.status_code] = metrics.answers.get(response.status_code, 0) + 1
        return response

    async def healthz() -> JSONResponse:
        began = time.monotonic()
        try:
            await queries.answer(sparql.CLAIMS_QUERY)
        except RetrievalError as error:
            return JSONResponse({"error": error.reason}, 503)
        return JSONResponse({"version": queries.version, "kind": "graph", "seconds": time.monotonic() - began})

    async def metrics_text() -> PlainTextResponse:
        return PlainTextResponse(generate_latest(registry).decode())

    app.add_api_route("/sparql", sparql_results, methods=["GET", "POST"], response_model=None)
    app.add_api_route("/healthz", healthz, methods=["GET"], response_model=None)
    app.add_api_route("/metrics", metrics_text, methods=["GET"], response_model=None)
    return app


async def _query(request: "fastapi.Request") -> str:
    if request.method == "GET":
        asked = request.query_params.get("query")
    else:
        try:
            body = (await read_body(request)).decode()
        except UnicodeDecodeError as error:
            raise BadRequest(f"the request is no UTF-8 text ({error.reason})") from error
        if request.headers.get("content-type", "").startswith("application/sparql-query"):
            asked = body
        else:
            asked = dict(urllib.parse.parse_qsl(body)).get("query")
    if not asked:
        raise BadRequest("the request needs a SPARQL query in the form field query")
    return asked
