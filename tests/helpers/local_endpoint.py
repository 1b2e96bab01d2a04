"""A real HTTP server on this machine that answers, or misbehaves, as a test tells it."""

import asyncio
import contextlib
import dataclasses
import http.server
import json
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tests.helpers.patience import HANG_SECONDS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    path: str
    headers: Mapping[str, str]
    body: dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    content: Any = None  # sent as JSON; bytes as they are
    status: int = 200
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # "hang up": close without a word; "cut": close in the middle; "silent": say nothing until the
    # client goes away; "trickle": one byte at a time
    fault: str = ""
    # Called before the answer, and before each byte of one that trickles: a test turns its clock
    # here.
    meanwhile: Callable[[], object] = lambda: None


class LocalEndpoint:
    """The server.

    `answer(request, how many came before)` decides each answer, and every request is recorded.
    """

    def __init__(self, answer: Callable[[Request, int], Answer]) -> None:
        self.answer = answer
        self.requests: list[Request] = []
        self.most_at_once = 0
        self.abandoned = threading.Event()  # a client went away before its answer
        self._at_once = 0
        self._changed = threading.Condition()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                outer._serve(self)

            do_GET = do_POST

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.base_url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def _serve(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        content = handler.rfile.read(int(handler.headers.get("Content-Length") or 0)) or b"null"
        is_form = handler.headers.get("Content-Type") == "application/x-www-form-urlencoded"
        body = dict(urllib.parse.parse_qsl(content.decode())) if is_form else json.loads(content)
        request = Request(path=handler.path, headers=dict(handler.headers), body=body)
        with self._changed:
            before = len(self.requests)
            self.requests.append(request)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
            self._changed.notify_all()
        try:
            answer = self.answer(request, before)
            answer.meanwhile()
        finally:
            # Before the answer is sent: a client that has it may send its next request at once.
            with self._changed:
                self._at_once -= 1
        self._send(handler, answer)

    async def has_requests(self, count: int) -> None:
        """Wait until this number of requests has arrived."""

        def wait() -> None:
            with self._changed:
                assert self._changed.wait_for(lambda: len(self.requests) >= count, HANG_SECONDS)

        await asyncio.to_thread(wait)

    def _send(self, handler: http.server.BaseHTTPRequestHandler, answer: Answer) -> None:
        if answer.fault == "silent":
            if self._went_away(handler):
                self.abandoned.set()
            handler.close_connection = True
            return
        if answer.fault == "hang up":
            handler.close_connection = True
            return
        content = answer.content
        if not isinstance(content, bytes):
            content = json.dumps(content).encode()
        with contextlib.suppress(ConnectionError):
            handler.send_response(answer.status)
            for name, value in answer.headers.items():
                handler.send_header(name, value)
            handler.send_header("Content-Length", str(len(content)))
            handler.end_headers()
            if answer.fault == "cut":
                handler.wfile.write(content[: len(content) // 2])
                handler.close_connection = True
            elif answer.fault == "trickle":
                for place in range(len(content)):
                    handler.wfile.write(content[place : place + 1])
                    handler.wfile.flush()
                    answer.meanwhile()
            else:
                handler.wfile.write(content)

    def _went_away(self, handler: http.server.BaseHTTPRequestHandler) -> bool:
        """Wait, and return whether the client closes its connection meanwhile."""
        handler.connection.settimeout(HANG_SECONDS)
        try:
            return handler.connection.recv(1) == b""
        except TimeoutError:
            return False
        except ConnectionError:
            return True
        finally:
            handler.connection.settimeout(None)


@contextlib.contextmanager
def serving(answer: Callable[[Request, int], Answer]) -> Iterator[LocalEndpoint]:
    endpoint = LocalEndpoint(answer)
    thread = threading.Thread(
        target=endpoint._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
    )
    thread.start()
    try:
        yield endpoint
    finally:
        endpoint._server.shutdown()
        endpoint._server.server_close()
        thread.join()
