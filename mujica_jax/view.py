"""Look at runs in a browser: `mujica view`.

The program is in `mujica_jax/commands/view.py`.
"""

from mujica_jax.commands.view import main
from mujica_jax.runtime.standard_output import run_program

if __name__ == "__main__":
    raise SystemExit(run_program(main))
