"""A process that is killed while a compiled program is written down leaves half a file: the next one compiles again."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = """
import jax, jax.numpy as jnp
from mujica_jax.methods.start import use_compilation_cache

use_compilation_cache()
print(jax.jit(lambda x: (x @ x).sum())(jnp.ones((8, 8))))
"""


def test_half_a_compiled_program_is_compiled_again(tmp_path):
    def result() -> str:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        environment |= {"JAX_COMPILATION_CACHE_DIR": str(tmp_path)}
        command = [sys.executable, "-c", PROGRAM]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    assert result() == "512.0\n"
    programs = [path for path in tmp_path.iterdir() if path.name.endswith("-cache")]
    assert programs
    for path in programs:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert result() == "512.0\n"
