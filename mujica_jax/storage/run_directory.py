"""A run directory on local disk or in a bucket, with one interface for both.

`RunDirectory` reads and writes objects by name, and whole folders of files. It measures how long
that takes. An object is a file on local disk, or an object in a bucket. `local.py` implements local
disk. `gcs.py` and `gcs_path.py` implement `gs://bucket/prefix`. All other code uses this module, so
that it works the same in both places.

Some folders hold many files, such as a policy or a tokenizer. The file COMMITTED is written last
and lists all others. A folder without COMMITTED is incomplete, and the next writer replaces its
files. Libraries can only read from local disk, so a folder in a bucket is first downloaded into a
cache. Each time the folder is opened, every cached file is compared with COMMITTED.
"""

import contextlib
import json
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from io import FileIO
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from mujica_jax.config.cache_folders import cache_folder
from mujica_jax.errors import StoreError, UserError
from mujica_jax.storage import local
from mujica_jax.storage.io_statistics import IoStatistics
from mujica_jax.storage.local import as_user_error
from mujica_jax.storage.manifest import (
    COMMITTED,
    check_file,
    describe_file,
    describe_folder,
    json_bytes,
    json_object,
)

if TYPE_CHECKING:
    from mujica_jax.storage.gcs_path import BucketPath

    RunPath = Path | BucketPath
else:
    # Path and BucketPath are both subclasses of it. Importing BucketPath takes 0.3 s.
    RunPath = PurePath

BUCKET_NAME = r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]"
# File in the cached copy of a folder. It lists the objects of the bucket at the last download.
FETCHED = ".fetched.json"
# The longest time that appended bytes are held back before an upload. A bucket accepts only about
# one change of an object per second, so lines are uploaded together.
HELD_SECONDS = 10.0


def run_path(root: str | PurePath) -> RunPath:
    """Return a local path, or a path in a bucket if `root` begins with gs://.

    Raises UserError if `root` is an address of another kind.
    """
    if not isinstance(root, str):
        return root  # pyright: ignore[reportReturnType] - one of the two
    if "://" not in root:
        return Path(root)
    if not re.fullmatch(rf"gs://{BUCKET_NAME}(/.*)?", root):
        raise UserError(
            f"{root} is neither a local directory nor gs://BUCKET/NAME, where BUCKET has 3 to 63 "
            "lower-case letters, digits, dots, dashes and underscores; choose another --run "
            "directory"
        )
    from mujica_jax.storage.gcs_path import BucketPath

    return BucketPath(root.rstrip("/"))


def create(path: RunPath, data: bytes) -> bool:
    """Create a file or an object. Return False, and change nothing, if it exists already."""
    if isinstance(path, Path):
        return local.create(path, data)
    return path.bucket.create(path.key, data)


def atomic_write(path: RunPath, data: bytes) -> None:
    """Write a file or an object, and replace it if it exists already."""
    if isinstance(path, Path):
        local.atomic_write(path, data)
    else:
        path.bucket.replace(path.key, data)


