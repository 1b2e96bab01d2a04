"""A small server of Google Cloud Storage's JSON API.

It honours generation preconditions and fails on request.

    bucket = use(monkeypatch)  # this process talks to it
    bucket.faults = lambda request: "503" if request.kind == "upload" else None

`serving` is for other processes, which are given `bucket.environment`.

Kept in memory: whole objects with generation, metadata and checksums. Any bucket name is a bucket,
except those that begin with "no-", and those that begin with "closed-", to which nobody has access.
Uploads in one part, in two and resumable; downloads with ranges; lists with prefix, delimiter,
offsets and pages; delete and compose.
"""

import base64
import contextlib
import dataclasses
import email.parser
import email.policy
import functools
import hashlib
import http.server
import itertools
import json
import re
import socket
import sys
import threading
import urllib.parse
import uuid
from collections.abc import Callable, Iterator
from typing import Any, Literal

import google_crc32c
import pytest

from mujica_jax.storage import gcs
from tests.helpers.patience import HANG_SECONDS

Fault = Literal["503", "429", "hang", "cut upload", "cut download", "lost answer"]
PAGE = 1000


@dataclasses.dataclass(frozen=True)
class Object:
    content: bytes
    generation: int
    metadata: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def crc32c(self) -> str:
        return base64.b64encode(google_crc32c.Checksum(self.content).digest()).decode()

    @property
    def md5(self) -> str:
        return base64.b64encode(hashlib.md5(self.content).digest()).decode()


@dataclasses.dataclass(frozen=True)
class Request:
    method: str
    path: str  # without its query, not yet unquoted
    query: dict[str, str]
    nth: int  # from 1, over all requests

    @property
    def kind(self) -> str:
        """The kind of the request: upload, download, list, or another one with its own name."""
        if self.path.startswith("/upload/"):
            return "upload"
        if self.query.get("alt") == "media":
            return "download"
        if self.path.endswith("/compose"):
            return "compose"
        return {"GET": "list" if self.path.endswith("/o") else "find"}.get(
            self.method, self.method.lower()
        )


@dataclasses.dataclass(frozen=True)
class Answer:
    status: int
    content: bytes = b""
    headers: dict[str, str] = dataclasses.field(default_factory=dict)


class Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class FakeBucket:
    """The server and its contents: `objects[bucket, name]`.

    It asks `faults(request)` before each request and records all of them in `requests`.
    """

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], Object] = {}
        self.faults: Callable[[Request], Fault | None] = lambda request: None
        self.requests: list[Request] = []
        self.stopped = threading.Event()
        self.hang_seconds = HANG_SECONDS
        self._sessions: dict[str, tuple[str, dict[str, str], dict[str, Any], bytearray]] = {}
        self._generations = itertools.count(1_000)
        self._lock = threading.RLock()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def handle_one_request(self) -> None:
                with contextlib.suppress(ConnectionError):
                    super().handle_one_request()

            def serve(self) -> None:
                outer._serve(self)

            do_GET = do_POST = do_PUT = do_DELETE = serve

            def log_message(self, format: str, *args: object) -> None:
                pass

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.environment = {"STORAGE_EMULATOR_HOST": self.url, "TENSORSTORE_GCS_HTTP_URL": self.url}

    def names(self, bucket: str, prefix: str = "") -> list[str]:
        with self._lock:
            return sorted(
                name for owner, name in self.objects if owner == bucket and name.startswith(prefix)
            )

    def content(self, bucket: str, name: str) -> bytes:
        return self.objects[bucket, name].content

    def put(self, bucket: str, name: str, content: bytes) -> None:
        """Store an object as another program would write it."""
        with self._lock:
            self.objects[bucket, name] = Object(content, next(self._generations))

    def _serve(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        parts = urllib.parse.urlsplit(handler.path)
        query = dict(urllib.parse.parse_qsl(parts.query, keep_blank_values=True))
        with self._lock:
            request = Request(handler.command, parts.path, query, len(self.requests) + 1)
            self.requests.append(request)
            fault = self.faults(request)
        size = int(handler.headers.get("Content-Length") or 0)
        if fault == "cut upload":
            handler.rfile.read(size // 2)
            handler.close_connection = True
            handler.connection.shutdown(socket.SHUT_RDWR)
            return
        body = (
            _chunked(handler)
            if handler.headers.get("Transfer-Encoding") == "chunked"
            else handler.rfile.read(size)
        )
        if fault == "hang":
            self.stopped.wait(self.hang_seconds)
            handler.close_connection = True
            return
        if fault in ("503", "429"):
            answer = Answer(int(fault), b'{"error": {"message": "try again"}}')
        else:
            with self._lock:
                try:
                    answer = self._answer(request, handler.headers, body)
                except Refused as refused:
                    error = {"error": {"code": refused.status, "message": str(refused)}}
                    answer = Answer(refused.status, json.dumps(error).encode())
        if fault == "lost answer":
            handler.close_connection = True
            return
        lines = [f"HTTP/1.1 {answer.status} {http.HTTPStatus(answer.status).phrase}"]
        headers = {
            "Content-Type": "application/json",
            **answer.headers,
            "Content-Length": str(len(answer.content)),
        }
        lines += [f"{name}: {value}" for name, value in headers.items()]
        content = answer.content
        if fault == "cut download":
            content = content[: len(content) // 2]
            handler.close_connection = True
        handler.wfile.write("\r\n".join([*lines, "", ""]).encode() + content)

    def _answer(self, request: Request, headers: Any, body: bytes) -> Answer:
        address = re.fullmatch(
            r"(/upload|/download)?/storage/v1/b/([^/]+)(?:/o(?:/([^/]+)(?:/(.+))?)?)?", request.path
        )
        if address is None:
            raise Refused(404, f"no such address: {request.path}")
        bucket = address[2]
        name = urllib.parse.unquote(address[3] or "")
        action = address[4] or ""
        if bucket.startswith("no-"):
            raise Refused(404, "The specified bucket does not exist.")
        if bucket.startswith("closed-"):
            raise Refused(403, "somebody does not have storage.objects.get access")
        if address[1] == "/upload":
            return self._upload(request, headers, bucket, body)
        if action == "compose":
            return self._compose(request, bucket, name, json.loads(body))
        if not name:
            if request.path.endswith("/o"):
                return self._list(request, bucket)
            return Answer(
                200, json.dumps({"kind": "storage#bucket", "name": bucket, "id": bucket}).encode()
            )
        there = self.objects.get((bucket, name))
        if there is None:
            raise Refused(404, f"No such object: {bucket}/{name}")
        if request.method == "DELETE":
            self._require(request.query, there)
            del self.objects[bucket, name]
            return Answer(204)
        if request.query.get("ifGenerationNotMatch") == str(there.generation):
            return Answer(304)
        self._require(request.query, there)
        if request.query.get("alt") == "media":
            return _content(there, headers.get("Range"))
        return Answer(200, json.dumps(_resource(bucket, name, there)).encode())

    def _upload(self, request: Request, headers: Any, bucket: str, body: bytes) -> Answer:
        query = request.query
        match query["uploadType"]:
            case "media":
                return self._store(bucket, query["name"], body, {}, query)
            case "multipart":
                message = email.parser.BytesParser(policy=email.policy.HTTP).parsebytes(
                    b"Content-Type: " + headers["Content-Type"].encode() + b"\r\n\r\n" + body
                )
                described, _ = message.iter_parts()
                resource = json.loads(described.get_payload(decode=True))
                return self._store(
                    bucket,
                    resource["name"],
                    _second_part(headers["Content-Type"], body),
                    resource,
                    query,
                )
            case "resumable" if request.method == "POST":
                resource = json.loads(body or b"{}")
                name = resource.get("name") or query["name"]
                self._require(query, self.objects.get((bucket, name)))
                session = uuid.uuid4().hex
                self._sessions[session] = (name, query, resource, bytearray())
                place = f"{self.url}{request.path}?uploadType=resumable&upload_id={session}"
                return Answer(200, b"", {"Location": place})
            case _:
                name, opened_with, resource, content = self._sessions[query["upload_id"]]
                span, _, total = headers["Content-Range"].removeprefix("bytes ").partition("/")
                if span != "*":
                    begin = int(span.partition("-")[0])
                    if begin != len(content):
                        raise Refused(
                            400, f"{len(content)} bytes are here and the next one sent is {begin}"
                        )
                    content += body
                if total != "*" and len(content) == int(total):
                    return self._store(bucket, name, bytes(content), resource, opened_with)
                return Answer(308, b"", {"Range": f"bytes=0-{len(content) - 1}"} if content else {})

    def _store(
        self,
        bucket: str,
        name: str,
        content: bytes,
        resource: dict[str, Any],
        conditions: dict[str, str],
    ) -> Answer:
        self._require(conditions, self.objects.get((bucket, name)))
        made = Object(content, next(self._generations), dict(resource.get("metadata") or {}))
        if resource.get("crc32c") not in (None, made.crc32c):
            raise Refused(400, f"Provided CRC32C {resource['crc32c']} does not match {made.crc32c}")
        self.objects[bucket, name] = made
        return Answer(200, json.dumps(_resource(bucket, name, made)).encode())

    def _compose(self, request: Request, bucket: str, name: str, asked: dict[str, Any]) -> Answer:
        sources = [self.objects.get((bucket, source["name"])) for source in asked["sourceObjects"]]
        if None in sources or len(sources) > 32:
            raise Refused(404, "No such object among the sources")
        content = b"".join(source.content for source in sources if source is not None)
        return self._store(bucket, name, content, asked.get("destination", {}), request.query)

    def _list(self, request: Request, bucket: str) -> Answer:
        query = request.query
        low = query.get("startOffset", "")
        high = query.get("endOffset") or "\U0010ffff"
        names = [name for name in self.names(bucket, query.get("prefix", "")) if low <= name < high]
        after = query.get("pageToken", "")
        page = [name for name in names if name > after][: int(query.get("maxResults") or PAGE)]
        listing: dict[str, Any] = {
            "items": [_resource(bucket, name, self.objects[bucket, name]) for name in page]
        }
        if page and page[-1] != names[-1]:
            listing["nextPageToken"] = page[-1]
        return Answer(200, json.dumps(listing).encode())

    def _require(self, conditions: dict[str, str], there: Object | None) -> None:
        wanted = conditions.get("ifGenerationMatch")
        if wanted is not None and int(wanted) != (there.generation if there else 0):
            raise Refused(412, "At least one of the pre-conditions you specified did not hold.")


def _content(there: Object, span: str | None) -> Answer:
    headers = {
        "Content-Type": "application/octet-stream",
        "x-goog-hash": f"crc32c={there.crc32c},md5={there.md5}",
        "x-goog-generation": str(there.generation),
        "x-goog-stored-content-length": str(len(there.content)),
    }
    if span is None:
        return Answer(200, there.content, headers)
    begin, _, end = span.removeprefix("bytes=").partition("-")
    whole = len(there.content)
    first = int(begin) if begin else max(0, whole - int(end))
    last = min(whole - 1, int(end)) if begin and end else whole - 1
    if first >= whole:
        raise Refused(416, "the range is not in the object")
    return Answer(
        206,
        there.content[first : last + 1],
        headers | {"Content-Range": f"bytes {first}-{last}/{whole}"},
    )


def _resource(bucket: str, name: str, made: Object) -> dict[str, Any]:
    return {
        "kind": "storage#object",
        "id": f"{bucket}/{name}/{made.generation}",
        "bucket": bucket,
        "name": name,
        "size": str(len(made.content)),
        "generation": str(made.generation),
        "metageneration": "1",
        "crc32c": made.crc32c,
        "md5Hash": made.md5,
        "metadata": made.metadata,
        "timeCreated": "2026-01-01T00:00:00Z",
        "updated": "2026-01-01T00:00:00Z",
    }


def _second_part(content_type: str, body: bytes) -> bytes:
    """Return the bytes of the second part of a message.

    A parser of messages would change its line ends.
    """
    boundary = re.search(r"boundary=['\"]?([^'\";]+)", content_type)
    assert boundary is not None
    part = body.split(b"--" + boundary[1].encode())[2]
    return part.partition(b"\r\n\r\n")[2].removesuffix(b"\r\n")


def _chunked(handler: http.server.BaseHTTPRequestHandler) -> bytes:
    content = b""
    while size := int(handler.rfile.readline(), 16):
        content += handler.rfile.read(size)
        handler.rfile.readline()
    handler.rfile.readline()
    return content


@functools.cache
def _of_this_process() -> FakeBucket:
    """Return the one bucket of this process: TensorStore reads the address of its server once."""
    bucket = FakeBucket()
    threading.Thread(
        target=bucket.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
    ).start()
    return bucket


def use(monkeypatch: pytest.MonkeyPatch) -> FakeBucket:
    """Send this process's requests to an empty fake bucket, and let it retry after milliseconds."""
    bucket = _of_this_process()
    bucket.objects.clear()
    bucket.requests.clear()
    bucket.faults = lambda request: None
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(gcs, "FIRST_WAIT_SECONDS", 0.001)
    gcs.open_bucket.cache_clear()
    return bucket


@contextlib.contextmanager
def serving() -> Iterator[FakeBucket]:
    bucket = FakeBucket()
    thread = threading.Thread(
        target=bucket.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
    )
    thread.start()
    try:
        yield bucket
    finally:
        bucket.stopped.set()
        bucket.server.shutdown()
        bucket.server.server_close()
        thread.join()


def main() -> None:
    """Serve until the input ends.

    The first line of output is the environment that leads to this server.
    """
    with serving() as bucket:
        print(json.dumps(bucket.environment), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
