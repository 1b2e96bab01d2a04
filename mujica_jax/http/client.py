"""One request to an endpoint, sent once: the connection, the bounds of an answer, and which faults may pass.

The API key comes from an environment variable and goes nowhere but into the request's header.
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
from mujica_jax.inference.requests import RequestError

if TYPE_CHECKING:
    import httpx

PASSING_STATUSES = {408, 409, 425, 429}  # and 5xx
LARGEST_ANSWER_BYTES = 16 * 2**20
TOO_LARGE = 413
LONGEST_MESSAGE = 200  # characters of what a server says that are shown


class PassingFault(Exception):
    """The same request may succeed later."""

    def __init__(self, reason: str, after_seconds: float = 0.0) -> None:
        super().__init__(reason)
        self.after_seconds = after_seconds  # what the server asks to wait


class TooMuch(RequestError):
    """The server takes no request that large, or its answer is too large: part of it may do."""


class Endpoint:
    """One address. Use from one event loop at a time."""

    def __init__(
        self,
        url: str,
        *,
        api_key_variable: str | None,
        connections: int,
        example: str = "http://HOST:PORT/v1",
        largest_answer_bytes: int | None = None,
    ) -> None:
        """`example` is how an address of this kind is written; no `largest_answer_bytes` are LARGEST_ANSWER_BYTES."""
        import httpx  # 0.2 s

        self.url = _checked(url, example)
        self._key = _api_key(api_key_variable)
        self._largest_answer_bytes = largest_answer_bytes or LARGEST_ANSWER_BYTES
        self._limits = httpx.Limits(max_connections=connections)
        self._encryption = httpx.create_ssl_context()  # reads the certificates, once
        self._client: httpx.AsyncClient | None = None
        self._users = 0

    async def post(self, body: dict[str, Any]) -> dict[str, Any]:
        """The JSON object that comes back. Raises PassingFault, or RequestError for what the same request will meet again."""
        answer = await self.exchange(json.dumps(body), {"Content-Type": "application/json"})
        read = _json(answer)
        if not isinstance(read, dict):
            raise PassingFault(f"an answer that is no JSON object ({self.shown(answer.decode(errors='replace'))})")
        return read

    async def exchange(self, content: str, headers: Mapping[str, str]) -> bytes:
        """What comes back with status 200. Raises as `post` does."""
        import httpx

        try:
            async with (
                self.connected() as client,
                client.stream("POST", self.url, content=content, headers=dict(headers)) as response,
            ):
                answer = bytearray()
                async for part in response.aiter_raw():
                    answer += part
                    if len(answer) > self._largest_answer_bytes:
                        raise TooMuch(
                            f"{self.url} sent more than {self._largest_answer_bytes:,} bytes, and no answer is that large: "
                            "check the address"
                        )
        except httpx.TransportError as error:
            raise PassingFault(self.shown(f"{type(error).__name__}: {error}")) from error
        status = response.status_code
        if status in PASSING_STATUSES or status >= 500:
            raise PassingFault(f"status {status} ({self._message(answer)})", _retry_after(response))
        if status != 200:
            refused = TooMuch if status == TOO_LARGE else RequestError
            raise refused(f"{self.url} refused the request with status {status}: {self._message(answer)}")
        return bytes(answer)

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator["httpx.AsyncClient"]:
        """One client for as long as anyone uses it, so that an event loop ends with no connection open."""
        import httpx

        if self._client is None:
            # No compression: the size of an answer is bounded as it comes in.
            headers = {"Accept-Encoding": "identity"}
            if self._key is not None:
                headers["Authorization"] = f"Bearer {self._key}"
            # Callers limit the time of a whole try: a limit between two bytes would let a slow trickle go on.
            self._client = httpx.AsyncClient(
                headers=headers, timeout=None, limits=self._limits, verify=self._encryption
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

    def _message(self, answer: bytes | bytearray) -> str:
        """What the server says of its refusal."""
        read = _json(answer)
        if read is None:
            read = answer.decode(errors="replace")
        for name in ("error", "message", "detail"):
            if isinstance(read, dict) and read.get(name):
                read = read[name]
        return self.shown(str(read)) or "without a word"

    def shown(self, text: str) -> str:
        """One line of bounded length, without what steers a terminal and without the key."""
        if self._key is not None:
            text = text.replace(self._key, "***")
        line = " ".join("".join(character if character.isprintable() else " " for character in text).split())
        return line if len(line) <= LONGEST_MESSAGE else f"{line[:LONGEST_MESSAGE]}..."


def _json(answer: bytes | bytearray) -> Any:
    try:
        return json.loads(answer)
    except (ValueError, RecursionError):
        return None


def _retry_after(response: "httpx.Response") -> float:
    """Seconds that the server asks to wait: a number, or a date. 0 where it asks for nothing that can be read."""
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
    import httpx

    try:
        url = httpx.URL(address)
    except httpx.InvalidURL as error:
        raise UserError(
            f"the endpoint's address {address!r} cannot be read ({error}): write it as {example}"
        ) from error
    if url.userinfo or url.query or url.fragment:
        raise UserError(
            "the endpoint's address holds a password, a query or a fragment, and addresses are printed: leave them out and name an "
            "environment variable that holds the key"
        )
    if url.scheme not in ("http", "https") or not url.host:
        raise UserError(f"the endpoint's address {address!r} names no server: write it as {example}")
    return str(url).rstrip("/")


def _api_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable, "")
    if not key:
        raise UserError(
            f"the environment variable {variable} is not set: export the API key in it, or name another one"
        )
    if not key.isascii() or not key.isprintable() or " " in key:
        raise UserError(
            f"the environment variable {variable} holds characters that no API key has: export the key alone"
        )
    return key
