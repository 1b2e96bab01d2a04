"""The cache folder: files that a program can make again if they are lost.

The folder is `$XDG_CACHE_HOME/mujica_jax`. Without that variable it is `~/.cache/mujica_jax`. If
the folder cannot be written (a read-only container, a user without a home), the program uses a
temporary folder. It removes the temporary folder when it ends.
"""

import atexit
import functools
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Literal

_log = logging.getLogger(__name__)


def cache_folder(
    name: Literal[
        "searches", "reranked", "compiled", "buckets", "checkpoints", "questions", "verdicts"
    ],
) -> Path:
    """Return the cache folder of this name. The folder exists and can be written."""
    # An empty variable counts as unset.
    configured_root = os.environ.get("XDG_CACHE_HOME")
    try:
        root = Path(configured_root) if configured_root else Path.home() / ".cache"
        folder = root / "mujica_jax" / name
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:
        return _temporary_folder(name, reason=str(error))
    if not os.access(folder, os.W_OK | os.X_OK):
        return _temporary_folder(name, reason=f"{folder} is not writable")
    return folder


@functools.cache
def _temporary_folder(name: str, *, reason: str) -> Path:
    """Make a temporary folder for this process, and warn that its files are not kept."""
    folder = Path(tempfile.mkdtemp(prefix=f"mujica_jax-{name}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    _log.warning(
        "cannot keep the cache of %s (%s), so each start makes it again; set XDG_CACHE_HOME to a "
        "folder that you can write to",
        name,
        reason,
    )
    return folder
