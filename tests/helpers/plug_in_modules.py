"""Modules of users, written by tests: what a plug-in is in the working directory of a program."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

WriteModule = Callable[[str, str], Path]

# The configuration of an agent with one more setting than Mujica.
AGENT = '''
import dataclasses
from typing import ClassVar, Literal

from mujica_jax.config.agents import MujicaConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class PatientConfig(MujicaConfig):
    """Mujica with patience."""

    kind: Literal["patient"] = "patient"
    implementation: ClassVar[str] = "mujica_jax.agents.mujica:Mujica"
    # Number of deep breaths.
    breaths: int = 3
'''


@pytest.fixture
def write_module(tmp_path, monkeypatch) -> WriteModule:
    """Return a function that writes a module into the working directory, which is a new folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != ""])

    def write(name: str, text: str) -> Path:
        # A module of another test may have the same name.
        monkeypatch.delitem(sys.modules, name, raising=False)
        file = tmp_path / f"{name}.py"
        file.write_text(text)
        return file

    return write