class RunDirectory:
    """A directory of objects below `root`. Objects are created once and never changed.

    `io_statistics` counts the reads and writes that go through this object.
    """

    def __init__(self, root: str | PurePath) -> None:
        self.root = run_path(root)
        if isinstance(self.root, Path):
            self.io_statistics = IoStatistics()
            with as_user_error(self.root):
                self.root.mkdir(parents=True, exist_ok=True)
        else:
            bucket = self.root.bucket
            self.io_statistics = IoStatistics(lambda: bucket.retries)

    def exists(self, name: str) -> bool:
        """Return whether there is an object of this name."""
        return (self.root / name).exists()

    def names(self, prefix: str) -> list[str]:
        """Return the names of all objects that begin with `prefix`, sorted.

        To list a folder, pass its name with a slash at the end.
        """
        if isinstance(self.root, Path):
            return local.names(self.root, prefix)
        return list(self.root.objects(prefix))

    def create(self, name: str, data: bytes) -> bool:
        """Create an object. Return False, and change nothing, if the name exists already."""
        with self.io_statistics.timed("write", len(data)):
            return create(self.root / name, data)

    def read(self, name: str) -> bytes:
        """Return the content of an object. Raises StoreError if it is missing."""
        path = self.root / name
        try:
            with self.io_statistics.timed("read"), as_user_error(path):
                data = path.read_bytes()
        except FileNotFoundError as error:
            raise StoreError(f"{path} is missing: restore it, or use another directory") from error
        self.io_statistics.add_bytes("read", len(data))
        return data

    def move(self, name: str, target: str) -> bool:
        """Rename an object. Return False if there is no such object."""
        if isinstance(self.root, Path):
            return local.move(self.root / name, self.root / target)
        return self.root.bucket.move((self.root / name).key, (self.root / target).key)

    def remove_folder(self, name: str) -> None:
        """Remove a folder and all its objects.

        COMMITTED is removed first. If the process is killed in between, the folder is incomplete
        and does not count.
        """
        folder = self.root / name
        with as_user_error(folder):
            (folder / COMMITTED).unlink(missing_ok=True)
            if isinstance(folder, Path):
                shutil.rmtree(folder, ignore_errors=True)
            else:
                folder.rmtree()

    def write_json_once(self, name: str, value: Mapping[str, Any]) -> bool:
        """Create an object that holds JSON. Return False if the name exists already.

        Raises ValueError if a number is not finite, because JSON has no NaN.
        """
        return self.create(name, json_bytes(value))

    def read_json(self, name: str) -> dict[str, Any]:
        """Return the JSON of an object. Raises StoreError if it is missing or damaged."""
        return json_object(
            self.read(name), self.root / name, "it was changed after it was written", StoreError
        )

    def commit_folder(
        self, name: str, write: Callable[[Path], None], details: Mapping[str, Any]
    ) -> bool:
        """Call `write` with an empty local folder, and store the files that it writes there.

        COMMITTED is written last. It holds the list of files and `details`. Only one process of a
        run may call this. If the folder is committed already, return False without calling `write`.
        """
        folder = self.root / name
        if self.exists(f"{name}/{COMMITTED}"):
            return False
        with self.io_statistics.timed("write"):
            if isinstance(folder, Path):
                local.write_folder(folder, write)
                files = describe_folder(folder)
            else:
                files = _upload(folder, write)
            is_committed = create(folder / COMMITTED, json_bytes({**details, "files": files}))
        if is_committed:
            self.io_statistics.add_bytes("write", sum(file["bytes"] for file in files))
        return is_committed

    def folder(self, name: str) -> Path:
        """Return the local path of a committed folder, after a check of all its files.

        A folder in a bucket is downloaded into the cache first. Raises StoreError if a file is
        missing or differs from its entry in COMMITTED.
        """
        folder = self.root / name
        files = self.read_json(f"{name}/{COMMITTED}").get("files")
        if not isinstance(files, list):
            raise StoreError(
                f"{folder / COMMITTED} has no list of files, so another program wrote it; remove "
                f"{folder}"
            )
        with self.io_statistics.timed("read"):
            if isinstance(folder, Path):
                local_copy = folder
                for expected in files:
                    path = folder / expected["name"]
                    check_file(path, expected, shown=path, folder=folder)
            else:
                local_copy = cache_folder("buckets") / folder.bucket.name / folder.key
                for expected in files:
                    _fetch(folder, expected, local_copy / expected["name"])
        self.io_statistics.add_bytes("read", sum(file["bytes"] for file in files))
        return local_copy


def _upload(folder: "BucketPath", write: Callable[[Path], None]) -> list[dict[str, Any]]:
    """Upload the files that `write` writes into a temporary folder, and return their entries.

    The objects of an incomplete folder are replaced. A committed folder is left unchanged.
    """
    with tempfile.TemporaryDirectory(prefix="mujica-upload-") as name:
        source = Path(name)
        with as_user_error(source):
            write(source)
            files = describe_folder(source)

        objects = folder.objects()
        # If COMMITTED exists by now, another process has committed the folder first.
        if COMMITTED not in objects:
            for torn_name in objects.keys() - {file["name"] for file in files}:
                folder.bucket.delete(objects[torn_name].name)
            for file in files:
                folder.bucket.replace((folder / file["name"]).key, source / file["name"])
    return files


