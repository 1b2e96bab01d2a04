"""The directory of an index: what is in it, when it counts, and how damage is found.

    INDEX/plan.json        what is being built, of what; written first, so that a killed build is
                           taken up again
    INDEX/passages.arrow   the corpus
    INDEX/...              what the kind of index needs
    INDEX/manifest.json    written last, by rename: every file with its size and checksum, and the
                           version of the whole

A directory without a manifest is half-built and never opened. Opening compares every file with its
checksum, about a second a gigabyte. A damaged one is never mended in place: it is removed and built
again.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Protocol

from mujica_jax.errors import UserError
from mujica_jax.storage import local
from mujica_jax.storage.manifest import describe_file, sha256_of

PLAN = "plan.json"
MANIFEST = "manifest.json"
LOCK = ".lock"
FORMAT = 1  # of the directory; another one is refused
# The errors of a disk that is full. numpy, RocksDB and ScaNN give no number (None): what they say
# is all that is known.
FULL_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, None)
# Where an embedder is found again. What it is, its version says.
LOCATION_FIELDS = ("embedder", "prefixes")
RECALL = "recall"  # measured beside exact search, when the index was built
# Two indexes whose manifests differ in these alone are one version.
NOT_CONTENT = (*LOCATION_FIELDS, "seconds", RECALL)
AUTO = "auto"  # the kind of a dense index until its size is known
AUTO_KINDS = ("exact", "scann")  # one of which the size chooses; plan.json then has this one
ABOUT_CONTENT = ("format", "version", "files")


def rebuild_advice(folder: str | Path) -> str:
    """Return what to do about a damaged index.

    The directory has to go first: a build would believe what its files say.
    """
    return f"remove {folder} and build the index again"


def read_manifest(folder: str | Path, *, check: bool = True) -> dict[str, Any]:
    """Return the manifest, after comparing every file with its checksum unless `check` is false.

    Raises UserError that names what is missing or damaged.
    """
    if "://" in str(folder):
        raise UserError(
            f"an index is opened on local disk and this one is {folder}: copy it into a directory "
            "and give that"
        )
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(
            f"there is no index {folder}: `python -m mujica_jax.index build --help` says how to "
            "make it"
        )
    if not (folder / MANIFEST).exists():
        state = "is half-built" if (folder / PLAN).exists() else "holds no index"
        raise UserError(
            f"{folder} {state} ({MANIFEST} is missing): end the `python -m mujica_jax.index build` "
            "that began it"
        )

    manifest = read_json(folder / MANIFEST)
    _check_fields(folder, manifest)
    if check:
        for entry in manifest["files"]:
            _check_file(folder, entry)
    return manifest


def _check_fields(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Check format, version and the embedder's name of a manifest. Raises UserError."""
    if manifest.get("format") != FORMAT:
        raise UserError(
            f"{folder / MANIFEST} is of format {manifest.get('format')!r} and format {FORMAT} is "
            f"read here: {rebuild_advice(folder)}"
        )

    content = {
        name: value
        for name, value in manifest.items()
        if name not in (*ABOUT_CONTENT, *NOT_CONTENT)
    }
    version = _version(content, manifest.get("files"))
    if manifest.get("version") != version:
        raise UserError(
            f"{folder / MANIFEST} is damaged (its version is {manifest.get('version')!r} and what "
            f"it says makes {version!r}): {rebuild_advice(folder)}"
        )

    for name in LOCATION_FIELDS:
        value = manifest.get(name)
        if not isinstance(value, str | None):
            raise UserError(
                f"{folder / MANIFEST} has the {name} {value!r} and a name is meant: "
                f"{rebuild_advice(folder)}"
            )


def _check_file(folder: Path, entry: Mapping[str, Any]) -> None:
    """Compare a file's size and checksum with its entry of the manifest. Raises UserError."""
    path = folder / entry["name"]
    if not path.is_file():
        raise UserError(f"{path} is missing: {rebuild_advice(folder)}")
    size = path.stat().st_size
    if size != entry["bytes"]:
        raise UserError(
            f"{path} has {size:,} bytes and the manifest says {entry['bytes']:,}: "
            f"{rebuild_advice(folder)}"
        )
    sha256 = sha256_of(path)
    if sha256 != entry["sha256"]:
        raise UserError(
            f"{path} is damaged (its sha256 is {sha256[:12]}... and the manifest says "
            f"{entry['sha256'][:12]}...): {rebuild_advice(folder)}"
        )


