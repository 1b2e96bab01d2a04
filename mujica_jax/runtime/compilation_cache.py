"""Compiled programs are kept between starts, by every process of a job. `train` and `eval` ask for it before they compile."""

import functools
import inspect
import time
import warnings
from typing import Any

import jax

from mujica_jax.config.cache_folders import cache_folder

# Parameters of JAX's own function.
READ = ("backend", "executable_devices", "host_callbacks", "module_name", "cache_key")
DONE = "keeps_own_programs"


def use_compilation_cache() -> None:
    """A second start compiles nothing. Of a job on several hosts this holds where all see one folder: what they run together is written
    down by process 0 alone.
    """
    if jax.config.jax_compilation_cache_dir is None:  # pyright: ignore[reportAttributeAccessIssue] - made at run time
        jax.config.update("jax_compilation_cache_dir", str(cache_folder("compiled")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    _keep_own_programs()


def has_own_key(platform: str, *, of_one_process: bool) -> bool:
    """Whether no other process of a job looks for a program under the same key. On TPUs the devices are part of it, as of the engine's
    programs, which each process runs on its own; among CPUs the process is part of every key; on GPUs neither is.
    """
    return platform == "cpu" or (platform != "gpu" and of_one_process)


def _keep_own_programs() -> None:
    """Process 0 is the only one for which JAX writes compiled programs down, so that no two write the same file. The programs with keys of
    their own would be compiled by the other processes again at each start.
    """
    try:
        from jax._src import compilation_cache, compiler  # JAX has no public names for them
        from jax._src.distributed import global_state

        original = compiler._compile_and_write_cache
        signature = inspect.signature(original)
    except (ImportError, AttributeError):  # another JAX
        return
    if not signature.parameters.keys() >= set(READ) or hasattr(original, DONE):
        return

    @functools.wraps(original)
    def compiled(*arguments: Any, **options: Any) -> Any:
        if not global_state.process_id:
            return original(*arguments, **options)
        began = time.monotonic()
        program = original(*arguments, **options)
        seconds = int(time.monotonic() - began)
        given = signature.bind(*arguments, **options).arguments
        backend, devices, callbacks, name, key = (given[parameter] for parameter in READ)
        if has_own_key(backend.platform, of_one_process=devices.is_fully_addressable) and not callbacks:
            try:
                compilation_cache.put_executable_and_time(key, name, program, backend, seconds)
            except Exception as error:  # as JAX does in process 0: a full disk stops no run
                warnings.warn(f"{name} is not kept for the next start: {error}", stacklevel=2)
        return program

    setattr(compiled, DONE, True)
    compiler._compile_and_write_cache = compiled
