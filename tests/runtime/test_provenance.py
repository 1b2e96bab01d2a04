"""The command that a run records is one that a shell takes."""

import sys

import pytest

from mujica_jax.runtime import provenance


@pytest.mark.parametrize("python", ["python", "/venv/bin/python3"])
def test_the_command_of_a_module_is_written_for_a_shell(monkeypatch, python):
    words = [python, "-m", "mujica_jax.train", "--task.data-dir", "my data"]
    monkeypatch.setattr(sys, "orig_argv", words)
    monkeypatch.setattr(sys, "executable", "/venv/bin/python")
    assert provenance.command() == "python -m mujica_jax.train --task.data-dir 'my data'"


def test_the_command_of_an_installed_program_has_its_name(monkeypatch):
    words = ["/venv/bin/python", "/venv/bin/mujica", "train", "--seed", "1"]
    monkeypatch.setattr(sys, "orig_argv", words)
    monkeypatch.setattr(sys, "executable", "/venv/bin/python")
    assert provenance.command() == "mujica train --seed 1"
