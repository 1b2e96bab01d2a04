"""Files on local disk: written whole or not at all, and errors of the disk in one sentence.

The bytes of a file go to a temporary file beside it, reach the disk, and get the final name: by
`link`, which fails where the name is taken (`create`), or by `rename` (`atomic_write`). A reader
sees a whole file or none, and a killed writer leaves nothing that counts.

Some file systems have no hard links (gcsfuse, SMB, 9p). There `create` renames while it holds a
lock on the folder. So exactly one of several writers on one host wins. Writers on two hosts may
both believe that they won. Each file of a run is a function of its seed, so both have written the
same.
"""

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath

from mujica_jax.errors import UserError

ADVICE = {  # what the user can do about an error of the operating system
    errno.ENOSPC: "no space is left there; free some or choose another --run directory",
    errno.EDQUOT: "the disk quota is used up; free some space or choose another --run directory",
    errno.EFBIG: (
        "a file may not grow that large there; raise the limit (ulimit -f) or choose another --run "
        "directory"
    ),
    errno.EROFS: "the file system is read-only; choose another --run directory",
    errno.EACCES: "permission is denied; choose a --run directory that you may write to",
    errno.EPERM: "the file system does not allow it; choose another --run directory",
    errno.ENOTDIR: "a file stands where a directory is needed; choose another --run directory",
    errno.EEXIST: "a file stands where a directory is needed; choose another --run directory",
}
# What `link` answers on a file system without hard links.
NO_HARD_LINKS = (
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.ENOTSUP,
    errno.EPERM,
    errno.EMLINK,
    errno.EINVAL,
)
# What `fsync` of a directory, or a lock, answers where the file system has none.
NOT_SUPPORTED = (
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.ENOTSUP,
    errno.EINVAL,
    errno.EBADF,
    errno.ENOLCK,
)
LOCK = ".lock"
# Errors that only a disk can cause.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


def create(path: Path, data: bytes) -> bool:
    """Write a new file. Return False, and change nothing, where the file exists already."""
    with _written_beside(path, data) as temporary:
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in NO_HARD_LINKS:
                raise
            return _rename_if_free(temporary, path)
    return True


def _rename_if_free(temporary: Path, path: Path) -> bool:
    """Give a file its final name unless that is taken. Return whether it was free."""
    with _locked(path.parent):
        if path.exists():
            return False
        os.rename(temporary, path)
    return True


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a folder's lock, if the file system has locks."""
    with open(folder / LOCK, "ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in NOT_SUPPORTED:
                raise
        yield


def atomic_write(path: Path, data: bytes) -> None:
    """Write a file that may exist already. Its old content stays until the new one is whole."""
    with _written_beside(path, data) as temporary:
        os.replace(temporary, path)


def write_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Call `write` with the empty folder and bring what it left there to the disk.

    What was in the folder before is removed.
    """
    with as_user_error(folder):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            write(folder)
            for path in (*folder.rglob("*"), folder, folder.parent):
                sync(path)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise


def names(root: Path, prefix: str) -> list[str]:
    """Return the files below `root` whose relative names begin with `prefix`, sorted.

    Temporary files are left out.
    """
    folder = root / prefix.rpartition("/")[0]
    names = []
    for path in folder.rglob("*"):
        if not path.is_file():
            continue
        name = str(path.relative_to(root))
        is_temporary = "/." in f"/{name}"
        if name.startswith(prefix) and not is_temporary:
            names.append(name)
    return sorted(names)


def visible_files(folder: Path, pattern: str) -> list[Path]:
    """Return the files in `folder` that match, sorted, without hidden ones.

    macOS writes a hidden `._NAME` beside each file of an archive, which holds none of the file's
    content.
    """
    return sorted(path for path in folder.glob(pattern) if not path.name.startswith("."))


def move(path: Path, target: Path) -> bool:
    """Rename a file into an existing folder. Return False if there is no such file."""
    with as_user_error(path):
        try:
            os.rename(path, target)
        except FileNotFoundError:
            return False
        sync(path.parent)
    return True


def sync(path: Path) -> None:
    """Make a file's bytes, or a directory's names, survive a loss of power.

    A file system that cannot do this is left as it is.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NOT_SUPPORTED:
            raise
    finally:
        os.close(descriptor)


def require_space(path: Path, needed_bytes: int) -> None:
    """Raise UserError if fewer bytes are free than needed.

    Call it before a library writes that would report a full disk from every thread of its own.
    """
    free_bytes = shutil.disk_usage(path).free
    if free_bytes < needed_bytes:
        raise UserError(
            f"cannot write into {path}: {needed_bytes:,} bytes are needed and {free_bytes:,} are "
            "free; free some or choose another --run directory"
        )


@contextlib.contextmanager
def beside(path: Path) -> Iterator[Path]:
    """Yield the name of a temporary file beside `path`, which the block writes and renames."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}")
    with as_user_error(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def as_user_error(path: PurePath) -> Iterator[None]:
    """Turn the error of a full, read-only or forbidden disk into one sentence for the user."""
    try:
        yield
    except Exception as error:
        code = error.errno if isinstance(error, OSError) else _code_in_words(error)
        if code not in ADVICE:
            raise
        raise UserError(f"cannot use {path}: {ADVICE[code]}") from error


def _code_in_words(error: Exception) -> int | None:
    """Return the disk error whose words stand in an error's text.

    Libraries in Rust and C++ (safetensors, tokenizers, TensorStore) raise errors of their own, with
    the system's words in them.
    """
    return next((code for code in DISK_ERRORS if os.strerror(code) in str(error)), None)


@contextlib.contextmanager
def _written_beside(path: Path, data: bytes) -> Iterator[Path]:
    """Yield a temporary file with the bytes, on the disk, to which the block gives its name."""
    with as_user_error(path):
        with beside(path) as temporary:
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            yield temporary
        sync(path.parent)
