"""The folder of files that may be lost and made again: `$XDG_CACHE_HOME/mujica_jax`, else
`~/.cache/mujica_jax`.

A program works without them. Where nothing can be written there (a read-only container, a user
without a home), it keeps them in a temporary folder, which it removes when it ends.
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
    of: Literal["searches", "compiled", "buckets", "checkpoints", "questions", "verdicts"],
) -> Path:
    """Return a folder that exists and can be written."""
    named = os.environ.get("XDG_CACHE_HOME")  # one that is empty counts as none
    try:
        root = Path(named) if named else Path.home() / ".cache"
        folder = root / "mujica_jax" / of
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:
        return _temporary_folder(of, reason=str(error))
    if not os.access(folder, os.W_OK | os.X_OK):
        return _temporary_folder(of, reason=f"{folder} is not writable")
    return folder


@functools.cache
def _temporary_folder(of: str, *, reason: str) -> Path:
    """Make a folder for this process. One line on the console says that nothing is kept."""
    folder = Path(tempfile.mkdtemp(prefix=f"mujica_jax-{of}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    _log.warning(
        "the cache of %s cannot be kept (%s): it is made again at each start; set XDG_CACHE_HOME "
        "to a folder that you may write to",
        of,
        reason,
    )
    return folder
