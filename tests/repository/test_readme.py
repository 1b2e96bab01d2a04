"""The commands that the documents print are commands that work: make's targets exist, arguments are
taken, links lead somewhere.

`tests/runs` runs the two programs for real.
"""

import functools
import itertools
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from docs.hooks import PAGE
from mujica_jax.config.checks import check
from mujica_jax.config.command_line import command_line
from mujica_jax.config.schema import Config
from mujica_jax.train import DEFAULT_CONFIG
from tests.helpers.paths import ROOT
from tests.helpers.shared_data import TWO_WIKI

GENERATED = ROOT / "docs" / PAGE  # by `make docs`
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
# of every language, or pairs go wrong
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def shell_blocks(path: Path) -> list[str]:
    """Return the blocks of commands in a document, a continued line as one."""
    return [
        text.replace("\\\n", " ")
        for language, text in FENCED.findall(path.read_text())
        if language in ("", "bash")
    ]


BLOCKS = [block for path in DOCUMENTS for block in shell_blocks(path)]
LINES = [line.split("  #")[0].strip() for block in BLOCKS for line in block.splitlines()]
MAKE = sorted({line for line in LINES if line.startswith("make ")})
TRAIN = sorted({line for line in LINES if line.startswith("python -m mujica_jax.train")})


def test_the_readme_prints_both_commands():
    assert {"make train", "make test"} <= set(MAKE)
    assert TRAIN


@pytest.mark.parametrize("line", MAKE)
def test_make_knows_the_target(line):
    shown = subprocess.run(
        ["make", "--dry-run", *shlex.split(line)[1:]], cwd=ROOT, capture_output=True, text=True
    )
    assert shown.returncode == 0, shown.stderr


def arguments(line: str) -> list[str]:
    """Return the words after `python -m mujica_jax.train`, with placeholders filled in.

    "..." stands for those of any other command.
    """
    return [
        str(TWO_WIKI) if word == "DIR" else word for word in shlex.split(line)[3:] if word != "..."
    ]


def value_of(flag: str, config: Config) -> object:
    """Return what a configuration holds under a flag of the command line."""
    names = flag.removeprefix("--").replace("-", "_").split(".")
    return functools.reduce(getattr, names, config)


def training_by_make() -> list[str]:
    """Return the commands that the documented `make train ARGS="..."` start."""
    matches = [re.search(r'train ARGS="(.*)"', line) for line in MAKE]
    return [f"python -m mujica_jax.train {match[1]}" for match in matches if match]


@pytest.mark.parametrize("line", [*TRAIN, *training_by_make()])
def test_the_arguments_are_taken(line, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = arguments(line)
    config = command_line(words, default=DEFAULT_CONFIG)
    check(config)
    flags = {word: value for word, value in itertools.pairwise(words) if word.startswith("--")}
    values = {flag: value_of(flag, config) for flag in flags}
    assert {flag: str(value) for flag, value in values.items()} == {
        flag: str(float(flags[flag])) if isinstance(value, float) else flags[flag]
        for flag, value in values.items()
    }
    named = [word for word in words if word.startswith("configs/")]
    assert config.name == (Path(named[0]).stem if named else DEFAULT_CONFIG)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    targets = [
        target for target in re.findall(r"\]\(([^)#]+)", path.read_text()) if "://" not in target
    ]
    missing = [target for target in targets if not (path.parent / target).exists()]
    assert [target for target in missing if (path.parent / target).resolve() != GENERATED] == []
