"""Train an agent with the method that a configuration names: `mujica train`.

The program is in `mujica_jax/commands/train.py`. The Python API has a function of the same name,
`mujica_jax.train(...)`. Importing this module puts it in the place of the function, so the module
can be called like the function.
"""

import sys
import types
from typing import Any

from mujica_jax.commands.train import main
from mujica_jax.runtime.host_memory import keep_freed_memory
from mujica_jax.runtime.standard_output import run_program


class _CallableModule(types.ModuleType):
    """The module `mujica_jax.train`, which trains a run when it is called."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Train a run. See `mujica_jax.api.training.train`."""
        # This import starts JAX, which a program does only after it has read its arguments.
        from mujica_jax.api.training import train

        return train(*arguments, **options)


sys.modules[__name__].__class__ = _CallableModule

if __name__ == "__main__":
    keep_freed_memory()
    raise SystemExit(run_program(main))
