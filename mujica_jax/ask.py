"""Let a trained agent answer a question in your own words: `mujica ask`.

The program is in `mujica_jax/commands/ask.py`.
"""

from mujica_jax.commands.ask import main
from mujica_jax.runtime.host_memory import keep_freed_memory
from mujica_jax.runtime.standard_output import run_program

if __name__ == "__main__":
    keep_freed_memory()
    raise SystemExit(run_program(main))
