"""Evaluate a policy on held-out questions: `mujica eval`.

The program is in `mujica_jax/commands/eval.py`.
"""

from mujica_jax.commands.eval import main
from mujica_jax.runtime.host_memory import keep_freed_memory
from mujica_jax.runtime.standard_output import run_program

if __name__ == "__main__":
    keep_freed_memory()
    raise SystemExit(run_program(main))
