"""A run directory on local disk or in a bucket: its objects by name, its files by path, and what both cost.

`objects.py` is the local disk and `bucket_objects.py` is `gs://bucket/prefix`. Everything above asks here and knows no difference.
"""

import json
import time
import uuid
from collections.abc import Callable, Mapping
from io import FileIO
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from mujica_jax.errors import StoreError
from mujica_jax.storage import objects
from mujica_jax.storage.io_statistics import Costs
from mujica_jax.storage.objects import COMMITTED, Objects, explained, json_bytes

if TYPE_CHECKING:
    from mujica_jax.storage.gcs_path import BucketPath

    RunPath = Path | BucketPath
else:
    RunPath = PurePath  # what both are; importing the other one takes a third of a second

HELD_SECONDS = 10.0  # how long lines wait for an upload; a bucket takes about one change of an object a second


def run_path(root: str | PurePath) -> RunPath:
    """A local path, or one in a bucket for what begins with gs://."""
    if not isinstance(root, str):
        return root  # pyright: ignore[reportReturnType] - one of the two
    if "://" not in root:
        return Path(root)
    from mujica_jax.storage.gcs_objects import check_address
    from mujica_jax.storage.gcs_path import BucketPath

    check_address(root)
    return BucketPath(root.rstrip("/"))


class RunDirectory:
    """Objects below `root`, created once and never changed. `costs` sums what is written and read through this object."""

    def __init__(self, root: str | PurePath) -> None:
        self.root = run_path(root)
        if isinstance(self.root, Path):
            self._objects = Objects(self.root)
            self.costs = Costs()
        else:
            from mujica_jax.storage.gcs import open_bucket
            from mujica_jax.storage.gcs_objects import BucketObjects

            self._objects = BucketObjects(self.root)
            bucket = open_bucket(self.root.bucket_name)
            self.costs = Costs(lambda: bucket.repeated)

    def exists(self, name: str) -> bool:
        return self._objects.exists(name)

    def names(self, prefix: str) -> list[str]:
        """All objects whose names begin so, sorted."""
        return self._objects.names(prefix)

    def create(self, name: str, data: bytes) -> bool:
        """False, and nothing changed, where the name exists already."""
        with self.costs.writing(len(data)):
            return self._objects.create(name, data)

    def read(self, name: str) -> bytes:
        try:
            with self.costs.reading():
                data = self._objects.read(name)
        except FileNotFoundError as error:
            raise StoreError(f"{self.root / name} is missing") from error
        self.costs.add_bytes(read=len(data))
        return data

    def move(self, name: str, target: str) -> bool:
        """False where there is no such object."""
        return self._objects.move(name, target)

    def write_json_once(self, name: str, value: Mapping[str, Any]) -> bool:
        """As `create`. Numbers must be finite: JSON has no NaN."""
        return self.create(name, json_bytes(value))

    def read_json(self, name: str) -> dict[str, Any]:
        try:
            value = json.loads(self.read(name))
        except ValueError as error:
            raise StoreError(
                f"{self.root / name} is not JSON ({error}); it was changed after it was written"
            ) from error
        if not isinstance(value, dict):
            raise StoreError(f"{self.root / name} holds no JSON object; it was changed after it was written")
        return value

    def commit_folder(self, name: str, write: Callable[[Path], None], about: Mapping[str, Any]) -> bool:
        """Calls `write` with an empty local folder and keeps what it left there, with its list and `about` in COMMITTED, written last.

        One process of a run does this. False where the folder is committed already; then `write` is not called.
        """
        if self.exists(f"{name}/{COMMITTED}"):
            return False
        with self.costs.writing():
            written = self._objects.commit_folder(name, write, about)
        self.costs.add_bytes(written=written or 0)
        return written is not None

    def folder(self, name: str) -> Path:
        """A committed folder, on local disk, with every file as COMMITTED lists it. Raises StoreError naming what is wrong."""
        files = self.read_json(f"{name}/{COMMITTED}").get("files")
        if not isinstance(files, list):
            raise StoreError(
                f"{self.root / name / COMMITTED} lists no files; another program wrote it, remove {self.root / name}"
            )
        with self.costs.reading():
            folder = self._objects.folder(name, files)
        self.costs.add_bytes(read=sum(file["bytes"] for file in files))
        return folder


def write_over(path: RunPath, data: bytes) -> None:
    """Writes a file that may exist already: its old content stays until the new one is whole."""
    if isinstance(path, Path):
        objects.write_over(path, data)
    else:
        path.write_over(data)


def open_to_append(path: RunPath) -> "FileIO | AppendedObject":
    """A file whose `write` adds to its end."""
    if isinstance(path, Path):
        with explained(path):
            return FileIO(path, "a")
    return AppendedObject(path)


class AppendedObject:
    """An object that one process appends to. What it writes is held for `HELD_SECONDS` at most, and uploaded by the next `write`,
    `flush` or `close` after that. Raises StoreError where another process appends to it too.
    """

    def __init__(self, path: "BucketPath") -> None:
        from mujica_jax.storage.gcs import PART, open_bucket

        self._path, self._bucket = path, open_bucket(path.bucket_name)
        for part in self._bucket.list(f"{path.key}{PART}"):  # a killed process left them
            self._bucket.delete(part.name)
        found = self._bucket.find(path.key)
        self._generation = found.generation if found else 0
        self._held = b""
        self._held_since = time.monotonic()
        self._sent: tuple[bytes, str] | None = None  # with its token: an interrupted upload is repeated as the same one

    def write(self, data: bytes) -> int:
        if not self._held:
            self._held_since = time.monotonic()
        self._held += data
        if time.monotonic() - self._held_since >= HELD_SECONDS:
            self.flush()
        return len(data)

    def flush(self) -> None:
        while self._sent or self._held:
            if self._sent is None:
                self._sent, self._held = (self._held, uuid.uuid4().hex), b""
            data, token = self._sent
            generation = self._bucket.append(self._path.key, data, self._generation, token)
            if generation is None:
                raise StoreError(
                    f"{self._path} was changed by another process; let one process at a time train in {self._path.parent}"
                )
            self._generation, self._sent = generation, None

    def close(self) -> None:
        self.flush()