@contextlib.contextmanager
def building(folder: Path, plan: Mapping[str, Any]) -> Iterator[bool]:
    """Hold the directory for one builder, and yield whether the index is finished already.

    Raises UserError for another plan's directory, and for what cannot be written while it is held.
    """
    with _explained_full_disk(folder), _lock_file(folder) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"another process builds {folder}: wait for it, or choose another --out"
            ) from error

        stored_plan = read_json(folder / PLAN) if (folder / PLAN).exists() else None
        built_files = sorted(
            path.name
            for path in folder.iterdir()
            if path.name != PLAN and not path.name.startswith(".")
        )
        if stored_plan is None and built_files:
            raise UserError(f"{folder} holds {built_files[0]} and no index: choose another --out")

        if stored_plan is not None and built_files:
            _compare_plans(folder, stored_plan, plan)
        else:
            # A plan without files is replaced: its corpus was refused, so nothing can be mixed up.
            write_json(folder / PLAN, plan)
        yield (folder / MANIFEST).exists()


def commit(folder: Path, description: Mapping[str, Any]) -> dict[str, Any]:
    """Write the manifest over all files of the directory, and return it.

    Nothing may be written there afterwards.
    """
    names = [name for name in local.names(folder, "") if name not in (PLAN, MANIFEST)]
    for name in names:
        local.sync(folder / name)

    files = [describe_file(folder / name, name) for name in names]
    content = {name: value for name, value in description.items() if name not in NOT_CONTENT}
    manifest = {
        "format": FORMAT,
        "version": _version(content, files),
        **description,
        "files": files,
    }
    write_json(folder / MANIFEST, manifest)
    return manifest


def add_recall(
    folder: Path, manifest: Mapping[str, Any], recall: Mapping[str, Any]
) -> dict[str, Any]:
    """Write the measured recall into the manifest of a finished index, and return the manifest.

    The version of the index stays.
    """
    measured = {**manifest, RECALL: dict(recall)}
    write_json(folder / MANIFEST, measured)
    return measured


class Reporter(Protocol):
    """Receives how far a build is: `report.Progress`."""

    def line(self, text: str) -> None:
        """Show one line of text."""
        ...

    def stage(self, name: str, *, total: int | None = None, unit: str) -> Any:
        """Return a context manager that yields a stage.

        The stage's `update` is called with the number of units done.
        """
        ...


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises UserError where the file is damaged."""
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError, OSError) as error:
        raise UserError(
            f"{path} cannot be read ({error}): it is damaged, so {rebuild_advice(path.parent)}"
        ) from error
    if not isinstance(value, dict):
        raise UserError(
            f"{path} holds no JSON object: it is damaged, so {rebuild_advice(path.parent)}"
        )
    return value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a file whole or not at all: a reader and a restart see the old content or the new."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n")
    local.sync(temporary)
    temporary.replace(path)
    local.sync(path.parent)


def _lock_file(folder: Path) -> IO[str]:
    """Open the file that a builder locks; the directory is made if it is missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return open(folder / LOCK, "w")
    except OSError as error:
        if error.errno in FULL_DISK_ERRORS:
            raise
        raise UserError(
            f"{error.filename} cannot be written ({error.strerror}): choose another --out"
        ) from error


@contextlib.contextmanager
def _explained_full_disk(folder: Path) -> Iterator[None]:
    """Raise the error of a full disk as a UserError of one sentence."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL_DISK_ERRORS:
            raise
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise UserError(
            f"{folder} cannot be written ({reason}): make room where its disk, a quota or a limit "
            "(ulimit -f) is used up, and the same command goes on where this one was"
        ) from error


def _compare_plans(folder: Path, stored_plan: Mapping[str, Any], plan: Mapping[str, Any]) -> None:
    """Check that a directory was begun for the same index. An embedder may lie elsewhere by now.

    A build of kind auto continues as the kind that an earlier start chose.
    """
    if plan.get("kind") == AUTO and stored_plan.get("kind") in AUTO_KINDS:
        plan = {**plan, "kind": stored_plan["kind"]}
    names = {**plan, **stored_plan}
    differing = [name for name in names if plan.get(name) != stored_plan.get(name)]
    mistaken = [name for name in differing if name not in LOCATION_FIELDS]
    if not mistaken:
        return

    # An embedder's name says more than its version.
    name = mistaken[0]
    if name == "embedder_version" and "embedder" in differing:
        name = "embedder"
    raise UserError(
        f"{folder} was begun with {name} {stored_plan.get(name)!r} and this build has "
        f"{plan.get(name)!r}: choose another --out or remove the directory"
    )


def _version(content: Mapping[str, Any], files: Any) -> str:
    """Return a hash of an index's content and of its files with their checksums."""
    text = json.dumps([content, files], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
