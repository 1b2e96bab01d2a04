"""Manifests: lists of the files of a folder, with their sizes and checksums.

The manifest of a folder is written after all its files. A reader that finds the manifest knows that
the folder is complete.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from mujica_jax.errors import StoreError, UserError

# File name of the manifest of a folder in a run directory.
COMMITTED = "COMMITTED"


def json_bytes(value: Mapping[str, Any]) -> bytes:
    """Return a mapping as JSON. Raises ValueError for NaN and infinity, which JSON lacks."""
    return (json.dumps(value, indent=2, allow_nan=False) + "\n").encode()


def json_object(
    data: bytes, place: object, advice: str, kind: type[UserError] = UserError
) -> dict[str, Any]:
    """Return the JSON object in `data`, or raise an error of type `kind`.

    The error message names the file `place`, and `advice` tells the user what to do.
    """
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise kind(f"{place} is not JSON ({error}): {advice}") from error
    if not isinstance(value, dict):
        raise kind(f"{place} holds no JSON object: {advice}")
    return value


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def describe_file(path: Path, name: str) -> dict[str, Any]:
    """Return the manifest's entry of one file: name, bytes and sha256."""
    return {"name": name, "bytes": path.stat().st_size, "sha256": sha256_of(path)}


def describe_folder(folder: Path) -> list[dict[str, Any]]:
    """Return the manifest's entries of all files below a folder, sorted by path."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return [describe_file(path, str(path.relative_to(folder))) for path in paths]


def check_file(path: Path, expected: Mapping[str, Any], shown: PurePath, folder: PurePath) -> None:
    """Raise StoreError if the file `path` is missing or differs from its entry `expected`.

    `shown` is the file's name in the message, and `folder` is the folder that the user can remove.
    """
    if not path.exists():
        raise StoreError(
            f"{shown} is missing, but the file COMMITTED lists it; restore it or remove {folder}"
        )
    entry = describe_file(path, expected["name"])
    if entry != expected:
        raise StoreError(
            f"{shown} is damaged: it is {entry}, but the file COMMITTED lists {expected}; restore "
            f"it or remove {folder}"
        )
