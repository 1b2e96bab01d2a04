"""What is kept of compiled programs: a second start finds it, and half a file, as a kill leaves it,
is compiled again."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
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
