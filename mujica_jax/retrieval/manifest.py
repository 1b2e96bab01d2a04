"""The directory of an index: what is in it, when it counts, and how damage is found.

    INDEX/plan.json        what is being built, of what; written first, so that a killed build is taken up again
    INDEX/passages.arrow   the corpus
    INDEX/...              what the kind of index needs
    INDEX/manifest.json    written last, by rename: every file with its size and checksum, and the version of the whole

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

PLAN, MANIFEST, LOCK = "plan.json", "manifest.json", ".lock"
FORMAT = 1  # of the directory; another one is refused
# A disk that is full; numpy, RocksDB and ScaNN give no number, so that what they say is all that is
# known.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, None)
WHERE = (
    "embedder",
    "prefixes",
)  # said of an embedder so that it is found again; what it is, its version says
RECALL = "recall"  # measured beside exact search, when the index was built
NOT_CONTENT = (
    *WHERE,
    "seconds",
    RECALL,
)  # of a manifest: two indexes that differ in these alone are one version
AUTO = "auto"  # the kind of a dense index until its size is known
AUTO_KINDS = ("exact", "scann")  # one of which the size chooses; plan.json then has this one
ABOUT_CONTENT = ("format", "version", "files")


def again(folder: str | Path) -> str:
    """What to do about a damaged directory: a build that finds it takes it for what it says it
    is."""
    return f"remove {folder} and build the index again"


def read_manifest(folder: str | Path, *, check: bool = True) -> dict[str, Any]:
    """What the manifest says, after every file was found whole. Raises UserError naming the file
    that is not."""
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
        half = "is half-built" if (folder / PLAN).exists() else "holds no index"
        raise UserError(
            f"{folder} {half} ({MANIFEST} is missing): end the `python -m mujica_jax.index build` "
            "that began it"
        )
    manifest = read_json(folder / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise UserError(
            f"{folder / MANIFEST} is of format {manifest.get('format')!r} and format {FORMAT} is "
            f"read here: {again(folder)}"
        )
    content = {
        name: value
        for name, value in manifest.items()
        if name not in (*ABOUT_CONTENT, *NOT_CONTENT)
    }
    if manifest.get("version") != (found := _version(content, manifest.get("files"))):
        raise UserError(
            f"{folder / MANIFEST} is damaged (its version is {manifest.get('version')!r} and what "
            f"it says makes {found!r}): {again(folder)}"
        )
    for name in WHERE:
        if not isinstance(value := manifest.get(name), str | None):
            raise UserError(
                f"{folder / MANIFEST} has the {name} {value!r} and a name is meant: {again(folder)}"
            )
    for entry in manifest["files"] if check else ():
        path = folder / entry["name"]
        if not path.is_file():
            raise UserError(f"{path} is missing: {again(folder)}")
        if (size := path.stat().st_size) != entry["bytes"]:
            raise UserError(
                f"{path} has {size:,} bytes and the manifest says {entry['bytes']:,}: "
                f"{again(folder)}"
            )
        if (found := sha256_of(path)) != entry["sha256"]:
            raise UserError(
                f"{path} is damaged (its sha256 is {found[:12]}... and the manifest says "
                f"{entry['sha256'][:12]}...): {again(folder)}"
            )
    return manifest


@contextlib.contextmanager
def building(folder: Path, plan: Mapping[str, Any]) -> Iterator[bool]:
    """Holds the directory for one builder; gives whether the index is finished already.

    Raises UserError for another plan's directory, and for what cannot be written while it is held.
    """
    with _written(folder), _lock_file(folder) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"another process builds {folder}: wait for it, or choose another --out"
            ) from error
        begun = read_json(folder / PLAN) if (folder / PLAN).exists() else None
        made = sorted(
            path.name
            for path in folder.iterdir()
            if path.name != PLAN and not path.name.startswith(".")
        )
        if begun is None and made:
            raise UserError(f"{folder} holds {made[0]} and no index: choose another --out")
        if not made:  # of another plan, nothing that could be mixed up: its corpus was refused
            begun = None
        if begun is not None:
            _compare(folder, begun, plan)
        else:
            write_json(folder / PLAN, plan)
        yield (folder / MANIFEST).exists()


def commit(folder: Path, about: Mapping[str, Any]) -> dict[str, Any]:
    """Writes the manifest over all files of the directory. Nothing may be written there
    afterwards."""
    names = [name for name in local.names(folder, "") if name not in (PLAN, MANIFEST)]
    for name in names:
        local.sync(folder / name)
    files = [describe_file(folder / name, name) for name in names]
    content = {name: value for name, value in about.items() if name not in NOT_CONTENT}
    manifest = {"format": FORMAT, "version": _version(content, files), **about, "files": files}
    write_json(folder / MANIFEST, manifest)
    return manifest


def add_recall(
    folder: Path, manifest: Mapping[str, Any], recall: Mapping[str, Any]
) -> dict[str, Any]:
    """Write the measured recall into the manifest of a finished index, and return that. The version
    stays."""
    measured = {**manifest, RECALL: dict(recall)}
    write_json(folder / MANIFEST, measured)
    return measured


class Reporter(Protocol):
    """Receives how far a build is: `report.Progress`."""

    def line(self, text: str) -> None:
        """Show one line of text."""
        ...

    def stage(self, name: str, *, total: int | None = None, unit: str) -> Any:
        """A context manager that gives a stage; `update` of that is called with the number of units
        done."""
        ...


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError, OSError) as error:
        raise UserError(
            f"{path} cannot be read ({error}): it is damaged, so {again(path.parent)}"
        ) from error
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object: it is damaged, so {again(path.parent)}")
    return value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Whole or not at all: a reader and a restart see the old content or the new one."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n")
    local.sync(temporary)
    temporary.replace(path)
    local.sync(path.parent)


def _lock_file(folder: Path) -> IO[str]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return open(folder / LOCK, "w")
    except OSError as error:
        if error.errno in FULL:
            raise
        raise UserError(
            f"{error.filename} cannot be written ({error.strerror}): choose another --out"
        ) from error


@contextlib.contextmanager
def _written(folder: Path) -> Iterator[None]:
    """A disk that is full ends a build with one sentence."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise UserError(
            f"{folder} cannot be written ({reason}): make room where its disk, a quota or a limit "
            "(ulimit -f) is used up, and the same command goes on where this one was"
        ) from error


def _compare(folder: Path, begun: Mapping[str, Any], plan: Mapping[str, Any]) -> None:
    """Check that a directory was begun for the same index. An embedder may lie elsewhere by now.

    A build of kind auto continues as the kind that an earlier start chose.
    """
    if plan.get("kind") == AUTO and begun.get("kind") in AUTO_KINDS:
        plan = {**plan, "kind": begun["kind"]}
    differing = [name for name in {**plan, **begun} if plan.get(name) != begun.get(name)]
    if mistaken := [name for name in differing if name not in WHERE]:
        name = (
            "embedder"
            if mistaken[0] == "embedder_version" and "embedder" in differing
            else mistaken[0]
        )
        raise UserError(
            f"{folder} was begun with {name} {begun.get(name)!r} and this build has "
            f"{plan.get(name)!r}: choose another --out or remove the directory"
        )


def _version(content: Mapping[str, Any], files: Any) -> str:
    return hashlib.sha256(json.dumps([content, files], sort_keys=True).encode()).hexdigest()[:16]
