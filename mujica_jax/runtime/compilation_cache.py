"""Keep compiled programs between starts. `train` and `eval` ask for it before they compile.

In a job on several hosts JAX lets process 0 alone write. The others find the programs that all run
together if they see the same folder. Programs for their own devices (the engine's) they compile at
each start.
"""

import jax

from mujica_jax.config.cache_folders import cache_folder


def use_compilation_cache() -> None:
    """Make JAX keep every compiled program, so that a second start compiles nothing."""
    if jax.config.jax_compilation_cache_dir is None:  # pyright: ignore[reportAttributeAccessIssue] - made at run time
        jax.config.update("jax_compilation_cache_dir", str(cache_folder("compiled")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
