"""Train an agent with the method that a configuration names: `mujica train`.

The program is in `mujica_jax/commands/train.py`.
"""

from mujica_jax.commands.train import main
from mujica_jax.runtime.host_memory import keep_freed_memory
from mujica_jax.runtime.standard_output import run_program

if __name__ == "__main__":
    keep_freed_memory()
    raise SystemExit(run_program(main))
