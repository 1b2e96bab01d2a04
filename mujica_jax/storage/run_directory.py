"""A run directory on local disk or in a bucket: its objects by name, its files by path, and what
both cost.

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
FETCHED = (
    ".fetched.json"  # in the cached copy of a folder: what the bucket held when it was fetched
)
HELD_SECONDS = (
    10.0  # how long lines wait for an upload; a bucket takes about one change of an object a second
)


def run_path(root: str | PurePath) -> RunPath:
    """A local path, or one in a bucket for what begins with gs://."""
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
    return (
        local.create(path, data) if isinstance(path, Path) else path.bucket.create(path.key, data)
    )


def atomic_write(path: RunPath, data: bytes) -> None:
    local.atomic_write(path, data) if isinstance(path, Path) else path.bucket.replace(
        path.key, data
    )


class RunDirectory:
    """Objects below `root`, created once and never changed. `io_statistics` sums what is written
    and read through this object.
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
        """All objects whose names begin so, sorted; `prefix` ends a folder's name with its
        slash."""
        return (
            local.names(self.root, prefix)
            if isinstance(self.root, Path)
            else list(self.root.objects(prefix))
        )

    def create(self, name: str, data: bytes) -> bool:
        """False, and nothing changed, where the name exists already."""
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
        """False where there is no such object."""
        if isinstance(self.root, Path):
            return local.move(self.root / name, self.root / target)
        return self.root.bucket.move((self.root / name).key, (self.root / target).key)

    def remove_folder(self, name: str) -> None:
        """All objects below it, COMMITTED first: what a kill leaves is torn."""
        folder = self.root / name
        with as_user_error(folder):
            (folder / COMMITTED).unlink(missing_ok=True)
            if isinstance(folder, Path):
                shutil.rmtree(folder, ignore_errors=True)
            else:
                folder.rmtree()

    def write_json_once(self, name: str, value: Mapping[str, Any]) -> bool:
        """As `create`. Numbers must be finite: JSON has no NaN."""
        return self.create(name, json_bytes(value))

    def read_json(self, name: str) -> dict[str, Any]:
        return json_object(
            self.read(name), self.root / name, "it was changed after it was written", StoreError
        )

    def commit_folder(
        self, name: str, write: Callable[[Path], None], about: Mapping[str, Any]
    ) -> bool:
        """Calls `write` with an empty local folder and keeps what it left there, with its list and
        `about` in COMMITTED, written last.

        One process of a run does this. False where the folder is committed already; then `write` is
        not called.
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
            committed = create(folder / COMMITTED, json_bytes({**about, "files": files}))
        self.io_statistics.add_bytes(
            "write", sum(file["bytes"] for file in files) if committed else 0
        )
        return committed

    def folder(self, name: str) -> Path:
        """A committed folder, on local disk, with every file as COMMITTED lists it. Raises
        StoreError naming what is wrong.
        """
        folder = self.root / name
        files = self.read_json(f"{name}/{COMMITTED}").get("files")
        if not isinstance(files, list):
            raise StoreError(
                f"{folder / COMMITTED} lists no files; another program wrote it, remove {folder}"
            )
        with self.io_statistics.timed("read"):
            if isinstance(folder, Path):
                found = folder
                for expected in files:
                    check_file(found / expected["name"], expected, found / expected["name"], folder)
            else:
                found = cache_folder("buckets") / folder.bucket.name / folder.key
                for expected in files:
                    _fetch(folder, expected, found / expected["name"])
        self.io_statistics.add_bytes("read", sum(file["bytes"] for file in files))
        return found


def _upload(folder: "BucketPath", write: Callable[[Path], None]) -> list[dict[str, Any]]:
    """What `write` leaves in an empty local folder, as objects in the place of those of a torn
    folder."""
    with tempfile.TemporaryDirectory(prefix="mujica-upload-") as place:
        with as_user_error(Path(place)):
            write(Path(place))
            files = describe_folder(Path(place))
        there = folder.objects()
        if COMMITTED not in there:  # else another process was first, and its files stay
            for torn in there.keys() - {file["name"] for file in files}:
                folder.bucket.delete(there[torn].name)
            for file in files:
                folder.bucket.replace((folder / file["name"]).key, Path(place) / file["name"])
    return files


def _fetch(folder: "BucketPath", expected: Mapping[str, Any], path: Path) -> None:
    """One file of a folder as the local file `path`, unless that is there and whole."""
    shown = folder / expected["name"]
    if path.exists() and describe_file(path, expected["name"]) == expected:
        return
    with local.beside(path) as fetched:
        with contextlib.suppress(FileNotFoundError):
            folder.bucket.download(shown.key, fetched, expected["bytes"])
        check_file(fetched, expected, shown, folder)
        fetched.replace(path)


def local_folder(name: str | PurePath) -> Path:
    """The folder of this name; of one in a bucket a copy in the cache, brought up to date: what has
    changed there is fetched and compared with its checksum. Raises UserError for one without
    objects.
    """
    folder = run_path(name)
    if isinstance(folder, Path):
        return folder
    copy = cache_folder("buckets") / folder.bucket.name / folder.key
    now = {
        key: {"bytes": info.bytes, "crc32c": info.crc32c} for key, info in folder.objects().items()
    }
    if not now:
        raise UserError(
            f"there is nothing in {folder}: give the name of a folder in a bucket that this "
            "machine reads"
        )
    try:
        before: dict[str, Any] = json.loads((copy / FETCHED).read_text())
    except (FileNotFoundError, ValueError):
        before = {}
    for key, info in now.items():
        target = copy / key
        if before.get(key) == info and target.is_file() and target.stat().st_size == info["bytes"]:
            continue
        with local.beside(target) as partial:
            folder.bucket.download((folder / key).key, partial, info["bytes"])
            partial.replace(target)
    for key in before.keys() - now.keys():
        (copy / key).unlink(missing_ok=True)
    local.atomic_write(copy / FETCHED, json_bytes(now))
    return copy


def open_to_append(path: RunPath) -> "FileIO | AppendedObject":
    """A file whose `write` adds to its end."""
    if isinstance(path, Path):
        with as_user_error(path):
            return FileIO(path, "a")
    return AppendedObject(path)


class AppendedObject:
    """An object that one process appends to. What it writes is held for `HELD_SECONDS` at most, and
    uploaded by the next `write`, `flush` or `close` after that. Raises StoreError where another
    process appends to it too.
    """

    def __init__(self, path: "BucketPath") -> None:
        from mujica_jax.storage.gcs import PART

        self._path, self._bucket = path, path.bucket
        for part in self._bucket.list(f"{path.key}{PART}"):  # a killed process left them
            self._bucket.delete(part.name)
        found = self._bucket.find(path.key)
        self._generation = found.generation if found else 0
        self._held = self._sent = b""
        self._held_since, self._token = time.monotonic(), ""

    def write(self, data: bytes) -> int:
        if not self._held:
            self._held_since = time.monotonic()
        self._held += data
        if time.monotonic() - self._held_since >= HELD_SECONDS:
            self.flush()
        return len(data)

    def flush(self) -> None:
        while self._sent or self._held:
            if not self._sent:  # else an upload was interrupted: it is repeated as the same one
                self._sent, self._held, self._token = self._held, b"", uuid.uuid4().hex
            generation = self._bucket.append(
                self._path.key, self._sent, self._generation, self._token
            )
            if generation is None:
                raise StoreError(
                    f"{self._path} was changed by another process; let one process at a time train "
                    f"in {self._path.parent}"
                )
            self._generation, self._sent = generation, b""

    close = flush
