"""The directory of an index: its files, and how a build commits them and a reader checks them.

    INDEX/plan.json        The sources and settings of the build. It is written first, so that a
                           killed build can continue.
    INDEX/passages.arrow   The corpus.
    INDEX/...              Other files, depending on the kind of the index.
    INDEX/manifest.json    All files with sizes and checksums, and the version of the index. It is
                           written last.

A directory without a manifest holds an unfinished build and cannot be opened. Opening an index
compares every file with its checksum, which takes about a second for each gigabyte. A damaged index
is never repaired. The user has to remove it and build it again.
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
# Format of the directory. A directory of another format cannot be opened.
FORMAT = 1
# Errors of a full disk. The errors of numpy, RocksDB and ScaNN have no number (None), and only
# their text says what happened.
FULL_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, None)
# Fields that say where to find the embedder. They do not identify its content: its version does.
LOCATION_FIELDS = ("embedder", "prefixes")
# Field of the recall compared with exact search, which is measured at the end of a build.
RECALL = "recall"
# Fields that do not count for the version of an index.
NOT_CONTENT = (*LOCATION_FIELDS, "seconds", RECALL)
# Kind of a dense index until the number of its passages is known.
AUTO = "auto"
# The kinds that AUTO can become. The chosen one is then stored in plan.json.
AUTO_KINDS = ("exact", "scann")
# Fields of a manifest that describe the content as a whole.
ABOUT_CONTENT = ("format", "version", "files")


def rebuild_advice(folder: str | Path) -> str:
    """Return the advice for a damaged index, for an error message.

    The directory has to be removed first, because a new build would continue with its files.
    """
    return f"remove {folder} and build the index again"


def read_manifest(folder: str | Path, *, check: bool = True) -> dict[str, Any]:
    """Return the manifest of an index.

    With `check`, compare every file with its checksum first. Raises UserError with the file that is
    missing or damaged.
    """
    if "://" in str(folder):
        raise UserError(
            f"an index must be on local disk, but this one is {folder}: copy it into a local "
            "directory, and give that directory"
        )
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(
            f"there is no index {folder}: build it (see `python -m mujica_jax.index build --help`)"
        )
    if not (folder / MANIFEST).exists():
        state = "is half-built" if (folder / PLAN).exists() else "holds no index"
        raise UserError(
            f"{folder} {state} ({MANIFEST} is missing): give another directory, or finish its "
            "build with the same `python -m mujica_jax.index build` command"
        )

    manifest = read_json(folder / MANIFEST)
    _check_fields(folder, manifest)
    if check:
        for entry in manifest["files"]:
            _check_file(folder, entry)
    return manifest


def _check_fields(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Raise UserError if a manifest has a wrong format, version or name of an embedder."""
    if manifest.get("format") != FORMAT:
        raise UserError(
            f"{folder / MANIFEST} has format {manifest.get('format')!r}, but this release reads "
            f"format {FORMAT}: {rebuild_advice(folder)}"
        )

    content = {
        name: value
        for name, value in manifest.items()
        if name not in (*ABOUT_CONTENT, *NOT_CONTENT)
    }
    version = _version(content, manifest.get("files"))
    if manifest.get("version") != version:
        raise UserError(
            f"{folder / MANIFEST} is damaged (its version is {manifest.get('version')!r}, but its "
            f"content has version {version!r}): {rebuild_advice(folder)}"
        )

    for name in LOCATION_FIELDS:
        value = manifest.get(name)
        if not isinstance(value, str | None):
            raise UserError(
                f"{folder / MANIFEST} has the {name} {value!r}, which is not a name: "
                f"{rebuild_advice(folder)}"
            )


def _check_file(folder: Path, entry: Mapping[str, Any]) -> None:
    """Raise UserError if a file's size or checksum differs from its entry in the manifest."""
    path = folder / entry["name"]
    if not path.is_file():
        raise UserError(f"{path} is missing: {rebuild_advice(folder)}")
    size = path.stat().st_size
    if size != entry["bytes"]:
        raise UserError(
            f"{path} has {size:,} bytes, but the manifest says {entry['bytes']:,}: "
            f"{rebuild_advice(folder)}"
        )
    sha256 = sha256_of(path)
    if sha256 != entry["sha256"]:
        raise UserError(
            f"{path} is damaged (its sha256 is {sha256[:12]}..., but the manifest says "
            f"{entry['sha256'][:12]}...): {rebuild_advice(folder)}"
        )


