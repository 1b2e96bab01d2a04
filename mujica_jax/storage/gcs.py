"""A client of one bucket in Google Cloud Storage.

Every request has a deadline and a bounded number of retries. The errors that are retried are those
of google-cloud-storage's `DEFAULT_RETRY`. A retry always repeats the whole request.

Writes use generation preconditions: the service refuses a write if the object was changed in
between. A write also carries a token in the object's metadata. If only the answer to a write was
lost, the retry fails its precondition. The token then tells whether the object is our own or that
of another writer, even if both wrote the same bytes. Uploads and downloads are compared with the
service's CRC32C checksum.

Credentials are the application default credentials of Google Cloud. The environment variable
STORAGE_EMULATOR_HOST names another server. Import this module only when a bucket is opened, because
google-cloud-storage takes 0.5 s to import.
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
# An attempt fails if no byte arrives for this long.
REQUEST_SECONDS = 60.0
# The longest time of a request with all its retries, without the time for the transfer itself.
DEADLINE_SECONDS = 300.0
# Large files get a longer deadline: one second more for this many bytes.
MIN_BYTES_PER_SECOND = 2_000_000
MAX_ATTEMPTS = 8
# From this failed attempt on, each failure is logged as a warning.
WARNED_ATTEMPTS = 3
# Upper limit of the random wait after the first attempt. The limit doubles with each attempt.
FIRST_WAIT_SECONDS = 1.0
MAX_WAIT_SECONDS = 30.0
# Key of the writer's token in the metadata of an object.
WRITER = "writer"
# An append first uploads the new bytes as a part. The part's name is OBJECT.part-TOKEN.
PART = ".part-"
Answer = TypeVar("Answer")
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObjectInfo:
    """An object as the service lists it."""

    name: str
    bytes: int
    # CRC32C checksum of the content, in base64.
    crc32c: str
    # Number that the service changes with every write of the object.
    generation: int


class Bucket:
    """A bucket. Methods take full object names, such as "run/config.json".

    Threads may share an object.
    """

    def __init__(self, name: str) -> None:
        """Connect to a bucket. Raises UserError if there are no credentials."""
        self.name = name
        # Number of requests that were sent again.
        self.retries = 0
        try:
            self._client = storage.Client()
        except (DefaultCredentialsError, OSError) as error:
            raise UserError(
                f"no Google Cloud credentials for gs://{name} were found "
                f"({str(error).splitlines()[0]}); run `gcloud auth application-default login`, or "
                "choose a local path instead"
            ) from error
        self._bucket = self._client.bucket(name)
        self._lock = threading.Lock()

    def find(self, name: str) -> ObjectInfo | None:
        """Return size, checksum and generation of an object, or None if it does not exist."""
        blob = self._ask("found", name, self._bucket.get_blob, name)
        return None if blob is None else _info(blob)

    def list(self, prefix: str, max_results: int | None = None) -> list[ObjectInfo]:
        """Return the objects whose names begin with `prefix`, sorted by name.

        With `max_results`, return only the first ones.
        """

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
        """Return the bytes from `start` up to but excluding `stop`, of this generation only.

        Raises FileNotFoundError, or UserError if the object was replaced since `info` was read.
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
        """Download an object of `size_bytes` into a local file. Raises FileNotFoundError."""
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
            # If another process removed the object in between, try again.
            if self.find(name) is not None:
                return False
        return True

    def replace(self, name: str, data: bytes | Path) -> None:
        """Write an object, and replace it if it exists already.

        If several writers replace it, the content of the last one remains, in full.
        """
        self._upload(name, data, generation=None, token=uuid.uuid4().hex)

    def append(self, name: str, data: bytes, generation: int, token: str) -> int | None:
        """Append bytes to an object and return its new generation.

        `generation` is the expected generation, 0 for a new object. Return None if the object has
        another one, because another process has written it. After an interruption, call this again
        with the same token: the bytes are then appended only once.

        A bucket cannot append. The new bytes are uploaded as an object of their own (the part). The
        service then joins both under the old name, and the part is deleted. So the cost of an
        append does not grow with the object.
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
        """Delete an object. Do nothing if it is gone, or has another generation than given."""
        with contextlib.suppress(FileNotFoundError, PreconditionFailed):
            self._ask(
                "deleted", name, self._bucket.blob(name).delete, if_generation_match=generation
            )

    def move(self, name: str, target: str) -> bool:
        """Rename a small object: copy it, then delete the copied generation.

        Return False if the object does not exist, or the target exists already.
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

        Return None if `generation` is given and the object has another one. 0 means that the object
        must not exist.
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
        """Call `write` with a precondition and return the object's new generation.

        Return None if the precondition failed. It also fails if an earlier attempt succeeded and
        only its answer was lost. The token in the object's metadata then shows that the object is
        our own, and its generation is returned.
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
        """Call a method of the library, with retries, and return its result.

        Raises StoreUnavailableError if the retries take too long, FileNotFoundError for a missing
        object, and UserError for an error that no retry repairs. `done` is the participle in the
        error message, such as "read" or "deleted". `size_bytes` lengthens the deadline.
        """
        place = f"gs://{self.name}/{name}"
        deadline_seconds = DEADLINE_SECONDS + size_bytes / MIN_BYTES_PER_SECOND
        retry = DEFAULT_RETRY.with_delay(FIRST_WAIT_SECONDS, MAX_WAIT_SECONDS, 2.0)
        failures = _Failures(self, place)

        def request() -> Answer:
            try:
                # Turn off the library's own retry, so that retries are not nested.
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
                f"{deadline_seconds:.0f} seconds (last error: {_reason(error.cause)}); check that "
                "the bucket can be reached, and start the same command again"
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
    """A counter of the failed attempts of one request, which ends it after `MAX_ATTEMPTS`."""

    def __init__(self, bucket: Bucket, place: str) -> None:
        self.count = 0
        self._bucket = bucket
        self._place = place

    def add(self, error: Exception) -> None:
        """Count a failed attempt. Raises RetryError if it was the last one allowed."""
        self.count += 1
        if self.count == MAX_ATTEMPTS:
            raise exceptions.RetryError("too many attempts", error)
        if self.count >= WARNED_ATTEMPTS:
            _log.warning(
                "retrying %s after %d failed attempts: %s", self._place, self.count, _reason(error)
            )
        self._bucket.count_retry()


@functools.cache
def open_bucket(name: str) -> Bucket:
    """Return the bucket of this name. Each process has one object for it, with its connections."""
    return Bucket(name)


def _info(blob: Blob) -> ObjectInfo:
    """Return name, size, checksum and generation of an object of the library."""
    return ObjectInfo(
        name=str(blob.name),
        bytes=int(blob.size or 0),
        crc32c=blob.crc32c or "",
        generation=int(blob.generation or 0),
    )


def _reason(error: BaseException | None) -> str:
    """Return an error's text on one line of at most 200 characters."""
    return " ".join(str(error).split())[:200] or type(error).__name__
