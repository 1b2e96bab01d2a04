"""A run directory on local disk or in a bucket.

It gives objects by name and files by path, and counts what both cost.

`local.py` is the disk, `gcs.py` and `gcs_path.py` are `gs://bucket/prefix`. Code above asks here
and knows no difference.

A folder (a policy, a tokenizer) counts once its COMMITTED is there, which is written last; without
it the folder is torn, and the next writer replaces its files. Libraries read folders from local
disk only: those of a bucket are fetched into a cache, where every file is compared with COMMITTED
each time.
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
    RunPath = PurePath  # what both are; importing the other one takes a third of a second

BUCKET_NAME = r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]"
# In the cached copy of a folder: what the bucket held when it was fetched.
FETCHED = ".fetched.json"
# How long lines wait for an upload; a bucket takes about one change of an object a second.
HELD_SECONDS = 10.0


def run_path(root: str | PurePath) -> RunPath:
    """Return a local path, or one in a bucket if `root` begins with gs://."""
    if not isinstance(root, str):
        return root  # pyright: ignore[reportReturnType] - one of the two
    if "://" not in root:
        return Path(root)
    if not re.fullmatch(rf"gs://{BUCKET_NAME}(/.*)?", root):
        raise UserError(
            f"{root} is neither a local directory nor gs://BUCKET/NAME with a bucket's name of 3 "
            "to 63 small letters, digits, dots, dashes and underscores; choose another --run "
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
    """Write a file or an object that may exist already."""
    if isinstance(path, Path):
        local.atomic_write(path, data)
    else:
        path.bucket.replace(path.key, data)


class RunDirectory:
    """Objects below `root`, created once and never changed.

    `io_statistics` sums what is written and read through this object.
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
        return (self.root / name).exists()

    def names(self, prefix: str) -> list[str]:
        """Return all objects whose names begin with `prefix`, sorted.

        `prefix` ends a folder's name with its slash.
        """
        if isinstance(self.root, Path):
            return local.names(self.root, prefix)
        return list(self.root.objects(prefix))

    def create(self, name: str, data: bytes) -> bool:
        """Create an object. Return False, and change nothing, if the name exists already."""
        with self.io_statistics.timed("write", len(data)):
            return create(self.root / name, data)

    def read(self, name: str) -> bytes:
        path = self.root / name
        try:
            with self.io_statistics.timed("read"), as_user_error(path):
                data = path.read_bytes()
        except FileNotFoundError as error:
            raise StoreError(f"{path} is missing") from error
        self.io_statistics.add_bytes("read", len(data))
        return data

    def move(self, name: str, target: str) -> bool:
        """Give an object another name. Return False if there is no such object."""
        if isinstance(self.root, Path):
            return local.move(self.root / name, self.root / target)
        return self.root.bucket.move((self.root / name).key, (self.root / target).key)

    def remove_folder(self, name: str) -> None:
        """Remove a folder's objects, COMMITTED first: a kill in between leaves a torn folder."""
        folder = self.root / name
        with as_user_error(folder):
            (folder / COMMITTED).unlink(missing_ok=True)
            if isinstance(folder, Path):
                shutil.rmtree(folder, ignore_errors=True)
            else:
                folder.rmtree()

    def write_json_once(self, name: str, value: Mapping[str, Any]) -> bool:
        """Create a JSON object, as `create` does. Numbers must be finite: JSON has no NaN."""
        return self.create(name, json_bytes(value))

    def read_json(self, name: str) -> dict[str, Any]:
        return json_object(
            self.read(name), self.root / name, "it was changed after it was written", StoreError
        )

    def commit_folder(
        self, name: str, write: Callable[[Path], None], details: Mapping[str, Any]
    ) -> bool:
        """Call `write` with an empty local folder, and store the files that it writes there.

        COMMITTED, written last, has the list of files and `details`. One process of a run does
        this. Return False, without calling `write`, if the folder is committed already.
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
        """Return a committed folder on local disk, with every file as COMMITTED lists it.

        Raises StoreError naming what is wrong.
        """
        folder = self.root / name
        files = self.read_json(f"{name}/{COMMITTED}").get("files")
        if not isinstance(files, list):
            raise StoreError(
                f"{folder / COMMITTED} lists no files; another program wrote it, remove {folder}"
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
    """Upload what `write` leaves in an empty local folder, and return its entries.

    The objects replace those of a torn folder. A committed folder stays as it is.
    """
    with tempfile.TemporaryDirectory(prefix="mujica-upload-") as name:
        source = Path(name)
        with as_user_error(source):
            write(source)
            files = describe_folder(source)

        objects = folder.objects()
        if COMMITTED not in objects:  # otherwise another process was first
            for torn_name in objects.keys() - {file["name"] for file in files}:
                folder.bucket.delete(objects[torn_name].name)
            for file in files:
                folder.bucket.replace((folder / file["name"]).key, source / file["name"])
    return files


def _fetch(folder: "BucketPath", expected: Mapping[str, Any], path: Path) -> None:
    """Download one file of a folder to `path`, unless a whole copy is there."""
    shown = folder / expected["name"]
    if path.exists() and describe_file(path, expected["name"]) == expected:
        return
    with local.beside(path) as fetched:
        with contextlib.suppress(FileNotFoundError):
            folder.bucket.download(shown.key, fetched, expected["bytes"])
        check_file(fetched, expected, shown, folder)
        fetched.replace(path)


def local_folder(name: str | PurePath) -> Path:
    """Return a local folder, or an up-to-date copy in the cache of a folder in a bucket.

    Objects that changed in the bucket are fetched and compared with their checksums. Raises
    UserError for a folder without objects.
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
            f"there is nothing in {folder}: give the name of a folder in a bucket that this "
            "machine reads"
        )
    try:
        fetched: dict[str, Any] = json.loads((copy / FETCHED).read_text())
    except (FileNotFoundError, ValueError):
        fetched = {}

    # Fetch what is new or changed.
    for key, entry in current.items():
        target = copy / key
        has_whole_copy = target.is_file() and target.stat().st_size == entry["bytes"]
        if fetched.get(key) == entry and has_whole_copy:
            continue
        with local.beside(target) as partial:
            folder.bucket.download((folder / key).key, partial, entry["bytes"])
            partial.replace(target)

    # Remove what is gone.
    for key in fetched.keys() - current.keys():
        (copy / key).unlink(missing_ok=True)
    local.atomic_write(copy / FETCHED, json_bytes(current))
    return copy


