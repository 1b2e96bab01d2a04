"""Read the small files beside the weights of a checkpoint.

A file that is damaged raises a UserError that names it: an interrupted download leaves a part of a
file, and a clone without Git LFS leaves a pointer in place of a large file.
"""

import pathlib
from collections.abc import Mapping
from typing import Any

from mujica_jax.errors import UserError
from mujica_jax.models.families import token_ids
from mujica_jax.storage.manifest import json_object

GIT_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def read_json(path: pathlib.Path) -> Mapping[str, Any]:
    """Read a file that holds a JSON object. Raises UserError."""
    refuse_pointer(path)
    return json_object(path.read_bytes(), path, "download it again")


def refuse_pointer(path: pathlib.Path) -> None:
    """Check that a file is there and is no Git LFS pointer. Raises UserError."""
    try:
        with open(path, "rb") as file:
            beginning = file.read(len(GIT_LFS_POINTER))
    except FileNotFoundError:
        raise UserError(
            f"{path} is missing: give the directory of a Hugging Face checkpoint"
        ) from None
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}): give a checkpoint that you may read"
        ) from None
    if beginning == GIT_LFS_POINTER:
        raise UserError(
            f"{path} is a Git LFS pointer and not the file itself: run `git lfs pull` in its "
            "folder, or download it again"
        )


def stop_tokens(folder: pathlib.Path) -> tuple[int, ...]:
    """Return the stop tokens of `generation_config.json`; none if there is no such file."""
    file = folder / "generation_config.json"
    if not file.exists():
        return ()
    return token_ids(read_json(file).get("eos_token_id"), file)
