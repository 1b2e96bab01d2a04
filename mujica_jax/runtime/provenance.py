"""Where a run comes from: its configuration, the revision of this program, versions. Written once,
compared when a run is resumed.
"""

import importlib.metadata
import platform
import subprocess
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

GIT_SECONDS = 10
UNSET = "unset"


def environment() -> dict[str, Any]:
    """Python, packages that are installed, and the git revision of this program where it runs from
    a checkout."""
    found = reversed(
        list(importlib.metadata.distributions())
    )  # of two of one name, the first on the path is imported
    versions = {package.name: package.version for package in found if package.read_text("METADATA")}
    return {
        "python": platform.python_version(),
        "packages": versions,
        "git_revision": git_revision(),
    }


def git_revision() -> str | None:
    """The commit, with "+changes" where the package differs from it; None outside a repository that
    tracks the package.
    """
    if not _git("ls-files", "--", "records.py"):
        return None
    revision = _git("rev-parse", "HEAD")
    return revision and revision + ("+changes" if _git("status", "--porcelain", "--", ".") else "")


def differences(
    old: Mapping[str, Any], new: Mapping[str, Any], ignore: Collection[str]
) -> list[str]:
    """A phrase for every key, dotted, whose values differ; `ignore` names keys, or the beginnings
    of dotted ones."""
    before, now = dict(_leaves(old)), dict(_leaves(new))
    return [
        f"{key} was {before.get(key, UNSET)!r} and is now {now.get(key, UNSET)!r}"
        for key in dict.fromkeys([*before, *now])
        if before.get(key, UNSET) != now.get(key, UNSET)
        and not any(f"{key}.".startswith(f"{name}.") for name in ignore)
    ]


def _leaves(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, member in value.items():
        if isinstance(member, Mapping):
            yield from _leaves(member, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", member


def _git(*arguments: str) -> str | None:
    """What git prints about the package's folder; None where it fails or is not installed."""
    command = ["git", "-C", str(Path(__file__).parents[1]), *arguments]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=GIT_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip() or None