def open_to_append(path: RunPath) -> "FileIO | AppendedObject":
    """Return a file whose `write` adds to its end."""
    if isinstance(path, Path):
        with as_user_error(path):
            return FileIO(path, "a")
    return AppendedObject(path)


class AppendedObject:
    """An object that one process appends to.

    What it writes is held for `HELD_SECONDS` at most, and uploaded by the next `write`, `flush` or
    `close` after that. Raises StoreError if another process appends to it too.
    """

    def __init__(self, path: "BucketPath") -> None:
        from mujica_jax.storage.gcs import PART

        self._path = path
        self._bucket = path.bucket
        # A killed process may have left parts.
        for part in self._bucket.list(f"{path.key}{PART}"):
            self._bucket.delete(part.name)
        info = self._bucket.find(path.key)
        self._generation = info.generation if info else 0
        self._waiting = b""  # bytes that no upload has taken yet
        self._waiting_since = time.monotonic()
        self._uploading = b""  # bytes of an upload that may have been interrupted
        self._token = ""  # of that upload

    def write(self, data: bytes) -> int:
        """Add bytes to those that wait. Upload them if the first one has waited long enough."""
        if not self._waiting:
            self._waiting_since = time.monotonic()
        self._waiting += data
        if time.monotonic() - self._waiting_since >= HELD_SECONDS:
            self.flush()
        return len(data)

    def flush(self) -> None:
        """Upload all bytes that wait."""
        while self._uploading or self._waiting:
            # An upload that was interrupted is repeated as the same one.
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
                    f"{self._path} was changed by another process; let one process at a time train "
                    f"in {self._path.parent}"
                )
            self._generation = generation
            self._uploading = b""

    close = flush
