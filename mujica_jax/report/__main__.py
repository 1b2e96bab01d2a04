"""Write the report of runs as one HTML file: `mujica report`.

The program is in `mujica_jax/commands/report.py`.
"""

from mujica_jax.commands.report import main
from mujica_jax.runtime.standard_output import run_program

if __name__ == "__main__":
    raise SystemExit(run_program(main))