@contextlib.contextmanager
def building(folder: Path, plan: Mapping[str, Any]) -> Iterator[bool]:
    """Lock the directory for one builder, and yield whether the index is finished already.

    The plan is written into the directory, unless it has one. Raises UserError if another process
    builds there, if the directory holds something else or an index of another plan, or if the disk
    is full.
    """
    with _explained_full_disk(folder), _lock_file(folder) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"another process is building {folder}: wait for it, or choose another --out"
            ) from error

        stored_plan = read_json(folder / PLAN) if (folder / PLAN).exists() else None
        built_files = sorted(
            path.name
            for path in folder.iterdir()
            if path.name != PLAN and not path.name.startswith(".")
        )
        if stored_plan is None and built_files:
            raise UserError(f"{folder} holds {built_files[0]}, but no index: choose another --out")

        if stored_plan is not None and built_files:
            _compare_plans(folder, stored_plan, plan)
        else:
            # Replace a plan without other files. Its build failed before it wrote anything, so
            # nothing can be mixed up.
            write_json(folder / PLAN, plan)
        yield (folder / MANIFEST).exists()


def commit(folder: Path, description: Mapping[str, Any]) -> dict[str, Any]:
    """Write the manifest of all files in the directory, and return it.

    `description` holds the other fields. Nothing may be written to the directory afterwards, except
    by `add_recall`.
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

    The version of the index does not change.
    """
    measured = {**manifest, RECALL: dict(recall)}
    write_json(folder / MANIFEST, measured)
    return measured


class Reporter(Protocol):
    """The interface that shows the progress of a build. `report.Progress` implements it."""

    def line(self, text: str) -> None:
        """Show one line of text."""
        ...

    def stage(self, name: str, *, total: int | None = None, unit: str) -> Any:
        """Return a context manager that yields a stage of the build.

        The build calls the stage's `update` with the number of units done, out of `total`.
        """
        ...


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises UserError if the file is damaged."""
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
    """Write a JSON file atomically. A reader sees the old content or the new one, never a mix."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n")
    local.sync(temporary)
    temporary.replace(path)
    local.sync(path.parent)


def _lock_file(folder: Path) -> IO[str]:
    """Open the file that a builder locks. Create the directory if it does not exist."""
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
    """Raise the error of a full disk in the body as a UserError of one sentence."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL_DISK_ERRORS:
            raise
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise UserError(
            f"{folder} cannot be written ({reason}): free some space on its disk, or raise the "
            "quota or the limit (ulimit -f), and start the same command again; it continues where "
            "this one stopped"
        ) from error


def _compare_plans(folder: Path, stored_plan: Mapping[str, Any], plan: Mapping[str, Any]) -> None:
    """Raise UserError if a directory was started with another plan.

    The embedder may have moved to another place. A build of kind auto continues with the kind that
    an earlier start chose.
    """
    if plan.get("kind") == AUTO and stored_plan.get("kind") in AUTO_KINDS:
        plan = {**plan, "kind": stored_plan["kind"]}
    names = {**plan, **stored_plan}
    differing = [name for name in names if plan.get(name) != stored_plan.get(name)]
    mistaken = [name for name in differing if name not in LOCATION_FIELDS]
    if not mistaken:
        return

    # In the message, the name of an embedder is clearer than its version.
    name = mistaken[0]
    if name == "embedder_version" and "embedder" in differing:
        name = "embedder"
    raise UserError(
        f"{folder} was started with {name} {stored_plan.get(name)!r}, but this build has "
        f"{plan.get(name)!r}: choose another --out or remove the directory"
    )


def _version(content: Mapping[str, Any], files: Any) -> str:
    """Return a hash of the description of an index and of its files with their checksums."""
    text = json.dumps([content, files], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
