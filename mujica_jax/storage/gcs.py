"""One bucket of Google Cloud Storage: requests with a deadline, bounded retries and generation preconditions.

Whoever writes an object marks it with a token of its own. A request whose answer was lost is sent again and meets its own object: the
token tells it from another writer's, even where both wrote the same bytes. Uploads carry a CRC32C that the service compares, and
downloads are compared with the one it sends. google-cloud-storage is imported with the first bucket: 0.5 s.

Access is that of every Google Cloud program (application default credentials); STORAGE_EMULATOR_HOST names another server.
"""

import contextlib
import dataclasses
import functools
import http.client
import itertools
import logging
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mujica_jax.errors import StoreUnavailable, UserError

if TYPE_CHECKING:
    from google.cloud.storage import Blob

CONNECT_SECONDS = 10.0
REQUEST_SECONDS = 60.0  # without a byte from the service
DEADLINE_SECONDS = 300.0  # of a request with its repetitions
SLOWEST_BYTES_PER_SECOND = 2_000_000  # a large file has this much longer
MOST_ATTEMPTS = 8
TOLD_ATTEMPTS = 3  # so many that fail are worth a line on the console
FIRST_WAIT_SECONDS = 0.5  # doubled after each attempt, and shortened at random by up to a half
LONGEST_WAIT_SECONDS = 30.0
TRANSIENT_STATUS = {408, 429, 500, 502, 503, 504}
BUCKET_NAME = r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]"
WRITER = "writer"  # key of the token among an object's metadata
PART = ".part-"  # between the name of an object and the token of a part that is to be joined to it
ONCE: Any = None  # the library repeats nothing by itself
NO_CHECKSUM: Any = None  # there is none of a part
Answer = TypeVar("Answer")
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Listed:
    """An object as the service lists it."""

    name: str
    bytes: int
    crc32c: str  # base64, of the content
    generation: int


