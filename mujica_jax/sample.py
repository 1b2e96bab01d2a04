"""Sample units of work for a trainer in another process: `mujica sample`.

The program is in `mujica_jax/commands/sample.py`.
"""

from mujica_jax.commands.sample import main
from mujica_jax.runtime.host_memory import keep_freed_memory
from mujica_jax.runtime.standard_output import run_program

if __name__ == "__main__":
    keep_freed_memory()
    raise SystemExit(run_program(main))
