"""`| head` ends a program quietly; a broken pipe elsewhere is a fault."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mujica_jax.runtime.standard_output import READER_GONE, run_program

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("name", ["train", "eval", "index"])
def test_a_reader_that_has_enough_ends_the_program_quietly(name):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        ended = subprocess.run(
            [sys.executable, "-m", f"mujica_jax.{name}", "--help"],
            cwd=ROOT,
            env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
        )
    finally:
        os.close(writing)
    assert (ended.returncode, ended.stderr) == (READER_GONE, "")


def test_another_broken_pipe_keeps_its_traceback():
    def broken() -> int:
        raise BrokenPipeError("a socket")

    with pytest.raises(BrokenPipeError, match="a socket"):
        run_program(broken)
