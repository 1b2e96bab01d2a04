"""The folder of files that may be lost and made again.

It is `$XDG_CACHE_HOME/mujica_jax`, or `~/.cache/mujica_jax` without that variable. A program works
without these files. If the folder cannot be written (a read-only container, a user without a home),
the program keeps them in a temporary folder, which it removes when it ends.
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
    name: Literal["searches", "compiled", "buckets", "checkpoints", "questions", "verdicts"],
) -> Path:
    """Return a folder that exists and can be written."""
    configured_root = os.environ.get("XDG_CACHE_HOME")  # an empty value counts as none
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
    """Make a folder for this process. One line on the console says that nothing is kept."""
    folder = Path(tempfile.mkdtemp(prefix=f"mujica_jax-{name}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    _log.warning(
        "the cache of %s cannot be kept (%s): it is made again at each start; set XDG_CACHE_HOME "
        "to a folder that you may write to",
        name,
        reason,
    )
    return folder
