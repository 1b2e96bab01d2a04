"""One bucket of Google Cloud Storage.

Requests have a deadline, bounded retries and generation preconditions.

Requests are repeated as google-cloud-storage's `DEFAULT_RETRY` says, each as a whole. Each write
carries a token in the object's metadata: a request whose answer was lost is sent again and meets
its own object, which the token tells from another writer's, even where both wrote the same bytes.
Uploads and downloads are compared with the service's CRC32C. This file is imported with the first
bucket: google-cloud-storage takes 0.5 s.

Access is that of every Google Cloud program (application default credentials);
STORAGE_EMULATOR_HOST names another server.
"""

import contextlib
import dataclasses
import functools
import logging
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from google.api_core import exceptions
from google.api_core.exceptions import PreconditionFailed
from google.auth.exceptions import DefaultCredentialsError, RefreshError
from google.cloud import storage
from google.cloud.storage import Blob
from google.cloud.storage.exceptions import DataCorruption
from google.cloud.storage.retry import DEFAULT_RETRY

from mujica_jax.errors import StoreUnavailableError, UserError

CONNECT_SECONDS = 10.0
REQUEST_SECONDS = 60.0  # without a byte from the service
DEADLINE_SECONDS = 300.0  # of a request with its retries
MIN_BYTES_PER_SECOND = 2_000_000  # a large file has this much longer
MAX_ATTEMPTS = 8
WARNED_ATTEMPTS = 3  # from this failed attempt on, a line on the console tells of each
FIRST_WAIT_SECONDS = 1.0  # doubled after each attempt; the wait is a random part of it
MAX_WAIT_SECONDS = 30.0
WRITER = "writer"  # key of the token among an object's metadata
PART = ".part-"  # between the name of an object and the token of a part that is to be joined to it
Answer = TypeVar("Answer")
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObjectInfo:
    """An object as the service lists it."""

    name: str
    bytes: int
    crc32c: str  # base64, of the content
    generation: int


