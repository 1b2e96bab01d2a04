"""Print the test files of what has changed since a revision, for `make check`.

    python -m tests.helpers.changed [REVISION]      default: HEAD, so what is not committed

A changed test file counts itself. A changed module counts the test file that mirrors it
(`tests/agents/test_mujica.py` for `mujica_jax/agents/mujica.py`), and those that import it by name.
"""

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from tests.helpers.paths import ROOT


def changed_files(revision: str) -> list[Path]:
    """Return the files that differ from the revision, those that git does not track yet included."""
    tracked = _git("diff", "--name-only", "--diff-filter=d", revision)
    untracked = _git("ls-files", "--others", "--exclude-standard")
    return [ROOT / name for name in sorted({*tracked, *untracked})]


def select_tests(files: Iterable[Path], tests: Iterable[Path]) -> list[Path]:
    """Return those of the test files that are among `files`, mirror one of them, or import one."""
    modules = [file for file in files if file.suffix == ".py"]
    names = [module_name(module) for module in modules]
    chosen_by_place = {*modules, *map(mirror_of, modules)}
    chosen = []
    for test in tests:
        source = test.read_text()
        if test in chosen_by_place or any(_imports(source, name) for name in names):
            chosen.append(test)
    return chosen


def mirror_of(module: Path) -> Path:
    """Return where the test of a module of the package stands, if there is one."""
    folders = module.relative_to(ROOT).parent.parts[1:]
    return ROOT.joinpath("tests", *folders, f"test_{module.name}")


def module_name(file: Path) -> str:
    """Return the name by which tests import a file: of the package, or a helper."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def _imports(source: str, module: str) -> bool:
    """Whether a line imports the module, or something of it."""
    package, _, name = module.rpartition(".")
    ways = [rf"^\s*from {re.escape(module)} import ", rf"^\s*import {re.escape(module)}( as |$)"]
    if package:
        ways.append(rf"^\s*from {re.escape(package)} import (.*\W)?{name}(\W|$)")
    return any(re.search(way, source, re.MULTILINE) for way in ways)


def _git(*words: str) -> list[str]:
    listing = subprocess.run(
        ["git", "-C", str(ROOT), *words], check=True, capture_output=True, text=True
    )
    return listing.stdout.splitlines()


def main() -> None:
    revision = sys.argv[1] if len(sys.argv) > 1 else "HEAD"
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    for test in select_tests(changed_files(revision), tests):
        print(test.relative_to(ROOT))


if __name__ == "__main__":
    main()
