"""Files that passages and triples are read from: local ones, and objects in Google Cloud Storage
(`gs://BUCKET/NAME`), plain, `.gz` or `.bz2`.

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
    """Counts what of a corpus is left out, and remembers what the first of it lacked."""

    skipped: int = 0
    first_skipped: str = ""

    def skip(self, why: UserError | str) -> None:
        self.skipped += 1
        self.first_skipped = self.first_skipped or str(why)


def open_file(path: str | Path) -> IO[bytes]:
    """Raises FileNotFoundError, OSError or UserError."""
    if not _in_bucket(path):
        return open(path, "rb")
    return cast(IO[bytes], io.BufferedReader(BucketFile(str(path)), RANGE_BYTES))


def decompressed(name: str, raw: IO[bytes]) -> IO[bytes]:
    """Closing it does not close what is under it where that is compressed: its owner does."""
    if name.endswith(".gz"):  # buffered: its own lines are read by Python, one at a time
        return cast(IO[bytes], io.BufferedReader(gzip.GzipFile(fileobj=raw), DECOMPRESSED_BYTES))
    return cast(IO[bytes], bz2.BZ2File(raw)) if name.endswith(".bz2") else raw


def describe_files(paths: Sequence[str]) -> list[dict[str, Any]]:
    """Name, size and checksum: what a file with another content differs in."""
    return [{"name": Path(path).name, **_describe_file(path)} for path in paths]


def _describe_file(path: str) -> dict[str, Any]:
    try:
        if _in_bucket(path):
            _, listed = _find(path)
            return {"bytes": listed.bytes, "crc32c": listed.crc32c}
        return {"bytes": Path(path).stat().st_size, "sha256": sha256_of(Path(path))}
    except OSError as error:
        reason = error.strerror or "there is no such object, or no such bucket"
        raise UserError(f"{path} cannot be read ({reason}): give the path of a corpus") from error


class BucketFile(io.RawIOBase):
    """One object, readable and seekable."""

    def __init__(self, address: str) -> None:
        import google_crc32c

        self._bucket, self._listed = _find(address)
        self._address, self._position = address, 0
        self._sum, self._summed_bytes = google_crc32c.Checksum(), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._listed.bytes}[
            whence
        ]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        start = self._position
        stop = min(start + min(len(buffer), RANGE_BYTES), self._listed.bytes)
        if start >= stop:
            return 0
        content = self._bucket.read_range(self._listed, start, stop)
        buffer[: len(content)] = content
        self._position = stop
        if start == self._summed_bytes:
            self._sum.update(content)
            self._summed_bytes = stop
            if (
                stop == self._listed.bytes
                and base64.b64encode(self._sum.digest()).decode() != self._listed.crc32c
            ):
                raise UserError(
                    f"{self._address} was damaged on the way (its CRC32C differs): start the "
                    "command again"
                )
        return len(content)


def _in_bucket(path: str | Path) -> bool:
    return str(path).startswith(SCHEME)


def _find(address: str) -> "tuple[Bucket, ObjectInfo]":
    from mujica_jax.storage.gcs import open_bucket

    named = re.fullmatch(rf"{SCHEME}({BUCKET_NAME})/(.+)", address)
    if named is None:
        raise UserError(
            f"{address} names no object in a bucket: give gs://BUCKET/NAME, or the path of a local "
            "file"
        )
    bucket = open_bucket(named[1])
    found = bucket.find(named[2])
    if found is None:
        raise FileNotFoundError(address)
    return bucket, found
