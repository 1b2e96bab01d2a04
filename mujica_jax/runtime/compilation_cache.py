"""Keep compiled programs on disk between starts, and count compilations.

`train` and `eval` call `use_compilation_cache` before they compile. In a job on several hosts, JAX
lets only process 0 write to the cache. If the other processes see the same folder, they find the
programs that all processes run together. They still compile programs for their own devices, such as
those of the inference engine, at each start.

`compile_counter()` counts the programs that this process has compiled since the first call, and the
seconds spent on it, as JAX reports them. A program that is read from the cache on disk counts as
well. During steady work the count should not change. If it grows, then shapes, types or static
arguments change between calls.
"""

import collections
import functools
import threading

import jax

from mujica_jax.config.cache_folders import cache_folder

# JAX reports this event once for each program, also if it is read from the cache on disk.
COMPILED = "/jax/core/compile/backend_compile_duration"
# The stages of compilation whose time is summed.
STAGES = (
    COMPILED,
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
)
# Number of earlier time spans that are kept, to find those nested inside a new one.
REMEMBERED_SPANS = 256


def use_compilation_cache() -> None:
    """Make JAX keep every compiled program on disk, so that a second start compiles nothing."""
    if jax.config.jax_compilation_cache_dir is None:  # pyright: ignore[reportAttributeAccessIssue] - made at run time
        jax.config.update("jax_compilation_cache_dir", str(cache_folder("compiled")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


class CompileCounter:
    """A counter of the programs that any thread compiles, and of the compilation time."""

    def __init__(self) -> None:
        self.programs = 0
        # Time spent on tracing, lowering and compiling.
        self.seconds = 0.0
        # Start and end times of the latest spans.
        self._spans: collections.deque[tuple[float, float]] = collections.deque(
            maxlen=REMEMBERED_SPANS
        )
        self._lock = threading.Lock()

    def add(self, event: str, start_time: float, end_time: float, **_: str | int) -> None:
        """Add a time span that JAX has measured, from `start_time` to `end_time`.

        Spans can be nested, because a traced function calls other traced functions. Each second is
        counted only once.
        """
        if event not in STAGES:
            return
        with self._lock:
            if event == COMPILED:
                self.programs += 1
            self.seconds += end_time - start_time

            # Spans inside this one ended earlier and were counted already. Subtract them.
            while self._spans and self._spans[-1][0] >= start_time:
                inner_start, inner_end = self._spans.pop()
                self.seconds -= inner_end - inner_start
            self._spans.append((start_time, end_time))


@functools.cache
def compile_counter() -> CompileCounter:
    """Return the counter of this process."""
    counter = CompileCounter()
    jax.monitoring.register_event_time_span_listener(counter.add)
    return counter
