"""Read files of passages and triples, from local disk or from a bucket.

A file may be compressed (`.gz`, `.bz2`). In a bucket it is an object in Google Cloud Storage
(`gs://BUCKET/NAME`).

An object is read in ranges and is never downloaded as a whole. If the connection breaks, the range
is requested again, with a bounded number of retries and a deadline (`storage/gcs.py`). So reading a
large corpus continues where it stopped. All ranges come from the generation of the object that
existed at the beginning. If the whole object was read in order, its content is compared with the
service's checksum.
"""

import base64
import bz2
import dataclasses
import gzip
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from mujica_jax.errors import UserError
from mujica_jax.storage.manifest import sha256_of
from mujica_jax.storage.run_directory import BUCKET_NAME

if TYPE_CHECKING:
    from mujica_jax.storage.gcs import Bucket, ObjectInfo

SCHEME = "gs://"
# Size of the ranges in which an object is read.
RANGE_BYTES = 8 * 2**20
# Size of the buffer of a decompressed .gz file.
DECOMPRESSED_BYTES = 2**17


@dataclasses.dataclass
class Skipped:
    """A counter of the records that are left out of a corpus or a graph."""

    skipped: int = 0
    # Error message of the first record that was left out.
    first_skipped: str = ""

    def skip(self, why: UserError | str) -> None:
        """Count one record that is left out because of the error `why`."""
        self.skipped += 1
        self.first_skipped = self.first_skipped or str(why)


def open_file(path: str | Path) -> IO[bytes]:
    """Open a local file or an object in a bucket for reading.

    Raises FileNotFoundError, OSError or UserError.
    """
    if not _is_in_bucket(path):
        return open(path, "rb")
    return cast(IO[bytes], io.BufferedReader(BucketFile(str(path)), RANGE_BYTES))


def decompressed(name: str, raw: IO[bytes]) -> IO[bytes]:
    """Return a reader of a file's decompressed content. The ending of `name` says how it is stored.

    Closing the reader of a compressed file does not close `raw`, which the caller has to close.
    """
    if name.endswith(".gz"):
        # Add a buffer, because GzipFile reads lines in slow Python code.
        return cast(IO[bytes], io.BufferedReader(gzip.GzipFile(fileobj=raw), DECOMPRESSED_BYTES))
    if name.endswith(".bz2"):
        return cast(IO[bytes], bz2.BZ2File(raw))
    return raw


def describe_files(paths: Sequence[str]) -> list[dict[str, Any]]:
    """Return name, size and checksum of each file, to find out whether a file has changed."""
    return [{"name": Path(path).name, **_describe_file(path)} for path in paths]


def _describe_file(path: str) -> dict[str, Any]:
    """Return the size and the checksum of a file. Raises UserError if it cannot be read."""
    try:
        if _is_in_bucket(path):
            _, listed = _find_object(path)
            return {"bytes": listed.bytes, "crc32c": listed.crc32c}
        return {"bytes": Path(path).stat().st_size, "sha256": sha256_of(Path(path))}
    except OSError as error:
        reason = error.strerror or "there is no such object, or no such bucket"
        raise UserError(f"{path} cannot be read ({reason}): give the path of a corpus") from error


class BucketFile(io.RawIOBase):
    """An object in a bucket as a readable and seekable file."""

    def __init__(self, address: str) -> None:
        import google_crc32c

        self._bucket, self._listed = _find_object(address)
        self._address = address
        self._position = 0
        # Checksum of the first `_summed_bytes` bytes, which were read in order.
        self._checksum = google_crc32c.Checksum()
        self._summed_bytes = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a position and return it, as in every Python file."""
        bases = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._listed.bytes}
        self._position = max(0, bases[whence] + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Read at most one range into `buffer`, and return the number of bytes read."""
        start = self._position
        stop = min(start + min(len(buffer), RANGE_BYTES), self._listed.bytes)
        if start >= stop:
            return 0
        content = self._bucket.read_range(self._listed, start, stop)
        buffer[: len(content)] = content
        self._position = stop
        if start == self._summed_bytes:
            self._checksum.update(content)
            self._summed_bytes = stop
            if stop == self._listed.bytes:
                self._check_whole_object()
        return len(content)

    def _check_whole_object(self) -> None:
        """Raise UserError if the whole content differs from the service's checksum."""
        crc32c = base64.b64encode(self._checksum.digest()).decode()
        if crc32c != self._listed.crc32c:
            raise UserError(
                f"{self._address} was damaged during the download (its CRC32C differs): start the "
                "command again"
            )


def _is_in_bucket(path: str | Path) -> bool:
    return str(path).startswith(SCHEME)


def _find_object(address: str) -> "tuple[Bucket, ObjectInfo]":
    """Return the bucket and the object of an address.

    Raises FileNotFoundError if the object does not exist, and UserError if the address is wrong.
    """
    from mujica_jax.storage.gcs import open_bucket

    match = re.fullmatch(rf"{SCHEME}({BUCKET_NAME})/(.+)", address)
    if match is None:
        raise UserError(
            f"{address} is not the address of an object in a bucket: give gs://BUCKET/NAME, or the "
            "path of a local file"
        )
    bucket_name, object_name = match.groups()
    bucket = open_bucket(bucket_name)
    listed = bucket.find(object_name)
    if listed is None:
        raise FileNotFoundError(address)
    return bucket, listed
