"""One bucket of Google Cloud Storage: requests with a deadline, bounded retries and generation
preconditions.

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

from mujica_jax.errors import StoreUnavailable, UserError

CONNECT_SECONDS = 10.0
REQUEST_SECONDS = 60.0  # without a byte from the service
DEADLINE_SECONDS = 300.0  # of a request with its retries
MIN_BYTES_PER_SECOND = 2_000_000  # a large file has this much longer
MAX_ATTEMPTS = 8
WARNED_ATTEMPTS = 3  # so many that fail are worth a line on the console
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
        blob = self._ask("found", name, self._bucket.get_blob, name)
        return None if blob is None else _info(blob)

    def list(self, prefix: str, max_results: int | None = None) -> list[ObjectInfo]:
        """All objects whose names begin so, sorted, or the first ones."""

        def pages(**settings: Any) -> list[ObjectInfo]:
            blobs = self._client.list_blobs(
                self.name, prefix=prefix, max_results=max_results, **settings
            )
            return [_info(blob) for blob in blobs]

        return sorted(self._ask("listed", prefix, pages), key=lambda info: info.name)

    def read(self, name: str) -> bytes:
        """Raises FileNotFoundError."""
        return self._ask("read", name, self._bucket.blob(name).download_as_bytes, checksum="crc32c")

    def read_range(self, info: ObjectInfo, start: int, stop: int) -> bytes:
        """Bytes `start` to `stop` of exactly this object. Raises FileNotFoundError, and UserError
        where it was replaced.
        """
        span = {
            "start": start,
            "end": stop - 1,
            "checksum": None,
            "if_generation_match": info.generation,
        }
        try:
            return self._ask(
                "read", info.name, self._bucket.blob(info.name).download_as_bytes, **span
            )
        except PreconditionFailed as error:
            raise UserError(
                f"gs://{self.name}/{info.name} was replaced while it was read: start the command "
                "again"
            ) from error

    def download(self, name: str, path: Path, size_bytes: int) -> None:
        """Into a local file. Raises FileNotFoundError where there is no such object."""
        download = self._bucket.blob(name).download_to_filename
        self._ask("read", name, download, str(path), checksum="crc32c", size_bytes=size_bytes)

    def create(self, name: str, data: bytes | Path) -> bool:
        """From bytes or a local file. False, and nothing changed, where the object exists
        already."""
        while self._upload(name, data, generation=0, token=uuid.uuid4().hex) is None:
            if self.find(name) is not None:
                return False  # otherwise it was removed in between: once more
        return True

    def replace(self, name: str, data: bytes | Path) -> None:
        """Of several writers at a time the last one's content stays, whole."""
        self._upload(name, data, generation=None, token=uuid.uuid4().hex)

    def append(self, name: str, data: bytes, generation: int, token: str) -> int | None:
        """The object's new generation, or None where its generation is another one: another process
        has written.

        A bucket cannot append: the new bytes become an object of their own, the service joins the
        two under the old name, and the part is deleted. So the costs do not grow with the object.
        Generation 0: it does not exist yet. Called again with the same token, after an
        interruption, it adds nothing twice.
        """
        if generation == 0:
            return self._upload(name, data, generation=0, token=token)
        part = f"{name}{PART}{token}"
        self.create(part, data)
        whole = self._bucket.blob(name)
        whole.content_type = "application/octet-stream"
        sources = [self._bucket.blob(name), self._bucket.blob(part)]
        joined = self._write_once(
            whole, token, whole.compose, sources, if_generation_match=generation
        )
        self.delete(part)
        return joined

    def delete(self, name: str, generation: int | None = None) -> None:
        """Nothing happens where it is gone, or where its generation is another one."""
        with contextlib.suppress(FileNotFoundError, PreconditionFailed):
            self._ask(
                "deleted", name, self._bucket.blob(name).delete, if_generation_match=generation
            )

    def move(self, name: str, target: str) -> bool:
        """Copies a small object, then deletes exactly what was copied. False where it is gone, or
        the target exists."""
        found = self.find(name)
        if found is None or not self.create(target, self.read(name)):
            return False
        self.delete(name, found.generation)
        return True

    def _upload(
        self, name: str, data: bytes | Path, generation: int | None, token: str
    ) -> int | None:
        """The new generation; None where the object has another one than given."""
        blob = self._bucket.blob(name)
        how = {
            "content_type": "application/octet-stream",
            "checksum": "crc32c",
            "if_generation_match": generation,
        }
        if isinstance(data, Path):
            size_bytes, write, given = data.stat().st_size, blob.upload_from_filename, str(data)
        else:
            size_bytes, write, given = len(data), blob.upload_from_string, data
        return self._write_once(blob, token, write, given, size_bytes=size_bytes, **how)

    def _write_once(
        self, blob: Blob, token: str, write: Callable[..., Any], *what: Any, **options: Any
    ) -> int | None:
        """A write under a precondition: the object's new generation, also where only the answer to
        it was lost."""
        name, blob.metadata = str(blob.name), {WRITER: token}
        try:
            self._ask("written", name, write, *what, **options)
        except PreconditionFailed:
            found = self._ask("found", name, self._bucket.get_blob, name)
            if found is None or (found.metadata or {}).get(WRITER) != token:
                return None
            blob = found
        return int(blob.generation or 0)

    def _ask(
        self,
        done: str,
        name: str,
        method: Callable[..., Answer],
        *given: Any,
        size_bytes: int = 0,
        **options: Any,
    ) -> Answer:
        """Calls a method of the library until it is answered. Raises StoreUnavailable when that
        takes too long, FileNotFoundError for an absent object, and UserError for what no retry
        mends.
        """
        where = f"gs://{self.name}/{name}"
        seconds = DEADLINE_SECONDS + size_bytes / MIN_BYTES_PER_SECOND
        retry = DEFAULT_RETRY.with_delay(FIRST_WAIT_SECONDS, MAX_WAIT_SECONDS, 2.0).with_timeout(
            seconds
        )
        attempts = 0

        def request() -> Answer:
            try:  # the library's own retry is off: it would be one inside the other
                return method(
                    *given, timeout=(CONNECT_SECONDS, REQUEST_SECONDS), retry=None, **options
                )
            except DataCorruption as error:
                raise ConnectionError(str(error)) from error

        def failed(error: Exception) -> None:
            nonlocal attempts
            attempts += 1
            if attempts == MAX_ATTEMPTS:
                raise exceptions.RetryError("too many attempts", error)
            if attempts >= WARNED_ATTEMPTS:
                _log.warning(
                    "%s is asked again after %d attempts: %s", where, attempts, _reason(error)
                )
            with self._lock:
                self.retries += 1

        try:
            return retry(request, on_error=failed)()
        except exceptions.RetryError as error:
            raise StoreUnavailable(
                f"{where} could not be {done} in {attempts} attempts within {seconds:.0f} seconds, "
                f"at last because of: {_reason(error.cause)}; see that the bucket can be reached "
                "and start the same command again"
            ) from error
        except exceptions.NotFound as error:
            if (
                "bucket" in str(error.message).lower()
                and "object" not in str(error.message).lower()
            ):
                raise UserError(
                    f"there is no bucket {self.name}: create it or choose another address"
                ) from error
            raise FileNotFoundError(where) from error
        except (exceptions.Forbidden, exceptions.Unauthorized, RefreshError) as error:
            raise UserError(
                f"access to {where} is denied ({_reason(error)}); ask for the role Storage Object "
                "User on the bucket, or choose another address"
            ) from error


@functools.cache
def open_bucket(name: str) -> Bucket:
    """One for each name in a process: its connections are kept."""
    return Bucket(name)


def _info(blob: Blob) -> ObjectInfo:
    return ObjectInfo(
        name=str(blob.name),
        bytes=int(blob.size or 0),
        crc32c=blob.crc32c or "",
        generation=int(blob.generation or 0),
    )


def _reason(error: BaseException | None) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
