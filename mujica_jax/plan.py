"""Print what a configuration needs, and whether it fits: `mujica plan`.

The program is in `mujica_jax/commands/plan.py`.
"""

from mujica_jax.commands.plan import main
from mujica_jax.runtime.standard_output import run_program

if __name__ == "__main__":
    raise SystemExit(run_program(main))
