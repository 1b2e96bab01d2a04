"""Build, measure, query and serve indexes of passages and graphs: `mujica index`.

The program is in `mujica_jax/commands/index.py`.
"""

from mujica_jax.commands.index import main
from mujica_jax.runtime.standard_output import run_program

if __name__ == "__main__":
    raise SystemExit(run_program(main))
