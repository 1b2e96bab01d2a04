"""Files that are created once: the bus between sampling and learning, on local disk. `store.py` knows what the names mean.

The bytes of an object go to a temporary file beside it, reach the disk, and are linked to the final name, which fails where that name
exists. So a reader sees a whole object or none, a killed writer leaves nothing that counts, and of two writers of one name the second
one's bytes are dropped.
"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from mujica_jax.errors import StoreError, UserError

ADVICE = {  # what the user can do about an error of the operating system
    errno.ENOSPC: "no space is left there; free some or choose another --run directory",
    errno.EDQUOT: "the disk quota is used up; free some space or choose another --run directory",
    errno.EFBIG: "a file may not grow that large there; raise the limit (ulimit -f) or choose another --run directory",
    errno.EROFS: "the file system is read-only; choose another --run directory",
    errno.EACCES: "permission is denied; choose a --run directory that you may write to",
    errno.EPERM: "the file system does not allow it; choose another --run directory",
    errno.ENOTDIR: "a file stands where a directory is needed; choose another --run directory",
    errno.EEXIST: "a file stands where a directory is needed; choose another --run directory",
}
COMMITTED = "COMMITTED"  # the list of a folder's files, written last
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)  # those that only a disk can cause


class Objects:
    """Objects under one directory, by their names relative to it. `bucket_objects.py` has the same methods."""

    def __init__(self, root: Path) -> None:
        self.root = root
        with explained(self.root):
            self.root.mkdir(parents=True, exist_ok=True)

    def exists(self, name: str) -> bool:
        return (self.root / name).exists()

    def names(self, prefix: str) -> list[str]:
        """All objects whose names begin so, sorted; `prefix` ends a folder's name with its slash. Partial writes have no names."""
        folder = self.root / prefix.rpartition("/")[0]
        found = (str(path.relative_to(self.root)) for path in folder.rglob("*") if path.is_file())
        return sorted(name for name in found if name.startswith(prefix) and "/." not in f"/{name}")

    def create(self, name: str, data: bytes) -> bool:
        """False, and nothing changed, where the name exists already."""
        path = self.root / name
        temporary = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}")
        with explained(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with open(temporary, "xb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.link(temporary, path)
            except FileExistsError:
                return False
            finally:
                temporary.unlink(missing_ok=True)
            sync(path.parent)
        return True

    def read(self, name: str) -> bytes:
        """Raises FileNotFoundError."""
        with explained(self.root / name):
            return (self.root / name).read_bytes()

    def move(self, name: str, target: str) -> bool:
        """False where there is no such object. The folder of `target` exists."""
        source = self.root / name
        with explained(source):
            try:
                os.rename(source, self.root / target)
            except FileNotFoundError:
                return False
            sync(source.parent)
        return True

    def commit_folder(self, name: str, write: Callable[[Path], None], about: Mapping[str, Any]) -> int:
        """Calls `write` with an empty folder and gives what it left there its name: whole, with its list in COMMITTED, or not at all.

        `about` stands in COMMITTED beside the files. What is returned is how many bytes they have.
        """
        target = self.root / name
        partial = target.with_name(f".partial-{target.name}")  # one name: what a killed writer left is removed here
        with explained(target):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            try:
                write(partial)
                files = folder_description(partial)
                for path in (*partial.rglob("*"), partial):
                    sync(path)
                self.create(str((partial / COMMITTED).relative_to(self.root)), json_bytes({**about, "files": files}))
                os.rename(partial, target)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
            sync(target.parent)
        return sum(file["bytes"] for file in files)

    def folder(self, name: str, files: Sequence[Mapping[str, Any]]) -> Path:
        """The folder, its files compared with what COMMITTED lists. Raises StoreError naming what is wrong."""
        directory = self.root / name
        for expected in files:
            path = directory / expected["name"]
            if not path.exists():
                raise StoreError(f"{path} is missing and COMMITTED lists it; restore it or remove {directory}")
            if (found := file_description(path, expected["name"])) != expected:
                raise StoreError(
                    f"{path} is damaged: it has {found} and COMMITTED lists {expected}; restore it or remove {directory}"
                )
        return directory


@contextlib.contextmanager
def explained(path: PurePath) -> Iterator[None]:
    """Turns a full, read-only or forbidden disk into one sentence for the user."""
    try:
        yield
    except Exception as error:
        code = error.errno if isinstance(error, OSError) else _code_in_words(error)
        if code not in ADVICE:
            raise
        raise UserError(f"cannot use {path}: {ADVICE[code]}") from error


def require_space(path: Path, needed_bytes: int) -> None:
    """Refuses before a library begins to write that would report a full disk from every thread of its own."""
    free_bytes = shutil.disk_usage(path).free
    if free_bytes < needed_bytes:
        raise UserError(
            f"cannot write into {path}: {needed_bytes:,} bytes are needed and {free_bytes:,} are free; "
            "free some or choose another --run directory"
        )


def _code_in_words(error: Exception) -> int | None:
    """Libraries in Rust and C++ (safetensors, tokenizers, TensorStore) raise errors of their own, with the system's words in them."""
    return next((code for code in DISK_ERRORS if os.strerror(code) in str(error)), None)


def sync(path: Path) -> None:
    """Makes a file's bytes, or a directory's names, survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_over(path: Path, data: bytes) -> None:
    """Writes a file that may exist already: its old content stays until the new one is whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_bytes(data)
            sync(temporary)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def file_description(path: Path, name: str) -> dict[str, Any]:
    """A file as a manifest lists it."""
    with open(path, "rb") as file:
        return {"name": name, "bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def folder_description(folder: Path) -> list[dict[str, Any]]:
    """All files below a folder as a manifest lists them."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return [file_description(path, str(path.relative_to(folder))) for path in paths]


def json_bytes(value: Mapping[str, Any]) -> bytes:
    """Numbers must be finite: JSON has no NaN."""
    return (json.dumps(value, indent=2, allow_nan=False) + "\n").encode()
