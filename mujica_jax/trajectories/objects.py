"""Files that are created once: the bus between sampling and learning, on local disk. `store.py` knows what the names mean.

The bytes of an object go to a temporary file beside it, reach the disk, and are linked to the final name, which fails where that name
exists. So a reader sees a whole object or none, a killed writer leaves nothing that counts, and of two writers of one name the second
one's bytes are dropped.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
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
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)  # those that only a disk can cause


class Objects:
    """Objects under one directory, by their names relative to it."""

    def __init__(self, root: str | Path) -> None:
        if "://" in str(root):
            raise UserError(
                f"{root} is no local directory, and runs are kept on local disks; choose another --run directory"
            )
        self.root = Path(root)
        with explained(self.root):
            self.root.mkdir(parents=True, exist_ok=True)

    def exists(self, name: str) -> bool:
        return (self.root / name).exists()

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
        path = self.root / name
        with explained(path):
            try:
                return path.read_bytes()
            except FileNotFoundError as error:
                raise StoreError(f"{path} is missing") from error

    def write_json_once(self, name: str, value: Mapping[str, Any]) -> bool:
        """As `create`. Numbers must be finite: JSON has no NaN."""
        return self.create(name, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())

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

    def append_line(self, name: str, values: Mapping[str, Any]) -> None:
        """One JSON object on a line of its own.

        A number that is not finite becomes null. A line that a killed writer left unfinished is cut off first.
        """
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in values.items()
        }
        line = (json.dumps(finite, allow_nan=False) + "\n").encode()
        path = self.root / name
        with explained(path), open(path, "a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
            if file.read(1) not in (b"", b"\n"):
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
            file.write(line)

    def read_lines(self, name: str) -> list[dict[str, Any]]:
        """What `append_line` wrote, without an unfinished last line; empty where there is no such file."""
        if not self.exists(name):
            return []
        *lines, _unfinished = self.read(name).split(b"\n")
        try:
            return [json.loads(line) for line in lines]
        except ValueError as error:
            raise StoreError(f"{self.root / name} has a line that is not JSON ({error}); remove that line") from error


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
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
