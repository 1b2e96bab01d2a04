"""Send requests to an HTTP endpoint, each of them once.

`HttpClient` shares connections, limits the size of answers, and sorts errors into transient and
permanent ones. `retry.py` repeats requests. The API key is read from an environment variable and is
only sent in the header of requests.
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

# HTTP statuses after which a request is sent again, together with all statuses from 500.
TRANSIENT_STATUSES = {408, 409, 425, 429}
TOO_LARGE = 413
# The server failed on this request. Statuses 502 to 504 say that the server itself is away.
SERVER_ERROR = 500
MAX_ANSWER_BYTES = 16 * 2**20
# Error messages quote at most this much of a server's answer.
MAX_MESSAGE_CHARACTERS = 200


class HttpError(Exception):
    """A request failed for good. The message is one sentence for the user."""


class RequestRefusedError(HttpError):
    """The request was refused, and would be refused again.

    `status` is the HTTP status of the server, or 0 if this client refused the request.
    """

    def __init__(self, sentence: str, status: int = 0) -> None:
        super().__init__(sentence)
        self.status = status


class PayloadTooLargeError(RequestRefusedError):
    """The request or its answer is too large. A smaller part of the request may succeed."""


class RetriesExhaustedError(HttpError):
    """Every attempt ended in a transient error.

    `was_answered` tells whether the last attempt got an answer from the server itself.
    """

    def __init__(self, sentence: str, *, was_answered: bool = False) -> None:
        super().__init__(sentence)
        self.was_answered = was_answered


class DeadlineExceededError(HttpError):
    """The request was not answered within the deadline."""


class TransientError(Exception):
    """An attempt failed, but the same request may succeed later."""

    def __init__(
        self, reason: str, after_seconds: float = 0.0, *, was_answered: bool = False
    ) -> None:
        super().__init__(reason)
        # How long the server asks to wait before the next attempt.
        self.after_seconds = after_seconds
        # The server is up and answered this request, but with an error or an invalid answer. If
        # every attempt ends so, the request itself is the cause.
        self.was_answered = was_answered


class HttpClient:
    """A client for one address. Use it from one event loop at a time."""

    def __init__(
        self,
        url: str,
        *,
        api_key_variable: str | None,
        connections: int,
        example: str = "http://HOST:PORT/v1",
        max_answer_bytes: int = MAX_ANSWER_BYTES,
    ) -> None:
        """Check the address and read the API key. Raises UserError if either is wrong.

        `api_key_variable` is the name of the environment variable that holds the API key; None
        sends no key. At most `connections` connections are open at the same time. `example` is a
        right address, for the message about a wrong one. Answers of more than `max_answer_bytes`
        are refused.
        """
        # Imported here because it takes 0.2 s.
        import httpx

        self.url = _checked(url, example)
        self._key = _api_key(api_key_variable)
        self._max_answer_bytes = max_answer_bytes
        self._limits = httpx.Limits(max_connections=connections)
        # Read the certificates of the system only once.
        self._tls = httpx.create_ssl_context()
        self._client: httpx.AsyncClient | None = None
        self._users = 0

    async def post(self, body: dict[str, Any]) -> dict[str, Any]:
        """Send a JSON object and return the JSON object of the answer.

        Raises TransientError or RequestRefusedError.
        """
        content = await self.exchange(json.dumps(body), {"Content-Type": "application/json"})
        answer = _json(content)
        if not isinstance(answer, dict):
            shown = self.shown(content.decode(errors="replace"))
            raise TransientError(
                f"an answer that is not a JSON object ({shown})", was_answered=True
            )
        return answer

    async def exchange(self, content: str, headers: Mapping[str, str]) -> bytes:
        """Send a request and return the body of its answer, which has status 200.

        Raises TransientError or RequestRefusedError.
        """
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
                    f"{self.url} sent more than {self._max_answer_bytes:,} bytes, more than any "
                    "answer of such an endpoint: check the address"
                )
        return bytes(answer)

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator["httpx.AsyncClient"]:
        """Yield the httpx client that all requests at this time share.

        The last request closes it, so that no connection is open when the event loop ends.
        """
        import httpx

        if self._client is None:
            # Ask for answers without compression, because their size is limited as they arrive.
            headers = {"Accept-Encoding": "identity"}
            if self._key is not None:
                headers["Authorization"] = f"Bearer {self._key}"
            # Use no timeout here: callers limit the time of a whole attempt. httpx only limits the
            # time between two bytes, so an answer could arrive very slowly for ever.
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
        """Return the message in the body of an error, on one line."""
        message = _json(answer)
        if message is None:
            message = answer.decode(errors="replace")
        # Servers nest the message differently, as in {"error": {"message": ...}}.
        for name in ("error", "message", "detail"):
            if isinstance(message, dict) and message.get(name):
                message = message[name]
        return self.shown(str(message)) or "no message"

    def shown(self, text: str) -> str:
        """Return a text on one line of at most `MAX_MESSAGE_CHARACTERS`, for a message.

        The API key is replaced by ***, and control characters by spaces.
        """
        if self._key is not None:
            text = text.replace(self._key, "***")
        printable = [character if character.isprintable() else " " for character in text]
        line = " ".join("".join(printable).split())
        if len(line) > MAX_MESSAGE_CHARACTERS:
            return f"{line[:MAX_MESSAGE_CHARACTERS]}..."
        return line


def _json(content: bytes) -> Any:
    """Return the value of a JSON text, or None if it is not JSON."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


def _retry_after(response: "httpx.Response") -> float:
    """Return how many seconds the server asks to wait, in the header Retry-After.

    The header holds a number of seconds or a date. Return 0 if it is missing or cannot be read.
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
    """Return an address without a slash at its end. Raises UserError if it is wrong.

    `example` is a right address, for the message.
    """
    import httpx

    try:
        url = httpx.URL(address)
    except httpx.InvalidURL as error:
        raise UserError(
            f"the endpoint's address {address!r} cannot be read ({error}): write it as {example}"
        ) from error
    if url.userinfo or url.query or url.fragment:
        raise UserError(
            "the endpoint's address holds a password, a query or a fragment, but addresses are "
            "printed and logged: leave them out, and name an environment variable that holds the "
            "API key"
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
            "another variable"
        )
    if not key.isascii() or not key.isprintable() or " " in key:
        raise UserError(
            f"the environment variable {name} holds spaces or other characters that no API key "
            "has: export only the key in it"
        )
    return key
