"""Send one request to an endpoint, once.

This module holds the connection, the bounds of an answer, and which errors are transient. The API
key comes from an environment variable and goes nowhere but into the request's header.
"""

import contextlib
import datetime
import email.utils
import json
import math
import os
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

from mujica_jax.errors import UserError

if TYPE_CHECKING:
    import httpx

TRANSIENT_STATUSES = {408, 409, 425, 429}  # and 5xx
TOO_LARGE = 413
SERVER_ERROR = 500  # of this request, where 502 to 504 say that the server is away
MAX_ANSWER_BYTES = 16 * 2**20
MAX_MESSAGE_CHARACTERS = 200  # of what a server says that are shown


class HttpError(Exception):
    """A request that failed for good. Its text is one sentence for the user."""


class RequestRefusedError(HttpError):
    """The same request would be refused again.

    `status` is the server's status, 0 if no server refused it.
    """

    def __init__(self, sentence: str, status: int = 0) -> None:
        super().__init__(sentence)
        self.status = status


class PayloadTooLargeError(RequestRefusedError):
    """The request or its answer is too large. A part of the request may succeed."""


class RetriesExhaustedError(HttpError):
    """Every attempt met a transient error.

    `was_answered` says that the server itself answered the last one.
    """

    def __init__(self, sentence: str, *, was_answered: bool = False) -> None:
        super().__init__(sentence)
        self.was_answered = was_answered


class DeadlineExceededError(HttpError):
    """No answer within the deadline."""


class TransientError(Exception):
    """The same request may succeed later."""

    def __init__(
        self, reason: str, after_seconds: float = 0.0, *, was_answered: bool = False
    ) -> None:
        super().__init__(reason)
        self.after_seconds = after_seconds  # what the server asks to wait
        # The server is up and answered this request, with something that is none. If that repeats,
        # it is the request.
        self.was_answered = was_answered


class HttpClient:
    """Requests to one address. Use it from one event loop at a time."""

    def __init__(
        self,
        url: str,
        *,
        api_key_variable: str | None,
        connections: int,
        example: str = "http://HOST:PORT/v1",
        max_answer_bytes: int = MAX_ANSWER_BYTES,
    ) -> None:
        """Check the address and the key. `example` shows how an address of this kind is written."""
        import httpx  # 0.2 s

        self.url = _checked(url, example)
        self._key = _api_key(api_key_variable)
        self._max_answer_bytes = max_answer_bytes
        self._limits = httpx.Limits(max_connections=connections)
        self._tls = httpx.create_ssl_context()  # reads the certificates, once
        self._client: httpx.AsyncClient | None = None
        self._users = 0

    async def post(self, body: dict[str, Any]) -> dict[str, Any]:
        """Send a JSON object and return the one that comes back.

        Raises TransientError or RequestRefusedError.
        """
        content = await self.exchange(json.dumps(body), {"Content-Type": "application/json"})
        answer = _json(content)
        if not isinstance(answer, dict):
            shown = self.shown(content.decode(errors="replace"))
            raise TransientError(f"an answer that is no JSON object ({shown})", was_answered=True)
        return answer

    async def exchange(self, content: str, headers: Mapping[str, str]) -> bytes:
        """Send a request and return what comes back with status 200. Raises as `post` does."""
        import httpx

        try:
            async with (
                self.connected() as client,
                client.stream("POST", self.url, content=content, headers=dict(headers)) as response,
            ):
                answer = await self._read_answer(response)
        except httpx.TransportError as error:
            raise TransientError(self.shown(f"{type(error).__name__}: {error}")) from error

        status = response.status_code
        if status in TRANSIENT_STATUSES or status >= 500:
            raise TransientError(
                f"status {status} ({self._message(answer)})",
                after_seconds=_retry_after(response),
                was_answered=status == SERVER_ERROR,
            )
        if status != 200:
            refusal = PayloadTooLargeError if status == TOO_LARGE else RequestRefusedError
            raise refusal(
                f"{self.url} refused the request with status {status}: {self._message(answer)}",
                status,
            )
        return answer

    async def _read_answer(self, response: "httpx.Response") -> bytes:
        """Return the body of an answer. Raises PayloadTooLargeError as soon as it is too long."""
        answer = bytearray()
        async for part in response.aiter_raw():
            answer += part
            if len(answer) > self._max_answer_bytes:
                raise PayloadTooLargeError(
                    f"{self.url} sent more than {self._max_answer_bytes:,} bytes, and no answer is "
                    "that large: check the address"
                )
        return bytes(answer)

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator["httpx.AsyncClient"]:
        """Yield one client that all users share.

        The last user closes it, so that an event loop ends with no connection open.
        """
        import httpx

        if self._client is None:
            # No compression: the size of an answer is bounded as it comes in.
            headers = {"Accept-Encoding": "identity"}
            if self._key is not None:
                headers["Authorization"] = f"Bearer {self._key}"
            # Callers limit the time of a whole attempt: a limit between two bytes would let a slow
            # trickle go on.
            self._client = httpx.AsyncClient(
                headers=headers, timeout=None, limits=self._limits, verify=self._tls
            )
        client = self._client
        self._users += 1
        try:
            yield client
        finally:
            self._users -= 1
            if self._users == 0:
                self._client = None
                await client.aclose()

    def _message(self, answer: bytes) -> str:
        """Return the server's reason for a refusal."""
        message = _json(answer)
        if message is None:
            message = answer.decode(errors="replace")
        # Servers nest it differently, as in {"error": {"message": ...}}.
        for name in ("error", "message", "detail"):
            if isinstance(message, dict) and message.get(name):
                message = message[name]
        return self.shown(str(message)) or "without a word"

    def shown(self, text: str) -> str:
        """Return text as one line of bounded length.

        Control characters and the key are replaced.
        """
        if self._key is not None:
            text = text.replace(self._key, "***")
        printable = [character if character.isprintable() else " " for character in text]
        line = " ".join("".join(printable).split())
        if len(line) > MAX_MESSAGE_CHARACTERS:
            return f"{line[:MAX_MESSAGE_CHARACTERS]}..."
        return line


