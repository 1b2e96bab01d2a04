"""A path class for `gs://`, for Orbax and for code that opens files of a run by path.

Orbax writes arrays to a bucket with TensorStore, and its small files with the paths of etils. By
default etils would use TensorFlow if it is installed, and gcsfs otherwise. TensorFlow takes seconds
to import, and both wait without a deadline. `BucketPath` therefore registers itself with etils for
`gs://`, so that all of these requests go through `gcs.py`.

A bucket has no real folders. A folder exists as soon as there is an object below it.
"""

import contextlib
import fnmatch
import io
import os
import posixpath
from collections.abc import Iterator
from typing import IO, Any

from etils import epath
from etils.epath import backend, gpath, stat_utils

from mujica_jax.storage.gcs import Bucket, ObjectInfo, open_bucket

SCHEME = "gs://"
# TensorStore repeats a request 32 times, 1 to 30 seconds apart, and Orbax offers no way to change
# that. Without these limits, a request would wait for ever on a connection that carries no data.
# TensorStore reads the variables at its first request. Values that the user has set are kept.
TENSORSTORE_LIMITS = {
    "TENSORSTORE_CURL_CONNECT_TIMEOUT_SECONDS": "10",
    "TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": "30",
    "TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES": "1",
}
for _variable, _value in TENSORSTORE_LIMITS.items():
    os.environ.setdefault(_variable, _value)


class _Requests(backend.Backend):
    """The operations of an etils file system, as requests to a bucket.

    All paths are strings that begin with gs://.
    """

    @contextlib.contextmanager
    def open(self, path: epath.PathLike, mode: str) -> Iterator[IO[Any]]:
        """Open a whole object for reading or writing.

        Written data is uploaded at the end of the `with` block, unless the block fails.
        """
        bucket, key = _split(path)
        assert "a" not in mode, "a bucket cannot append"
        content = io.BytesIO(bucket.read(key) if "r" in mode else b"")
        if "b" in mode:
            yield content
        else:
            yield io.TextIOWrapper(content, encoding="utf-8", write_through=True)
        if "w" in mode:
            bucket.replace(key, content.getvalue())

    def exists(self, path: epath.PathLike) -> bool:
        """Return whether there is an object of this name, or any object below it."""
        bucket, key = _split(path)
        return not key or bucket.find(key) is not None or self.isdir(path)

    def isdir(self, path: epath.PathLike) -> bool:
        """Return whether there is any object below this path."""
        bucket, key = _split(path)
        return not key or bool(bucket.list(f"{key}/", max_results=1))

    def listdir(self, path: epath.PathLike) -> list[str]:
        """Return the names of the objects and folders directly below this path, sorted."""
        bucket, key = _split(path)
        prefix = f"{key}/" if key else ""
        names = {info.name.removeprefix(prefix).partition("/")[0] for info in bucket.list(prefix)}
        return sorted(names)

    def glob(self, path: epath.PathLike) -> list[str]:
        """Return the paths that match a pattern in the last part of `path`."""
        folder, pattern = posixpath.split(os.fspath(path))
        assert "*" not in folder, "only the last part of a path may hold a pattern"
        return [
            f"{folder}/{name}"
            for name in self.listdir(folder)
            if fnmatch.fnmatchcase(name, pattern)
        ]

    def makedirs(
        self, path: epath.PathLike, *, exist_ok: bool = False, mode: int | None = None
    ) -> None:
        """Check that the path is free, unless `exist_ok`. A folder needs no request."""
        if not exist_ok and self.exists(path):
            raise FileExistsError(os.fspath(path))

    mkdir = makedirs

    def rmtree(self, path: epath.PathLike) -> None:
        """Delete all objects below this path."""
        bucket, key = _split(path)
        for info in bucket.list(f"{key}/"):
            bucket.delete(info.name)

    def remove(self, path: epath.PathLike) -> None:
        """Delete one object. Raises FileNotFoundError if it does not exist."""
        bucket, key = _split(path)
        if bucket.find(key) is None:
            raise FileNotFoundError(os.fspath(path))
        bucket.delete(key)

    def stat(self, path: epath.PathLike) -> stat_utils.StatResult:
        """Return the size of an object in bytes, or 0 for a folder. Raises FileNotFoundError.

        Modification times are not supported and are always 0.
        """
        bucket, key = _split(path)
        info = bucket.find(key)
        if info is not None:
            return stat_utils.StatResult(is_directory=False, length=info.bytes, mtime=0)
        if not self.isdir(path):
            raise FileNotFoundError(os.fspath(path))
        return stat_utils.StatResult(is_directory=True, length=0, mtime=0)

    def _unsupported(self, *_: Any, **__: Any) -> Any:
        raise io.UnsupportedOperation(
            "walk, rename, replace and copy are not supported in a bucket"
        )

    walk = rename = replace = copy = _unsupported


_REQUESTS = _Requests()


@epath.register_path_cls(SCHEME)
class BucketPath(gpath.PosixGPath):
    """`BucketPath("gs://bucket/run")`, with the methods of pathlib's Path."""

    @property
    def _backend(self) -> backend.Backend:
        return _REQUESTS

    @property
    def bucket(self) -> Bucket:
        """The bucket of this path."""
        return _split(self)[0]

    @property
    def key(self) -> str:
        """The object's name in the bucket, without a slash at either end."""
        return _split(self)[1]

    def objects(self, prefix: str = "") -> dict[str, ObjectInfo]:
        """Return the objects below this path, by name relative to it, sorted.

        With `prefix`, return only objects whose relative names begin with it.
        """
        folder = f"{self.key}/" if self.key else ""
        return {info.name.removeprefix(folder): info for info in self.bucket.list(folder + prefix)}


def _split(path: epath.PathLike) -> tuple[Bucket, str]:
    """Return the bucket of a path, and the object's name in it without outer slashes."""
    bucket, _, key = os.fspath(path).removeprefix(SCHEME).partition("/")
    return open_bucket(bucket), key.strip("/")