class Bucket:
    """Names are whole names: "run/config.json". Threads may share it."""

    def __init__(self, name: str) -> None:
        from google.auth.exceptions import DefaultCredentialsError
        from google.cloud import storage

        self.name = name
        self.repeated = 0  # requests that were sent again
        try:
            self._client = storage.Client()
        except (DefaultCredentialsError, OSError) as error:
            raise UserError(
                f"no Google Cloud credentials for gs://{name} were found ({str(error).splitlines()[0]}); run "
                "`gcloud auth application-default login`, or choose a local path"
            ) from error
        self._bucket = self._client.bucket(name)
        self._lock = threading.Lock()

    def find(self, name: str) -> Listed | None:
        blob = self._ask("found", name, lambda timeout: self._bucket.get_blob(name, timeout=timeout, retry=ONCE))
        return None if blob is None else _listed(blob)

    def list(self, prefix: str, most: int | None = None) -> list[Listed]:
        """All objects whose names begin so, sorted, or the first ones."""

        def request(timeout: Any) -> list[Listed]:
            blobs = self._client.list_blobs(self.name, prefix=prefix, max_results=most, timeout=timeout, retry=ONCE)
            return [_listed(blob) for blob in blobs]

        return sorted(self._ask("listed", prefix, request), key=lambda listed: listed.name)

    def read(self, name: str) -> bytes:
        """Raises FileNotFoundError."""
        blob = self._bucket.blob(name)
        return self._ask(
            "read", name, lambda timeout: blob.download_as_bytes(timeout=timeout, retry=ONCE, checksum="crc32c")
        )

    def read_range(self, listed: Listed, start: int, stop: int) -> bytes:
        """Bytes `start` to `stop` of exactly this object. Raises FileNotFoundError, and UserError where another one has taken its place."""
        from google.api_core.exceptions import PreconditionFailed

        blob = self._bucket.blob(listed.name)

        def request(timeout: Any) -> bytes:
            settings: dict[str, Any] = {"if_generation_match": listed.generation, "timeout": timeout, "retry": ONCE}
            content = blob.download_as_bytes(start=start, end=stop - 1, checksum=NO_CHECKSUM, **settings)
            if len(content) != stop - start:
                raise ConnectionError(f"{len(content)} of {stop - start} bytes came")
            return content

        try:
            return self._ask("read", listed.name, request)
        except PreconditionFailed as error:
            raise UserError(
                f"gs://{self.name}/{listed.name} was replaced while it was read: start the command again"
            ) from error

    def download(self, name: str, path: Path, size_bytes: int) -> None:
        """Into a local file. Raises FileNotFoundError where there is no such object."""
        blob = self._bucket.blob(name)
        self._ask(
            "read",
            name,
            lambda timeout: blob.download_to_filename(str(path), timeout=timeout, retry=ONCE, checksum="crc32c"),
            more_seconds=size_bytes / SLOWEST_BYTES_PER_SECOND,
        )

    def create(self, name: str, data: bytes | Path) -> bool:
        """From bytes or a local file. False, and nothing changed, where the object exists already."""
        while True:
            if self._put(name, data, generation=0) is not None:
                return True
            if self.find(name) is not None:
                return False  # otherwise it was taken away in between: once more

    def replace(self, name: str, data: bytes | Path) -> None:
        """Of several writers at a time the last one's content stays, whole."""
        while True:
            found = self.find(name)
            if self._put(name, data, generation=found.generation if found else 0) is not None:
                return

    def append(self, name: str, data: bytes, generation: int, token: str) -> int | None:
        """The object's new generation, or None where its generation is another one: somebody else has written.

        A bucket cannot append: the new bytes become an object of their own, the service joins the two under the old name, and the
        part is deleted. So the costs do not grow with the object. Generation 0: it does not exist yet. Called again with the same
        token, after an interruption, it adds nothing twice.
        """
        if generation == 0:
            return self._put(name, data, generation=0, token=token)
        part = f"{name}{PART}{token}"
        self.create(part, data)
        whole = self._bucket.blob(name)
        whole.content_type = "application/octet-stream"
        whole.metadata = {WRITER: token}
        sources = [self._bucket.blob(name), self._bucket.blob(part)]
        joined = self._once(
            name,
            token,
            lambda timeout: (
                whole.compose(sources, if_generation_match=generation, timeout=timeout, retry=ONCE) or whole
            ),
        )
        self.delete(part)
        return joined

    def delete(self, name: str, generation: int | None = None) -> None:
        """Nothing happens where it is gone, or where its generation is another one."""
        from google.api_core.exceptions import PreconditionFailed

        blob = self._bucket.blob(name)
        with contextlib.suppress(FileNotFoundError, PreconditionFailed):
            self._ask(
                "deleted",
                name,
                lambda timeout: blob.delete(if_generation_match=generation, timeout=timeout, retry=ONCE),
            )

    def move(self, name: str, target: str) -> bool:
        """Copy, then delete exactly what was copied. False where there is no such object, or the target exists."""
        found = self.find(name)
        if found is None:
            return False
        source, copy = self._bucket.blob(name), self._bucket.blob(target)

        def request(timeout: Any) -> "Blob":
            token, _, _ = copy.rewrite(
                source,
                if_generation_match=0,
                if_source_generation_match=found.generation,
                timeout=timeout,
                retry=ONCE,
            )
            while token is not None:
                token, _, _ = copy.rewrite(source, token=token, if_generation_match=0, timeout=timeout, retry=ONCE)
            return copy

        from google.api_core.exceptions import PreconditionFailed

        try:
            self._ask("copied", name, request)
        except PreconditionFailed:
            copied = self.find(target)  # the answer was lost, or somebody else was first
            if copied is None or (copied.bytes, copied.crc32c) != (found.bytes, found.crc32c):
                return False
        self.delete(name, found.generation)
        return True

    def _put(self, name: str, data: bytes | Path, generation: int, token: str | None = None) -> int | None:
        """The new generation; None where the object has another one than given."""
        token = uuid.uuid4().hex if token is None else token
        size = data.stat().st_size if isinstance(data, Path) else len(data)

        def request(timeout: Any) -> "Blob":
            blob = self._bucket.blob(name)
            blob.metadata = {WRITER: token}
            settings: dict[str, Any] = {
                "content_type": "application/octet-stream",
                "if_generation_match": generation,
                "timeout": timeout,
                "retry": ONCE,
                "checksum": "crc32c",
            }
            if isinstance(data, Path):
                blob.upload_from_filename(str(data), **settings)
            else:
                blob.upload_from_string(data, **settings)
            return blob

        return self._once(name, token, request, more_seconds=size / SLOWEST_BYTES_PER_SECOND)

    def _once(self, name: str, token: str, request: "Callable[[Any], Blob]", more_seconds: float = 0.0) -> int | None:
        """A write under a precondition: the object's new generation, also where only the answer to it was lost."""
        from google.api_core.exceptions import PreconditionFailed

        try:
            written = self._ask("written", name, request, more_seconds=more_seconds)
        except PreconditionFailed:
            written = self._ask("found", name, lambda timeout: self._bucket.get_blob(name, timeout=timeout, retry=ONCE))
            if written is None or (written.metadata or {}).get(WRITER) != token:
                return None
        return int(written.generation or 0)

    def _ask(self, done: str, name: str, request: Callable[[Any], Answer], more_seconds: float = 0.0) -> Answer:
        """`request((seconds to connect, seconds to wait))` until it is answered; StoreUnavailable when that takes too long."""
        seconds = DEADLINE_SECONDS + more_seconds
        until = time.monotonic() + seconds
        for attempt in itertools.count(1):
            left = max(0.1, until - time.monotonic())
            try:
                with self._explained(name):
                    return request((min(CONNECT_SECONDS, left), min(REQUEST_SECONDS, left)))
            except Exception as error:
                if not _is_transient(error):
                    raise
                reason = " ".join(str(error).split())[:200] or type(error).__name__
                wait = min(LONGEST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2 ** (attempt - 1)) * random.uniform(0.5, 1.0)
                if attempt == MOST_ATTEMPTS or time.monotonic() + wait >= until:
                    raise StoreUnavailable(
                        f"gs://{self.name}/{name} could not be {done} in {attempt} attempts within {seconds:.0f} seconds, at "
                        f"last because of: {reason}; see that the bucket can be reached and start the same command again"
                    ) from error
            if attempt >= TOLD_ATTEMPTS:
                _log.warning("gs://%s/%s is asked again after %d attempts: %s", self.name, name, attempt, reason)
            with self._lock:
                self.repeated += 1
            time.sleep(wait)
        raise AssertionError("the attempts end in an answer or an error")

    @contextlib.contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        """What no repetition mends, in a sentence for the user."""
        from google.api_core import exceptions
        from google.auth.exceptions import RefreshError

        where = f"gs://{self.name}/{name}"
        try:
            yield
        except exceptions.NotFound as error:
            if "bucket" in str(error.message).lower() and "object" not in str(error.message).lower():
                raise UserError(f"there is no bucket {self.name}: create it or choose another address") from error
            raise FileNotFoundError(where) from error
        except (exceptions.Forbidden, exceptions.Unauthorized, RefreshError) as error:
            raise UserError(
                f"access to {where} is denied ({' '.join(str(error).split())[:200]}); ask for the role Storage Object User "
                "on the bucket, or choose another address"
            ) from error


@functools.cache
def open_bucket(name: str) -> Bucket:
    """One for each name in a process: its connections are kept."""
    return Bucket(name)


def _listed(blob: "Blob") -> Listed:
    return Listed(
        name=str(blob.name), bytes=int(blob.size or 0), crc32c=blob.crc32c or "", generation=int(blob.generation or 0)
    )


def _is_transient(error: Exception) -> bool:
    import requests
    import urllib3
    from google.api_core.exceptions import GoogleAPICallError
    from google.auth.exceptions import TransportError
    from google.cloud.storage.exceptions import DataCorruption, InvalidResponse

    if isinstance(error, GoogleAPICallError):
        return error.code in TRANSIENT_STATUS
    if isinstance(error, InvalidResponse):
        return error.response.status_code in TRANSIENT_STATUS
    return isinstance(
        error,
        requests.ConnectionError
        | requests.Timeout
        | requests.exceptions.ChunkedEncodingError
        | requests.exceptions.ContentDecodingError
        | urllib3.exceptions.HTTPError
        | http.client.HTTPException
        | TransportError
        | DataCorruption
        | ConnectionError
        | TimeoutError,
    )
