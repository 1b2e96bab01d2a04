"""The directory of an index: what is in it, when it counts, and how damage is found.

    INDEX/plan.json        what is being built, of what; written first, so that a killed build is taken up again
    INDEX/passages.arrow   the corpus
    INDEX/...              what the kind of index needs
    INDEX/manifest.json    written last, by rename: every file with its size and checksum, and the version of the whole

A directory without a manifest is half-built and never opened. Opening compares every file with its checksum, about a second a gigabyte.
"""

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mujica_jax.errors import UserError

PLAN, MANIFEST, LOCK = "plan.json", "manifest.json", ".lock"
FORMAT = 1  # of the directory; another one is refused
AGAIN = "build the index again"


def read_manifest(folder: str | Path, *, check: bool = True) -> dict[str, Any]:
    """What the manifest says, after every file was found whole. Raises UserError naming the file that is not."""
    if "://" in str(folder):
        raise UserError(
            f"an index is opened on local disk and this one is {folder}: copy it into a directory and give that"
        )
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"there is no index {folder}: make it with `python -m mujica_jax.index build --out {folder}`")
    if not (folder / MANIFEST).exists():
        half = "is half-built" if (folder / PLAN).exists() else "holds no index"
        raise UserError(
            f"{folder} {half} ({MANIFEST} is missing): run `python -m mujica_jax.index build --out {folder}` to the end"
        )
    manifest = read_json(folder / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise UserError(
            f"{folder / MANIFEST} is of format {manifest.get('format')!r} and format {FORMAT} is read here: {AGAIN}"
        )
    for entry in manifest["files"] if check else ():
        path = folder / entry["name"]
        if not path.is_file():
            raise UserError(f"{path} is missing: {AGAIN}")
        if (size := path.stat().st_size) != entry["bytes"]:
            raise UserError(f"{path} has {size:,} bytes and the manifest says {entry['bytes']:,}: {AGAIN}")
        if (found := checksum(path)) != entry["sha256"]:
            raise UserError(
                f"{path} is damaged (its sha256 is {found[:12]}... and the manifest says {entry['sha256'][:12]}...): {AGAIN}"
            )
    return manifest


@contextlib.contextmanager
def building(folder: Path, plan: Mapping[str, Any]) -> Iterator[bool]:
    """Holds the directory for one builder; gives whether the index is finished already. Raises UserError for another plan's directory."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make {folder} ({error.strerror}): choose another --out") from error
    with open(folder / LOCK, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"another process builds {folder}: wait for it, or choose another --out") from error
        begun = read_json(folder / PLAN) if (folder / PLAN).exists() else None
        made = sorted(path.name for path in folder.iterdir() if path.name != PLAN and not path.name.startswith("."))
        if begun is None and made:
            raise UserError(f"{folder} holds {made[0]} and no index: choose another --out")
        if not made:  # of another plan, nothing that could be mixed up: its corpus was refused
            begun = None
        if begun is not None and begun != plan:
            name = next(name for name in {**plan, **begun} if plan.get(name) != begun.get(name))
            raise UserError(
                f"{folder} was begun with {name} {begun.get(name)!r} and this build has {plan.get(name)!r}: choose another --out or "
                "remove the directory"
            )
        if begun is None:
            write_json(folder / PLAN, plan)
        yield (folder / MANIFEST).exists()


def commit(folder: Path, about: Mapping[str, Any]) -> dict[str, Any]:
    """Writes the manifest over all files of the directory. Nothing may be written there afterwards."""
    names = sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and path.name not in (PLAN, MANIFEST) and not path.name.startswith(".")
    )
    files = []
    for name in names:
        _to_disk(folder / name)
        files.append({"name": name, "bytes": (folder / name).stat().st_size, "sha256": checksum(folder / name)})
    version = hashlib.sha256(json.dumps([about, files], sort_keys=True).encode()).hexdigest()[:16]
    manifest = {"format": FORMAT, "version": version, **about, "files": files}
    write_json(folder / MANIFEST, manifest)
    return manifest


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, OSError) as error:
        raise UserError(f"{path} cannot be read ({error}): it is damaged, so {AGAIN}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object: it is damaged, so {AGAIN}")
    return value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Whole or not at all: a reader and a restart see the old content or the new one."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n")
    _to_disk(temporary)
    temporary.replace(path)
    _to_disk(path.parent)


def checksum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
