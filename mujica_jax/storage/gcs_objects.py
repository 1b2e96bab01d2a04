"""The objects of a run in a bucket: what `objects.py` does on local disk, on `gs://bucket/prefix`.

A bucket has no rename and no folders. So the files of a folder are uploaded under their final names and its COMMITTED last; a folder
without it is torn and counts for nothing, and the next writer replaces its files. Libraries read models and tokenizers from folders:
those are fetched into a local cache, where every file is compared with COMMITTED each time.
"""

import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mujica_jax.errors import StoreError, UserError
from mujica_jax.runtime.cache_folders import cache_folder
from mujica_jax.storage.gcs import BUCKET_NAME, open_bucket
from mujica_jax.storage.objects import (
    COMMITTED,
    explained,
    file_description,
    folder_description,
    json_bytes,
)

if TYPE_CHECKING:
    from mujica_jax.storage.gcs_path import BucketPath


class BucketObjects:
    """Objects under one prefix of a bucket, by their names relative to it."""

    def __init__(self, root: "BucketPath") -> None:
        self.root = root
        self._bucket = open_bucket(root.bucket_name)

    def exists(self, name: str) -> bool:
        return self._bucket.find(self._whole(name)) is not None

    def names(self, prefix: str) -> list[str]:
        """All objects whose names begin so, sorted."""
        beginning = len(self._whole(""))
        return [listed.name[beginning:] for listed in self._bucket.list(self._whole(prefix))]

    def create(self, name: str, data: bytes) -> bool:
        """False, and nothing changed, where the name exists already."""
        return self._bucket.create(self._whole(name), data)

    def read(self, name: str) -> bytes:
        """Raises FileNotFoundError."""
        return self._bucket.read(self._whole(name))

    def move(self, name: str, target: str) -> bool:
        """False where there is no such object."""
        return self._bucket.move(self._whole(name), self._whole(target))

    def commit_folder(self, name: str, write: Callable[[Path], None], about: Mapping[str, Any]) -> int | None:
        """Calls `write` with an empty local folder and uploads what it left there, COMMITTED last; returns how many bytes.

        None where another process was first. One process of a run does this: where two overwrite each other's files before either
        commits, the second one raises StoreError, and readers compare every file with COMMITTED.
        """
        with tempfile.TemporaryDirectory(prefix="mujica-upload-") as place:
            folder = Path(place)
            with explained(folder):
                write(folder)
                files = folder_description(folder)
            wanted = {f"{name}/{file['name']}" for file in files}
            there = self.names(f"{name}/")
            if f"{name}/{COMMITTED}" in there:
                return None
            for torn in set(there) - wanted:
                self._bucket.delete(self._whole(torn))
            for file in files:
                self._bucket.replace(self._whole(f"{name}/{file['name']}"), folder / file["name"])
        if self.create(f"{name}/{COMMITTED}", json_bytes({**about, "files": files})):
            return sum(file["bytes"] for file in files)
        if json.loads(self.read(f"{name}/{COMMITTED}")).get("files") == files:
            return None
        raise StoreError(
            f"{self.root / name} was committed by another process at the same time, with other files; remove it, and let one process "
            f"at a time train in {self.root}"
        )

    def folder(self, name: str, files: Sequence[Mapping[str, Any]]) -> Path:
        """A local copy of the folder with the files that COMMITTED lists. Raises StoreError naming what is missing or damaged."""
        local = cache_folder("buckets") / self.root.bucket_name / self._whole(name)
        for expected in files:
            path, shown = local / expected["name"], self.root / name / expected["name"]
            with explained(path):
                path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and file_description(path, expected["name"]) == expected:
                continue
            fetched = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}")
            try:
                with explained(path):
                    self._bucket.download(self._whole(f"{name}/{expected['name']}"), fetched, expected["bytes"])
                found = file_description(fetched, expected["name"])
                if found != expected:
                    raise StoreError(
                        f"{shown} is damaged: it has {found} and COMMITTED lists {expected}; restore it or remove {self.root / name}"
                    )
                fetched.replace(path)
            except FileNotFoundError as error:
                raise StoreError(
                    f"{shown} is missing and COMMITTED lists it; restore it or remove {self.root / name}"
                ) from error
            finally:
                fetched.unlink(missing_ok=True)
        return local

    def _whole(self, name: str) -> str:
        return f"{self.root.key}/{name}" if self.root.key else name


def check_address(address: str) -> None:
    """UserError for what is no address in a bucket."""
    if not re.fullmatch(rf"gs://{BUCKET_NAME}(/.*)?", address):
        raise UserError(
            f"{address} is neither a local directory nor gs://BUCKET/NAME with a bucket's name of 3 to 63 small letters, digits, "
            "dots, dashes and underscores; choose another --run directory"
        )
