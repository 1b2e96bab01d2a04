"""Files that passages and triples are read from, on local disk or in a bucket.

A file is plain, `.gz` or `.bz2`. In a bucket it is an object in Google Cloud Storage
(`gs://BUCKET/NAME`).

An object is read range by range and never fetched whole. A range whose connection breaks is asked
for again (`storage/gcs.py`: bounded, with a deadline), so a reader of a large corpus goes on where
it was. All ranges are of the object that was there at the beginning, and what was read from the
first byte to the last is compared with the service's checksum.
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
RANGE_BYTES = 8 * 2**20
DECOMPRESSED_BYTES = 2**17  # at once


@dataclasses.dataclass
class Skipped:
    """Counts what is left out of a corpus, and remembers what was wrong with the first of it."""

    skipped: int = 0
    first_skipped: str = ""

    def skip(self, why: UserError | str) -> None:
        self.skipped += 1
        self.first_skipped = self.first_skipped or str(why)


def open_file(path: str | Path) -> IO[bytes]:
    """Open a local file or an object in a bucket.

    Raises FileNotFoundError, OSError or UserError.
    """
    if not _is_in_bucket(path):
        return open(path, "rb")
    return cast(IO[bytes], io.BufferedReader(BucketFile(str(path)), RANGE_BYTES))


def decompressed(name: str, raw: IO[bytes]) -> IO[bytes]:
    """Return the content of a file, decompressed as its name says.

    Closing the result does not close a compressed file under it: its owner does.
    """
    if name.endswith(".gz"):
        # Buffered, because gzip's own lines are read by Python, one at a time.
        return cast(IO[bytes], io.BufferedReader(gzip.GzipFile(fileobj=raw), DECOMPRESSED_BYTES))
    if name.endswith(".bz2"):
        return cast(IO[bytes], bz2.BZ2File(raw))
    return raw


def describe_files(paths: Sequence[str]) -> list[dict[str, Any]]:
    """Return name, size and checksum of each file: a file with another content differs in these."""
    return [{"name": Path(path).name, **_describe_file(path)} for path in paths]


def _describe_file(path: str) -> dict[str, Any]:
    """Return size and checksum. Raise UserError where the file cannot be read."""
    try:
        if _is_in_bucket(path):
            _, listed = _find_object(path)
            return {"bytes": listed.bytes, "crc32c": listed.crc32c}
        return {"bytes": Path(path).stat().st_size, "sha256": sha256_of(Path(path))}
    except OSError as error:
        reason = error.strerror or "there is no such object, or no such bucket"
        raise UserError(f"{path} cannot be read ({reason}): give the path of a corpus") from error


class BucketFile(io.RawIOBase):
    """One object, readable and seekable."""

    def __init__(self, address: str) -> None:
        import google_crc32c

        self._bucket, self._listed = _find_object(address)
        self._address = address
        self._position = 0
        # The checksum of the bytes up to `_summed_bytes`, if they were read in order.
        self._checksum = google_crc32c.Checksum()
        self._summed_bytes = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a position, as any file does."""
        bases = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._listed.bytes}
        self._position = max(0, bases[whence] + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Read at most one range, and return its bytes."""
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
        """Compare what was read from the first byte to the last with the service's checksum."""
        crc32c = base64.b64encode(self._checksum.digest()).decode()
        if crc32c != self._listed.crc32c:
            raise UserError(
                f"{self._address} was damaged on the way (its CRC32C differs): start the "
                "command again"
            )


def _is_in_bucket(path: str | Path) -> bool:
    return str(path).startswith(SCHEME)


def _find_object(address: str) -> "tuple[Bucket, ObjectInfo]":
    """Return the bucket and the object of an address.

    Raises FileNotFoundError if the object is missing, and UserError if the address names none.
    """
    from mujica_jax.storage.gcs import open_bucket

    match = re.fullmatch(rf"{SCHEME}({BUCKET_NAME})/(.+)", address)
    if match is None:
        raise UserError(
            f"{address} names no object in a bucket: give gs://BUCKET/NAME, or the path of a local "
            "file"
        )
    bucket_name, object_name = match.groups()
    bucket = open_bucket(bucket_name)
    listed = bucket.find(object_name)
    if listed is None:
        raise FileNotFoundError(address)
    return bucket, listed