def _fetch(folder: "BucketPath", expected: Mapping[str, Any], path: Path) -> None:
    """Download one file of a folder to `path`, unless an undamaged copy is there already.

    `expected` is the file's entry in COMMITTED. Raises StoreError if the object differs from it.
    """
    shown = folder / expected["name"]
    if path.exists() and describe_file(path, expected["name"]) == expected:
        return
    with local.beside(path) as fetched:
        with contextlib.suppress(FileNotFoundError):
            folder.bucket.download(shown.key, fetched, expected["bytes"])
        check_file(fetched, expected, shown, folder)
        fetched.replace(path)


def local_folder(name: str | PurePath) -> Path:
    """Return the path of a local folder, or of an up-to-date local copy of a folder in a bucket.

    The copy is in the cache. Objects that changed in the bucket are downloaded again, and
    compared with their checksums. Raises UserError if the folder in the bucket has no objects.
    """
    folder = run_path(name)
    if isinstance(folder, Path):
        return folder
    copy = cache_folder("buckets") / folder.bucket.name / folder.key
    current: dict[str, Any] = {}
    for key, info in folder.objects().items():
        current[key] = {"bytes": info.bytes, "crc32c": info.crc32c}
    if not current:
        raise UserError(
            f"there is nothing in {folder}: give a folder that holds objects, in a bucket that "
            "this machine may read"
        )
    try:
        fetched: dict[str, Any] = json.loads((copy / FETCHED).read_text())
    except (FileNotFoundError, ValueError):
        fetched = {}

    # Download new and changed objects.
    for key, entry in current.items():
        target = copy / key
        has_whole_copy = target.is_file() and target.stat().st_size == entry["bytes"]
        if fetched.get(key) == entry and has_whole_copy:
            continue
        with local.beside(target) as partial:
            folder.bucket.download((folder / key).key, partial, entry["bytes"])
            partial.replace(target)

    # Remove files whose objects no longer exist.
    for key in fetched.keys() - current.keys():
        (copy / key).unlink(missing_ok=True)
    local.atomic_write(copy / FETCHED, json_bytes(current))
    return copy


def open_to_append(path: RunPath) -> "FileIO | AppendedObject":
    """Open a file or an object so that `write` appends to it."""
    if isinstance(path, Path):
        with as_user_error(path):
            return FileIO(path, "a")
    return AppendedObject(path)


class AppendedObject:
    """An object in a bucket that one process appends to.

    `write` holds bytes back for up to `HELD_SECONDS`. The first `write` after that uploads them.
    `flush` and `close` upload them at once. An upload raises StoreError if another process appends
    to the object too.
    """

    def __init__(self, path: "BucketPath") -> None:
        from mujica_jax.storage.gcs import PART

        self._path = path
        self._bucket = path.bucket
        # Remove parts that a killed process may have left behind.
        for part in self._bucket.list(f"{path.key}{PART}"):
            self._bucket.delete(part.name)
        info = self._bucket.find(path.key)
        self._generation = info.generation if info else 0
        # Bytes that wait for an upload.
        self._waiting = b""
        self._waiting_since = time.monotonic()
        # Bytes and token of the current upload. They stay here if the upload is interrupted.
        self._uploading = b""
        self._token = ""

    def write(self, data: bytes) -> int:
        """Append bytes. Upload all that wait if the oldest has waited for `HELD_SECONDS`."""
        if not self._waiting:
            self._waiting_since = time.monotonic()
        self._waiting += data
        if time.monotonic() - self._waiting_since >= HELD_SECONDS:
            self.flush()
        return len(data)

    def flush(self) -> None:
        """Upload all bytes that wait."""
        while self._uploading or self._waiting:
            # Repeat an interrupted upload with its old bytes and token, so that it counts once.
            if not self._uploading:
                self._uploading = self._waiting
                self._waiting = b""
                self._token = uuid.uuid4().hex
            generation = self._bucket.append(
                self._path.key,
                self._uploading,
                generation=self._generation,
                token=self._token,
            )
            if generation is None:
                raise StoreError(
                    f"{self._path} was changed by another process; train with only one process at "
                    f"a time in {self._path.parent}"
                )
            self._generation = generation
            self._uploading = b""

    close = flush
