"""Start the command `mujica`: `python -m mujica_jax train`."""

from mujica_jax.commands.main import run

if __name__ == "__main__":
    run()
