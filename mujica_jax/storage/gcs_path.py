"""`gs://` as a path, for libraries and for code that takes files of a run by path.

Orbax writes arrays to a bucket by TensorStore, and its small files by etils' paths. Those would go through TensorFlow wherever it is
installed, and through gcsfs elsewhere: the first takes seconds to import, neither has a deadline. So this class takes `gs://` over in
this process, and every request is `bucket.py`'s. Folders exist as soon as something lies in them.
"""

import contextlib
import fnmatch
import io
import os
import posixpath
from collections.abc import Callable, Iterator
from pathlib import PurePath
from typing import IO, Any

from etils import epath
from etils.epath import backend, gpath, stat_utils

from mujica_jax.errors import StoreUnavailable
from mujica_jax.storage.gcs import Bucket, open_bucket

SCHEME = "gs://"
# TensorStore repeats a request 32 times, a second to half a minute apart, and Orbax lets nobody change that. Without these limits a
# connection on which nothing moves would hold it for ever.
TENSORSTORE_LIMITS = {
    "TENSORSTORE_CURL_CONNECT_TIMEOUT_SECONDS": "10",
    "TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": "30",
    "TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES": "1",
}
TENSORSTORE_GAVE_UP = "retry attempts failed: "


class _Requests(backend.Backend):
    """What etils asks of a file system, as requests to a bucket. All paths are strings that begin with gs://."""

    @contextlib.contextmanager
    def open(self, path: epath.PathLike, mode: str) -> Iterator[IO[Any]]:
        """Reads and writes whole objects; what a block wrote is uploaded at its end, unless it failed."""
        bucket, key = _split(path)
        if "r" in mode:
            content = io.BytesIO(bucket.read(key))
        else:
            assert "a" not in mode, "a bucket cannot append"
            content = io.BytesIO()
        file = content if "b" in mode else io.TextIOWrapper(content, encoding="utf-8", write_through=True)
        yield file
        if "w" in mode:
            bucket.replace(key, content.getvalue())

    def exists(self, path: epath.PathLike) -> bool:
        bucket, key = _split(path)
        return not key or bucket.find(key) is not None or self.isdir(path)

    def isdir(self, path: epath.PathLike) -> bool:
        bucket, key = _split(path)
        return not key or bool(bucket.list(f"{key}/", most=1))

    def listdir(self, path: epath.PathLike) -> list[str]:
        bucket, key = _split(path)
        inside = len(key) + 1 if key else 0
        return sorted({listed.name[inside:].partition("/")[0] for listed in bucket.list(f"{key}/" if key else "")})

    def glob(self, path: epath.PathLike) -> list[str]:
        folder, pattern = posixpath.split(os.fspath(path))
        assert "*" not in folder, "patterns stand in the last part of a path"
        return [f"{folder}/{name}" for name in self.listdir(folder) if fnmatch.fnmatchcase(name, pattern)]

    def walk(
        self, top: epath.PathLike, *, top_down: bool = True, on_error: Callable[[OSError], object] | None = None
    ) -> Iterator[tuple[epath.PathLike, list[str], list[str]]]:
        names = self.listdir(top)
        folders = [name for name in names if self.isdir(f"{os.fspath(top)}/{name}")]
        here = (top, folders, [name for name in names if name not in folders])
        if top_down:
            yield here
        for folder in folders:
            yield from self.walk(f"{os.fspath(top)}/{folder}", top_down=top_down, on_error=on_error)
        if not top_down:
            yield here

    def makedirs(self, path: epath.PathLike, *, exist_ok: bool = False, mode: int | None = None) -> None:
        if not exist_ok and self.exists(path):
            raise FileExistsError(os.fspath(path))

    def mkdir(self, path: epath.PathLike, *, exist_ok: bool = False, mode: int | None = None) -> None:
        self.makedirs(path, exist_ok=exist_ok, mode=mode)

    def rmtree(self, path: epath.PathLike) -> None:
        bucket, key = _split(path)
        for listed in bucket.list(f"{key}/"):
            bucket.delete(listed.name)

    def remove(self, path: epath.PathLike) -> None:
        bucket, key = _split(path)
        if bucket.find(key) is None:
            raise FileNotFoundError(os.fspath(path))
        bucket.delete(key)

    def rename(self, path: epath.PathLike, dst: epath.PathLike) -> None:
        bucket, key = _split(path)
        for name in [listed.name for listed in bucket.list(f"{key}/")] or [key]:
            bucket.move(name, _split(dst)[1] + name.removeprefix(key))

    def replace(self, path: epath.PathLike, dst: epath.PathLike) -> None:
        self.copy(path, dst, overwrite=True)
        self.remove(path)

    def copy(self, path: epath.PathLike, dst: epath.PathLike, overwrite: bool) -> None:
        (bucket, source), (_, target) = _split(path), _split(dst)
        if overwrite:
            bucket.replace(target, bucket.read(source))
        elif not bucket.create(target, bucket.read(source)):
            raise FileExistsError(os.fspath(dst))

    def stat(self, path: epath.PathLike) -> stat_utils.StatResult:
        bucket, key = _split(path)
        found = bucket.find(key)
        if found is None and not self.isdir(path):
            raise FileNotFoundError(os.fspath(path))
        return stat_utils.StatResult(is_directory=found is None, length=found.bytes if found else 0, mtime=0)


_REQUESTS = _Requests()


@epath.register_path_cls(SCHEME)
class BucketPath(gpath.PosixGPath):
    """`BucketPath("gs://bucket/run")`, with the methods of pathlib's Path."""

    @property
    def _backend(self) -> backend.Backend:
        return _REQUESTS

    @property
    def bucket_name(self) -> str:
        return self._address()[0]

    @property
    def key(self) -> str:
        """The name within the bucket, without a slash at either end."""
        return self._address()[1]

    def write_over(self, data: bytes) -> None:
        """As `objects.write_over`."""
        open_bucket(self.bucket_name).replace(self.key, data)

    def description(self, below: str) -> list[dict[str, Any]]:
        """Every object under the folder `below`, as a manifest lists those that nobody wants to read again: the service's checksum."""
        found = open_bucket(self.bucket_name).list(f"{self.key}/{below}/")
        names = [listed.name.removeprefix(f"{self.key}/") for listed in found]
        return [
            {"name": name, "bytes": listed.bytes, "crc32c": listed.crc32c}
            for name, listed in zip(names, found, strict=True)
        ]

    def _address(self) -> tuple[str, str]:
        bucket, _, key = os.fspath(self).removeprefix(SCHEME).partition("/")
        return bucket, key.strip("/")


def limit_tensorstore() -> None:
    """Before its first request, which reads these variables; what the user has set stays."""
    for variable, value in TENSORSTORE_LIMITS.items():
        os.environ.setdefault(variable, value)


@contextlib.contextmanager
def tensorstore_explained(path: PurePath) -> Iterator[None]:
    """Turns TensorStore's error after its last repetition into StoreUnavailable."""
    try:
        yield
    except ValueError as error:
        _, failed, reason = str(error).partition(TENSORSTORE_GAVE_UP)
        if not failed:
            raise
        raise StoreUnavailable(
            f"{path} could not be written or read, at last because of: {reason.strip()[:200]}; see that the bucket can be reached and "
            "start the same command again"
        ) from error


def _split(path: epath.PathLike) -> tuple[Bucket, str]:
    bucket, _, key = os.fspath(path).removeprefix(SCHEME).partition("/")
    return open_bucket(bucket), key.strip("/")
