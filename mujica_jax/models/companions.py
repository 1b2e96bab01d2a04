"""Read the small files beside the weights of a checkpoint, such as `generation_config.json`.

A damaged file raises a UserError that names it. An interrupted download leaves only a part of a
file. A clone without Git LFS has a small text file, the pointer, in place of each large file.
"""

import pathlib
from collections.abc import Mapping
from typing import Any

from mujica_jax.errors import UserError
from mujica_jax.models.families import token_ids
from mujica_jax.storage.manifest import json_object

GIT_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def read_json(path: pathlib.Path) -> Mapping[str, Any]:
    """Return the contents of a file that holds a JSON object.

    Raises UserError if the file is missing or damaged, or holds something else.
    """
    refuse_pointer(path)
    return json_object(path.read_bytes(), path, "download it again")


def refuse_pointer(path: pathlib.Path) -> None:
    """Check that a file exists, can be read and is no Git LFS pointer. Raises UserError."""
    try:
        with open(path, "rb") as file:
            beginning = file.read(len(GIT_LFS_POINTER))
    except FileNotFoundError:
        raise UserError(
            f"{path} is missing: choose the directory of a Hugging Face checkpoint"
        ) from None
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}): check its permissions, or choose another "
            "checkpoint"
        ) from None
    if beginning == GIT_LFS_POINTER:
        raise UserError(
            f"{path} is a Git LFS pointer and not the file itself: run `git lfs pull` in its "
            "folder, or download the file again"
        )


def stop_tokens(folder: pathlib.Path) -> tuple[int, ...]:
    """Return the ids of the stop tokens that `generation_config.json` names.

    The result is empty if there is no such file. Raises UserError if the file is damaged.
    """
    file = folder / "generation_config.json"
    if not file.exists():
        return ()
    return token_ids(read_json(file).get("eos_token_id"), file)