def _json(content: bytes) -> Any:
    """Return what JSON text says, or None if it is no JSON."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


def _retry_after(response: "httpx.Response") -> float:
    """Return the seconds that the server asks to wait, which it gives as a number or a date.

    The result is 0 if it asks for nothing that can be read.
    """
    value = response.headers.get("retry-after", "").strip()
    try:
        seconds = float(value)
    except ValueError:
        try:
            date = email.utils.parsedate_to_datetime(value)
            seconds = (date - datetime.datetime.now(date.tzinfo)).total_seconds()
        except (ValueError, OverflowError):
            return 0.0
    return max(seconds, 0.0) if math.isfinite(seconds) else 0.0


def _checked(address: str, example: str) -> str:
    """Return an address without a slash at its end. Raises UserError if it cannot be used."""
    import httpx

    try:
        url = httpx.URL(address)
    except httpx.InvalidURL as error:
        raise UserError(
            f"the endpoint's address {address!r} cannot be read ({error}): write it as {example}"
        ) from error
    if url.userinfo or url.query or url.fragment:
        raise UserError(
            "the endpoint's address holds a password, a query or a fragment, and addresses are "
            "printed: leave them out and name an environment variable that holds the key"
        )
    if url.scheme not in ("http", "https") or not url.host:
        raise UserError(
            f"the endpoint's address {address!r} names no server: write it as {example}"
        )
    return str(url).rstrip("/")


def _api_key(name: str | None) -> str | None:
    """Return the API key in the environment variable of this name. Raises UserError."""
    if name is None:
        return None
    key = os.environ.get(name, "")
    if not key:
        raise UserError(
            f"the environment variable {name} is not set: export the API key in it, or name "
            "another one"
        )
    if not key.isascii() or not key.isprintable() or " " in key:
        raise UserError(
            f"the environment variable {name} holds characters that no API key has: export the key "
            "alone"
        )
    return key
