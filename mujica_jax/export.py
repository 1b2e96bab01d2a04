"""Write a policy of a run into a folder that others can use: `mujica_jax.commands.export`.

python -m mujica_jax.export RUN --to DIR [--policy N] [--adapter | --merge]
"""

from mujica_jax.commands.export import main
from mujica_jax.runtime.standard_output import run_program

if __name__ == "__main__":
    raise SystemExit(run_program(main))
