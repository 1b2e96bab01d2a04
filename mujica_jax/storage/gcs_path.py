"""`gs://` as a path, for Orbax and for code that takes files of a run by path.

Orbax writes arrays to a bucket by TensorStore, and its small files by etils' paths. Those would go
through TensorFlow wherever it is installed, and through gcsfs elsewhere: the first takes seconds to
import, neither has a deadline. So this class takes `gs://` over in this process, and every request
is `gcs.py`'s. Folders exist as soon as something lies in them.
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
# TensorStore repeats a request 32 times, a second to half a minute apart, and Orbax offers no way
# to change that. Without these limits a connection on which nothing moves would hold it for ever.
# It reads them at its first request; what the user has set stays.
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
        """Read or write a whole object.

        What the block wrote is uploaded at its end, unless it failed.
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
        bucket, key = _split(path)
        return not key or bucket.find(key) is not None or self.isdir(path)

    def isdir(self, path: epath.PathLike) -> bool:
        bucket, key = _split(path)
        return not key or bool(bucket.list(f"{key}/", max_results=1))

    def listdir(self, path: epath.PathLike) -> list[str]:
        bucket, key = _split(path)
        prefix = f"{key}/" if key else ""
        names = {info.name.removeprefix(prefix).partition("/")[0] for info in bucket.list(prefix)}
        return sorted(names)

    def glob(self, path: epath.PathLike) -> list[str]:
        folder, pattern = posixpath.split(os.fspath(path))
        assert "*" not in folder, "patterns stand in the last part of a path"
        return [
            f"{folder}/{name}"
            for name in self.listdir(folder)
            if fnmatch.fnmatchcase(name, pattern)
        ]

    def makedirs(
        self, path: epath.PathLike, *, exist_ok: bool = False, mode: int | None = None
    ) -> None:
        if not exist_ok and self.exists(path):
            raise FileExistsError(os.fspath(path))

    mkdir = makedirs

    def rmtree(self, path: epath.PathLike) -> None:
        bucket, key = _split(path)
        for info in bucket.list(f"{key}/"):
            bucket.delete(info.name)

    def remove(self, path: epath.PathLike) -> None:
        bucket, key = _split(path)
        if bucket.find(key) is None:
            raise FileNotFoundError(os.fspath(path))
        bucket.delete(key)

    def stat(self, path: epath.PathLike) -> stat_utils.StatResult:
        bucket, key = _split(path)
        info = bucket.find(key)
        if info is not None:
            return stat_utils.StatResult(is_directory=False, length=info.bytes, mtime=0)
        if not self.isdir(path):
            raise FileNotFoundError(os.fspath(path))
        return stat_utils.StatResult(is_directory=True, length=0, mtime=0)

    def _unsupported(self, *_: Any, **__: Any) -> Any:
        raise io.UnsupportedOperation(
            "a bucket cannot walk, rename or copy; nothing here asks for it"
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
        return _split(self)[0]

    @property
    def key(self) -> str:
        """The name within the bucket, without a slash at either end."""
        return _split(self)[1]

    def objects(self, prefix: str = "") -> dict[str, ObjectInfo]:
        """Return the objects below this path by their relative names, sorted.

        With `prefix`, only those whose relative names begin with it.
        """
        folder = f"{self.key}/" if self.key else ""
        return {info.name.removeprefix(folder): info for info in self.bucket.list(folder + prefix)}


def _split(path: epath.PathLike) -> tuple[Bucket, str]:
    """Return the bucket and the name within it, without a slash at either end."""
    bucket, _, key = os.fspath(path).removeprefix(SCHEME).partition("/")
    return open_bucket(bucket), key.strip("/")
