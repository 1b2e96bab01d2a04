"""An API key: requests for data are answered only with it."""

import secrets
from collections.abc import Sequence

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from mujica_jax.web.openai.errors import ApiError

# Addresses that need the key. The page itself, its files and /healthz hold no data.
PROTECTED_PREFIXES = ("/v1/", "/api/", "/metrics")
OPENAI_PREFIX = "/v1/"
SCHEME = "bearer "


class ApiKey:
    """A layer that answers 401 to requests for data without the key.

    A client sends the key as OpenAI's clients do: `Authorization: Bearer KEY`.
    """

    def __init__(self, app: ASGIApp, *, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on if it has the key or needs none."""
        if scope["type"] == "http" and scope["path"].startswith(PROTECTED_PREFIXES):
            authorization = Headers(scope=scope).get("authorization", "")
            sent_key = ""
            if authorization[: len(SCHEME)].lower() == SCHEME:
                sent_key = authorization[len(SCHEME) :].strip()
            # The time of the comparison must not tell how much of a guess is right.
            if not secrets.compare_digest(sent_key.encode(), self._key):
                sentence = "the API key is wrong: send the server's key"
                if not sent_key:
                    sentence = "the API key is missing: send it as Authorization: Bearer KEY"
                answer = error_answer(scope, sentence, 401)
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)


def error_answer(scope: Scope, sentence: str, status: int) -> JSONResponse:
    """Return an error in the form of the interface that was asked: OpenAI's, or the page's."""
    error = ApiError(sentence, status=status)
    if str(scope["path"]).startswith(OPENAI_PREFIX):
        return JSONResponse(error.body(), status, error.headers())
    return JSONResponse({"error": sentence}, status, error.headers())


def first_key(lines: Sequence[str]) -> str | None:
    """Return the first line that holds a key. Empty lines and lines that begin with # hold none."""
    for line in lines:
        text = line.strip()
        if text and not text.startswith("#"):
            return text
    return None
