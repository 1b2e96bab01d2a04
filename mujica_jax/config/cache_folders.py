"""Where what may be lost and made again lies: `$XDG_CACHE_HOME/mujica_jax`, else `~/.cache/mujica_jax`."""

import os
from pathlib import Path
from typing import Literal

from mujica_jax.errors import UserError


def cache_folder(of: Literal["searches", "compiled", "buckets", "checkpoints", "questions", "verdicts"]) -> Path:
    """It may not exist yet. Raises UserError where the user has no home directory and no XDG_CACHE_HOME."""
    named = os.environ.get("XDG_CACHE_HOME")  # one that is empty counts as none
    try:
        return (Path(named) if named else Path.home() / ".cache") / "mujica_jax" / of
    except RuntimeError as error:
        raise UserError(
            "no home directory of this user is known: give a folder for caches in XDG_CACHE_HOME"
        ) from error
