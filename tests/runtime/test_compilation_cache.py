"""What is kept of compiled programs: a second start finds it, and half a file, as a kill leaves it,
is compiled again. Compilations are counted as JAX reports them; spans that lie in one another count
once.
"""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from mujica_jax.runtime.compilation_cache import (
    COMPILED,
    STAGES,
    CompileCounter,
    compile_counter,
)
from tests.helpers.paths import ROOT

PROGRAM = """
import jax, jax.numpy as jnp
from mujica_jax.runtime.compilation_cache import use_compilation_cache

use_compilation_cache()
print(jax.jit(lambda x: (x @ x).sum())(jnp.ones((8, 8))))
"""


def result(folder: Path, program: str = PROGRAM) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    environment |= {"JAX_COMPILATION_CACHE_DIR": str(folder)}
    command = [sys.executable, "-c", program]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout


def programs(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name.endswith("-cache")]


def test_half_a_compiled_program_is_compiled_again(tmp_path):
    assert result(tmp_path) == "512.0\n"
    assert programs(tmp_path)
    for path in programs(tmp_path):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert result(tmp_path) == "512.0\n"


def test_a_program_is_counted_when_it_is_compiled_and_not_when_it_runs():
    counted = compile_counter()
    twice = jax.jit(lambda values: values * 2 + 40)
    short = jnp.ones(3)
    long = jnp.ones(4)
    before = counted.programs, counted.seconds
    twice(short)
    assert counted.programs == before[0] + 1
    assert counted.seconds > before[1]
    after = counted.programs, counted.seconds
    twice(short)
    assert (counted.programs, counted.seconds) == after
    twice(long)
    assert counted.programs == after[0] + 1, "another shape is another program"


def test_every_second_counts_once():
    counted = CompileCounter()
    trace = STAGES[1]
    counted.add(trace, 2.0, 3.0)
    counted.add(trace, 4.0, 4.5, fun_name="inner")
    # Both times lie in it.
    counted.add(trace, 1.0, 5.0)
    counted.add("/jax/something/else", 5.0, 9.0)
    counted.add(COMPILED, 5.0, 7.0)
    assert counted.seconds == pytest.approx(6.0)
    assert counted.programs == 1
