"""The web application: one FastAPI app with a router for each area, and the page in `static/`.

    app = create_app(["runs/first", "runs/second"])                        # without a model
    app = create_app(["runs/first"], model_routers=model_routers(served))  # with a model too

To add a page, write a router like `trajectories.router`, include it in `create_app`, and add a
module to `static/pages/` and a line to PAGES in `static/app.js`.
"""

from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse
from fastapi.staticfiles import StaticFiles
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mujica_jax.errors import StoreError, UserError
from mujica_jax.web import no_model, report, trajectories
from mujica_jax.web.api_key import ApiKey, error_answer
from mujica_jax.web.run_library import RunLibrary, UnknownNameError

LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "[::1]")
MAX_REQUEST_BYTES = 4 * 2**20
# Headers of every answer. The page loads nothing from elsewhere and runs no inline script, so text
# of a passage can never act as a page.
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
        "object-src 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def static_folder() -> Path:
    """Return the folder of the page's files."""
    return Path(str(resources.files("mujica_jax.web") / "static"))


def create_app(
    runs: Sequence[str],
    *,
    model_routers: Sequence[APIRouter] = (),
    allowed_hosts: Sequence[str] = LOOPBACK_HOSTS,
    api_key: str | None = None,
) -> FastAPI:
    """Return the application that shows these run directories.

    `model_routers` are the routes of a model that is served too (`model_routes.py`). They are given
    and not imported, because they need JAX.

    `allowed_hosts` are the host names under which the page may be opened; "*" allows all. With
    `api_key`, every request for data needs it; the page asks for it. Raises UserError if a directory
    holds no run.
    """
    library = RunLibrary(runs)
    app = FastAPI(title="mujica_jax", docs_url=None, redoc_url=None, openapi_url=None)
    app.include_router(trajectories.router(library))
    app.include_router(report.router(library))
    for router in model_routers or (no_model.router(),):
        app.include_router(router)

    app.add_exception_handler(UserError, _answer_user_error)
    app.add_exception_handler(RequestValidationError, _answer_invalid_request)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_middleware(RequestLimit)
    if api_key is not None:
        app.add_middleware(ApiKey, key=api_key)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(allowed_hosts), www_redirect=False)
    app.add_middleware(SafeHeaders)

    folder = static_folder()

    @app.get("/", include_in_schema=False)
    def page() -> FileResponse:
        return FileResponse(folder / "index.html")

    app.mount("/static", StaticFiles(directory=folder), name="static")
    return app


class SafeHeaders:
    """A layer that adds HEADERS to every answer.

    Browsers also ask each time whether a file has changed, unless the answer says otherwise.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and add the headers to the first message of the answer."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                headers.setdefault("Cache-Control", "no-cache")
            await send(message)

        await self._app(scope, receive, send_with_headers)


class RequestLimit:
    """A layer that refuses requests whose body is larger than MAX_REQUEST_BYTES."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 413 if the body is too large, and pass the request on otherwise."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        # Read the body here, because its length may not be known in advance.
        body = bytearray()
        has_more = True
        while has_more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            has_more = message.get("more_body", False)
            if len(body) > MAX_REQUEST_BYTES:
                sentence = f"the request has more than {MAX_REQUEST_BYTES:,} bytes: send less"
                await error_answer(scope, sentence, 413)(scope, receive, send)
                return
        await self._app(scope, _ReadBody(bytes(body), receive), send)


class _ReadBody:
    """The body of a request that was read already, followed by what the client sends later."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._message: Message | None = {"type": "http.request", "body": body, "more_body": False}
        self._receive = receive

    async def __call__(self) -> Message:
        """Return the body at the first call. Later calls wait until the client disconnects."""
        if self._message is None:
            return await self._receive()
        message = self._message
        self._message = None
        return message


async def _answer_user_error(request: Request, error: Exception) -> JSONResponse:
    """Answer with the sentence of the error: 404 unknown name, 409 damage, 400 other mistakes."""
    status = 400
    if isinstance(error, UnknownNameError):
        status = 404
    elif isinstance(error, StoreError):
        status = 409
    return JSONResponse({"error": str(error)}, status)


async def _answer_invalid_request(request: Request, error: Exception) -> JSONResponse:
    """Answer a request whose parameters have wrong values with one sentence."""
    assert isinstance(error, RequestValidationError)
    problem = error.errors()[0]
    place = ".".join(str(part) for part in problem["loc"][1:])
    return JSONResponse({"error": f"{place}: {problem['msg']}; correct this parameter"}, 422)


async def _answer_http_error(request: Request, error: Exception) -> JSONResponse:
    """Answer a wrong address or method with one sentence."""
    assert isinstance(error, HTTPException)
    sentence = str(error.detail)
    if error.status_code == 404:
        sentence = f"there is no page {request.url.path!r}; start at /"
    return JSONResponse({"error": sentence}, error.status_code)
