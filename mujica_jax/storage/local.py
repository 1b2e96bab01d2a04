"""Write files on local disk atomically, and explain disk errors to the user.

A file is first written to a temporary file in the same folder and flushed to disk. Then it gets its
final name. `create` uses `link`, which fails if the name is taken. `atomic_write` uses `rename`,
which replaces an old file. A reader sees a complete file or none. A killed writer leaves at most a
temporary file, which readers ignore.

Some file systems have no hard links (gcsfuse, SMB, 9p). There, `create` locks the folder and
renames the file. With several writers on one host, exactly one wins. Writers on two hosts may both
believe that they won. This does no harm: each file of a run is determined by its seed, so both have
written the same content.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath

from mujica_jax.errors import UserError

# For each error of the operating system: what is wrong, and what the user can do.
ADVICE = {
    errno.ENOSPC: "no space is left there; free some space or choose another --run directory",
    errno.EDQUOT: "the disk quota is used up; free some space or choose another --run directory",
    errno.EFBIG: (
        "a file may not grow that large there; raise the limit (ulimit -f) or choose another --run "
        "directory"
    ),
    errno.EROFS: "the file system is read-only; choose another --run directory",
    errno.EACCES: "permission is denied; choose a --run directory that you may write to",
    errno.EPERM: "the file system does not allow it; choose another --run directory",
    errno.ENOTDIR: "there is a file where a directory is needed; choose another --run directory",
    errno.EEXIST: "there is a file where a directory is needed; choose another --run directory",
}
# Errors of `link` on a file system without hard links.
NO_HARD_LINKS = (
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.ENOTSUP,
    errno.EPERM,
    errno.EMLINK,
    errno.EINVAL,
)
# Errors of `fsync` on a directory, or of a lock, if the file system does not support it.
NOT_SUPPORTED = (
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.ENOTSUP,
    errno.EINVAL,
    errno.EBADF,
    errno.ENOLCK,
)
# Permissions of a private temporary file.
PRIVATE = 0o600
# Name of the file in a folder that writers lock.
LOCK = ".lock"
# Errors that only a disk can cause. They are recognised by their text as well.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


def create(path: Path, data: bytes) -> bool:
    """Write a new file. Return False, and change nothing, if the file exists already."""
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
    """Rename a file unless its new name is taken. Return whether it was renamed."""
    with _locked(path.parent):
        if path.exists():
            return False
        os.rename(temporary, path)
    return True


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, if the file system supports locks."""
    with open(folder / LOCK, "ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in NOT_SUPPORTED:
                raise
        yield


def atomic_write(path: Path, data: bytes) -> None:
    """Write a file, or replace it. The old content stays until the new content is complete."""
    with _written_beside(path, data) as temporary:
        os.replace(temporary, path)


def write_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Empty a folder, call `write` with it, and flush the written files to disk.

    The old content of the folder is removed first. If `write` fails, the folder is removed.
    """
    with as_user_error(folder):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            write(folder)
            share_files(folder)
            for path in (*folder.rglob("*"), folder, folder.parent):
                sync(path)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise


def share_files(folder: Path) -> None:
    """Give private files in a folder the permissions of new files, which follow from the umask.

    Some libraries write a file under a temporary name first, and then only its owner may read it.
    safetensors is one of them.
    """
    with beside(folder / "permissions") as probe, open(probe, "xb") as file:
        usual_permissions = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    for path in folder.rglob("*"):
        if path.is_file() and stat.S_IMODE(path.stat().st_mode) == PRIVATE:
            path.chmod(usual_permissions)


def names(root: Path, prefix: str) -> list[str]:
    """Return the paths, relative to `root`, of the files that begin with `prefix`, sorted.

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
    """Return the files in `folder` that match `pattern`, sorted, without hidden files.

    Archives made on macOS hold a hidden file `._NAME` for each file NAME. It has only metadata.
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
    """Flush a file's content, or a directory's list of names, to disk.

    Do nothing if the file system does not support it.
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
    """Raise UserError if the disk of `path` has fewer free bytes than needed.

    Call this before a library writes with many threads, because each of them would report a full
    disk on its own.
    """
    free_bytes = shutil.disk_usage(path).free
    if free_bytes < needed_bytes:
        raise UserError(
            f"cannot write into {path}: {needed_bytes:,} bytes are needed, but only "
            f"{free_bytes:,} are free; free some space or choose another --run directory"
        )


@contextlib.contextmanager
def beside(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file beside `path`.

    The body of the `with` writes the file and renames it. The temporary file is removed at the end.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}")
    with as_user_error(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def as_user_error(path: PurePath) -> Iterator[None]:
    """Raise the error of a full, read-only or forbidden disk as a UserError with advice."""
    try:
        yield
    except Exception as error:
        code = error.errno if isinstance(error, OSError) else _code_in_words(error)
        if code not in ADVICE:
            raise
        raise UserError(f"cannot use {path}: {ADVICE[code]}") from error


def _code_in_words(error: Exception) -> int | None:
    """Return the number (errno) of the disk error that an exception's text mentions, or None.

    Libraries in Rust and C++ (safetensors, tokenizers, TensorStore) raise exceptions of their own.
    Their text contains the operating system's message.
    """
    return next((code for code in DISK_ERRORS if os.strerror(code) in str(error)), None)


@contextlib.contextmanager
def _written_beside(path: Path, data: bytes) -> Iterator[Path]:
    """Yield a temporary file that holds `data`, flushed to disk.

    The body of the `with` gives it the name `path`.
    """
    with as_user_error(path):
        with beside(path) as temporary:
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            yield temporary
        sync(path.parent)
