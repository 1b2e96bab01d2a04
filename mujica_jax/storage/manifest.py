"""Manifests: a folder's files with sizes and checksums.

A manifest is written last, so that a reader knows what is whole.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from mujica_jax.errors import StoreError, UserError

COMMITTED = "COMMITTED"  # the manifest of a folder of a run


def json_bytes(value: Mapping[str, Any]) -> bytes:
    """Return JSON as bytes. Raises ValueError for NaN and infinity, which JSON lacks."""
    return (json.dumps(value, indent=2, allow_nan=False) + "\n").encode()


def json_object(
    data: bytes, place: object, advice: str, kind: type[UserError] = UserError
) -> dict[str, Any]:
    """Return the JSON object in a file. `place` and `advice` are for the error if there is none."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise kind(f"{place} is not JSON ({error}): {advice}") from error
    if not isinstance(value, dict):
        raise kind(f"{place} holds no JSON object: {advice}")
    return value


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def describe_file(path: Path, name: str) -> dict[str, Any]:
    """Return the entry of one file."""
    return {"name": name, "bytes": path.stat().st_size, "sha256": sha256_of(path)}


def describe_folder(folder: Path) -> list[dict[str, Any]]:
    """Return the entries of all files below a folder, sorted by name."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return [describe_file(path, str(path.relative_to(folder))) for path in paths]


def check_file(path: Path, expected: Mapping[str, Any], shown: PurePath, folder: PurePath) -> None:
    """Raise StoreError if `path` is missing or differs from its entry.

    The message calls it `shown`.
    """
    if not path.exists():
        raise StoreError(
            f"{shown} is missing and COMMITTED lists it; restore it or remove {folder}"
        )
    entry = describe_file(path, expected["name"])
    if entry != expected:
        raise StoreError(
            f"{shown} is damaged: it has {entry} and COMMITTED lists {expected}; restore it or "
            f"remove {folder}"
        )
