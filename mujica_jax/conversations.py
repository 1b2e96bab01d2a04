"""Write the conversations of a run as messages, one JSON object a line.

The program is in `mujica_jax/commands/conversations.py`.
"""

from mujica_jax.commands.conversations import main
from mujica_jax.runtime.standard_output import run_program

if __name__ == "__main__":
    raise SystemExit(run_program(main))
