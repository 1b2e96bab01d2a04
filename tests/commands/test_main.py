"""The console command `mujica`: its help, its table of commands, and words that it does not know."""

import importlib
import subprocess
import sys
import tomllib

import pytest

from mujica_jax import __version__
from mujica_jax.commands import main as module
from mujica_jax.commands.main import COMMANDS, EXAMPLES, main
from tests.helpers.paths import ROOT


def names() -> list[str]:
    return [command.name for command in COMMANDS]


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_the_help_has_every_command_with_its_line_and_three_examples(words, capsys):
    assert main(words) == 0
    text = capsys.readouterr().out
    width = max(map(len, names()))
    for command in COMMANDS:
        assert f"  {command.name.ljust(width)}  {command.summary}\n" in text
    assert text.count("\n  mujica ") == len(EXAMPLES) == 3
    assert max(map(len, text.splitlines())) <= 100


def test_each_command_is_a_module_with_a_main():
    assert {"train", "eval", "serve", "index", "sample", "plan"} <= set(names())
    assert len(set(names())) == len(names())
    for command in COMMANDS:
        assert callable(importlib.import_module(command.module).main)


def test_a_command_gets_the_words_behind_its_name_and_gives_its_status(monkeypatch):
    taken = []

    def record(arguments: list[str]) -> int:
        taken.append(arguments)
        return 7

    monkeypatch.setattr("mujica_jax.commands.sample.main", record)
    monkeypatch.setattr(module, "keep_freed_memory", lambda: taken.append("memory is kept"))
    assert main(["sample", "--run", "runs/first"]) == 7
    assert taken == ["memory is kept", ["--run", "runs/first"]]


def test_an_unknown_command_gets_the_nearest_one(capsys):
    assert main(["trian"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == "error: unknown command 'trian'; did you mean train?\n"


def test_a_command_like_no_other_gets_all_of_them(capsys):
    assert main(["xyzzy"]) == 2
    expected = f"error: unknown command 'xyzzy'; choose from {', '.join(names())}\n"
    assert capsys.readouterr().err == expected


def test_the_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"mujica_jax {__version__}\n"


def test_the_console_script_of_the_package_is_this_function():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"mujica": f"{module.run.__module__}:{module.run.__name__}"}


def test_the_package_itself_starts_the_command():
    command = [sys.executable, "-m", "mujica_jax", "sample", "--help"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    assert "usage: python -m mujica_jax sample --run DIR [flags]" in ended.stdout