class Bucket:
    """Names are whole names: "run/config.json". Threads may share it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.retries = 0  # requests that were sent again
        try:
            self._client = storage.Client()
        except (DefaultCredentialsError, OSError) as error:
            raise UserError(
                f"no Google Cloud credentials for gs://{name} were found "
                f"({str(error).splitlines()[0]}); run `gcloud auth application-default login`, or "
                "choose a local path"
            ) from error
        self._bucket = self._client.bucket(name)
        self._lock = threading.Lock()

    def find(self, name: str) -> ObjectInfo | None:
        """Return what the service says of an object, or None if there is none."""
        blob = self._ask("found", name, self._bucket.get_blob, name)
        return None if blob is None else _info(blob)

    def list(self, prefix: str, max_results: int | None = None) -> list[ObjectInfo]:
        """Return all objects whose names begin with `prefix`, sorted, or the first of them."""

        def pages(**settings: Any) -> list[ObjectInfo]:
            blobs = self._client.list_blobs(
                self.name, prefix=prefix, max_results=max_results, **settings
            )
            return [_info(blob) for blob in blobs]

        return sorted(self._ask("listed", prefix, pages), key=lambda info: info.name)

    def read(self, name: str) -> bytes:
        """Return an object's content. Raises FileNotFoundError."""
        return self._ask("read", name, self._bucket.blob(name).download_as_bytes, checksum="crc32c")

    def read_range(self, info: ObjectInfo, start: int, stop: int) -> bytes:
        """Return bytes `start` to `stop` of exactly this object.

        Raises FileNotFoundError, and UserError if the object was replaced.
        """
        try:
            return self._ask(
                "read",
                info.name,
                self._bucket.blob(info.name).download_as_bytes,
                start=start,
                end=stop - 1,
                checksum=None,
                if_generation_match=info.generation,
            )
        except PreconditionFailed as error:
            raise UserError(
                f"gs://{self.name}/{info.name} was replaced while it was read: start the command "
                "again"
            ) from error

    def download(self, name: str, path: Path, size_bytes: int) -> None:
        """Write an object into a local file. Raises FileNotFoundError."""
        self._ask(
            "read",
            name,
            self._bucket.blob(name).download_to_filename,
            str(path),
            checksum="crc32c",
            size_bytes=size_bytes,
        )

    def create(self, name: str, data: bytes | Path) -> bool:
        """Create an object from bytes or a local file.

        Return False, and change nothing, if the object exists already.
        """
        while self._upload(name, data, generation=0, token=uuid.uuid4().hex) is None:
            # An object that another process removed in between is created after all.
            if self.find(name) is not None:
                return False
        return True

    def replace(self, name: str, data: bytes | Path) -> None:
        """Write an object that may exist already.

        Of several writers the last one's content stays, whole.
        """
        self._upload(name, data, generation=None, token=uuid.uuid4().hex)

    def append(self, name: str, data: bytes, generation: int, token: str) -> int | None:
        """Add bytes to an object and return its new generation.

        Return None if it has another generation than given: another process has written.

        A bucket cannot append: the new bytes become an object of their own, the service joins the
        two under the old name, and the part is deleted. So the costs do not grow with the object.
        Generation 0: it does not exist yet. Called again with the same token, after an
        interruption, it adds nothing twice.
        """
        if generation == 0:
            return self._upload(name, data, generation=0, token=token)

        part = f"{name}{PART}{token}"
        self.create(part, data)

        joined = self._bucket.blob(name)
        joined.content_type = "application/octet-stream"
        sources = [self._bucket.blob(name), self._bucket.blob(part)]
        new_generation = self._write_once(
            joined, token, joined.compose, sources, if_generation_match=generation
        )

        self.delete(part)
        return new_generation

    def delete(self, name: str, generation: int | None = None) -> None:
        """Delete an object, unless it is gone or has another generation than given."""
        with contextlib.suppress(FileNotFoundError, PreconditionFailed):
            self._ask(
                "deleted", name, self._bucket.blob(name).delete, if_generation_match=generation
            )

    def move(self, name: str, target: str) -> bool:
        """Copy a small object, then delete exactly what was copied.

        Return False if the object is gone, or the target exists.
        """
        info = self.find(name)
        if info is None or not self.create(target, self.read(name)):
            return False
        self.delete(name, info.generation)
        return True

    def _upload(
        self, name: str, data: bytes | Path, generation: int | None, token: str
    ) -> int | None:
        """Upload an object and return its new generation.

        Return None if the object has another generation than given.
        """
        blob = self._bucket.blob(name)
        source: str | bytes
        if isinstance(data, Path):
            write = blob.upload_from_filename
            source = str(data)
            size_bytes = data.stat().st_size
        else:
            write = blob.upload_from_string
            source = data
            size_bytes = len(data)
        return self._write_once(
            blob,
            token,
            write,
            source,
            size_bytes=size_bytes,
            content_type="application/octet-stream",
            checksum="crc32c",
            if_generation_match=generation,
        )

    def _write_once(
        self, blob: Blob, token: str, write: Callable[..., Any], *arguments: Any, **options: Any
    ) -> int | None:
        """Write under a precondition and return the object's new generation; None if it failed.

        A precondition also fails if only the answer to an earlier attempt was lost. The token then
        shows that the object there is our own.
        """
        name = str(blob.name)
        blob.metadata = {WRITER: token}
        try:
            self._ask("written", name, write, *arguments, **options)
        except PreconditionFailed:
            stored = self._ask("found", name, self._bucket.get_blob, name)
            if stored is None or (stored.metadata or {}).get(WRITER) != token:
                return None
            return int(stored.generation or 0)
        return int(blob.generation or 0)

    def _ask(
        self,
        done: str,
        name: str,
        method: Callable[..., Answer],
        *arguments: Any,
        size_bytes: int = 0,
        **options: Any,
    ) -> Answer:
        """Call a method of the library until it is answered.

        Raises StoreUnavailableError when that takes too long, FileNotFoundError for an absent object,
        and UserError for an error that no retry repairs. `done` says in it what was to be done.
        """
        place = f"gs://{self.name}/{name}"
        deadline_seconds = DEADLINE_SECONDS + size_bytes / MIN_BYTES_PER_SECOND
        retry = DEFAULT_RETRY.with_delay(FIRST_WAIT_SECONDS, MAX_WAIT_SECONDS, 2.0)
        failures = _Failures(self, place)

        def request() -> Answer:
            try:
                # The library's own retry is off: it would be one inside the other.
                return method(
                    *arguments, timeout=(CONNECT_SECONDS, REQUEST_SECONDS), retry=None, **options
                )
            except DataCorruption as error:
                raise ConnectionError(str(error)) from error

        try:
            return retry.with_timeout(deadline_seconds)(request, on_error=failures.add)()
        except exceptions.RetryError as error:
            raise StoreUnavailableError(
                f"{place} could not be {done} in {failures.count} attempts within "
                f"{deadline_seconds:.0f} seconds, at last because of: {_reason(error.cause)}; see "
                "that the bucket can be reached and start the same command again"
            ) from error
        except exceptions.NotFound as error:
            message = str(error.message).lower()
            if "bucket" in message and "object" not in message:
                raise UserError(
                    f"there is no bucket {self.name}: create it or choose another address"
                ) from error
            raise FileNotFoundError(place) from error
        except (exceptions.Forbidden, exceptions.Unauthorized, RefreshError) as error:
            raise UserError(
                f"access to {place} is denied ({_reason(error)}); ask for the role Storage Object "
                "User on the bucket, or choose another address"
            ) from error

    def count_retry(self) -> None:
        """Count one request that is sent again."""
        with self._lock:
            self.retries += 1


class _Failures:
    """Count the failed attempts of one request, and end it after the last one allowed."""

    def __init__(self, bucket: Bucket, place: str) -> None:
        self.count = 0
        self._bucket = bucket
        self._place = place

    def add(self, error: Exception) -> None:
        """Count a failed attempt before the next one. Raises RetryError if there is none left."""
        self.count += 1
        if self.count == MAX_ATTEMPTS:
            raise exceptions.RetryError("too many attempts", error)
        if self.count >= WARNED_ATTEMPTS:
            _log.warning(
                "%s is asked again after %d attempts: %s", self._place, self.count, _reason(error)
            )
        self._bucket.count_retry()


@functools.cache
def open_bucket(name: str) -> Bucket:
    """Return the bucket of this name. There is one in a process, which keeps its connections."""
    return Bucket(name)


def _info(blob: Blob) -> ObjectInfo:
    """Return what the service says of an object."""
    return ObjectInfo(
        name=str(blob.name),
        bytes=int(blob.size or 0),
        crc32c=blob.crc32c or "",
        generation=int(blob.generation or 0),
    )


def _reason(error: BaseException | None) -> str:
    """Return an error's text on one line of bounded length."""
    return " ".join(str(error).split())[:200] or type(error).__name__
