"""The setting is accepted by this C library, and computing goes on as before."""

import subprocess
import sys

from tests.helpers.patience import HANG_SECONDS

PROGRAM = """
from mujica_jax.runtime.host_memory import keep_freed_memory

print(keep_freed_memory())
import jax.numpy as jnp

print(float((jnp.ones((2000, 2000)) @ jnp.ones((2000, 2000))).sum()))
"""


def test_freed_memory_is_kept_where_the_c_library_is_glibc():
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert finished.stdout.splitlines() == [str(sys.platform == "linux"), "8000000000.0"], (
        finished.stderr
    )
