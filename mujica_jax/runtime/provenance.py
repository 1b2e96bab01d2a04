"""Describe the program of a run: its command, its git revision and the versions of packages.

A run stores this together with its configuration when it starts. When the run is resumed, the
stored values are compared with the current ones.
"""

import importlib.metadata
import platform
import shlex
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

# Timeout of a git command.
GIT_SECONDS = 10
# Shown in place of the value of a key that does not exist.
UNSET = "unset"


def environment() -> dict[str, Any]:
    """Return the versions of Python and of installed packages, and the program's git revision."""
    # If a package is installed twice, Python imports the first one on the path. In reversed order,
    # its version overwrites the other one.
    versions = {}
    for package in reversed(list(importlib.metadata.distributions())):
        if package.read_text("METADATA"):
            versions[package.name] = package.version
    return {
        "python": platform.python_version(),
        "packages": versions,
        "git_revision": git_revision(),
    }


def command() -> str:
    """Return the command that started this program, as a shell takes it."""
    words = sys.orig_argv[1:]
    # A console command is a file beside Python, which Python runs.
    if words and Path(words[0]).parent == Path(sys.executable).parent:
        return shlex.join([Path(words[0]).name, *words[1:]])
    return shlex.join(["python", *words])


def git_revision() -> str | None:
    """Return the git commit of this program, with "+changes" if its files were changed since.

    Return None if the package is not in a git repository that tracks it.
    """
    if not _git("ls-files", "--", "records.py"):
        return None
    revision = _git("rev-parse", "HEAD")
    if revision is None:
        return None
    has_changes = _git("status", "--porcelain", "--", ".") is not None
    return f"{revision}+changes" if has_changes else revision


def differences(
    old: Mapping[str, Any], new: Mapping[str, Any], ignore: Collection[str]
) -> list[str]:
    """Return a phrase for every dotted key whose values differ, such as "a.b was 1 and is now 2".

    `ignore` lists keys to leave out, with all keys below them.
    """
    old_values = dict(_leaves(old))
    new_values = dict(_leaves(new))
    phrases = []
    for key in dict.fromkeys([*old_values, *new_values]):
        old_value = old_values.get(key, UNSET)
        new_value = new_values.get(key, UNSET)
        is_ignored = any(f"{key}.".startswith(f"{name}.") for name in ignore)
        if old_value != new_value and not is_ignored:
            phrases.append(f"{key} was {old_value!r} and is now {new_value!r}")
    return phrases


def _leaves(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of every leaf of nested mappings."""
    for key, member in value.items():
        if isinstance(member, Mapping):
            yield from _leaves(member, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", member


def _git(*arguments: str) -> str | None:
    """Run git in the package's folder and return its output, or None.

    It is None if git fails or prints nothing.
    """
    command = ["git", "-C", str(Path(__file__).parents[1]), *arguments]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=GIT_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip() or None
