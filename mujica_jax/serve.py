"""Serve a policy: `mujica serve`.

The program is in `mujica_jax/commands/serve.py`.
"""

from mujica_jax.commands.serve import main
from mujica_jax.runtime.host_memory import keep_freed_memory
from mujica_jax.runtime.standard_output import run_program

if __name__ == "__main__":
    keep_freed_memory()
    raise SystemExit(run_program(main))
