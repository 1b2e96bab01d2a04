"""Keep compiled programs between starts, and count what is compiled all the same.

`train` and `eval` ask for the cache before they compile. In a job on several hosts JAX lets process
0 alone write. The others find the programs that all run together if they see the same folder.
Programs for their own devices (the engine's) they compile at each start.

`compile_counter()` says how many programs this process has compiled and how long that took, as JAX
itself reports it. It counts from its first call on; a program that is read from the cache on disk
counts as one. Under steady work the number stands still: one that grows means that shapes, types or
static arguments change.
"""

import collections
import functools
import threading

import jax

from mujica_jax.config.cache_folders import cache_folder

# once a program, also where the cache on disk has it
COMPILED = "/jax/core/compile/backend_compile_duration"
STAGES = (
    COMPILED,
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
)
REMEMBERED_SPANS = 256  # what a span may contain has ended shortly before it


def use_compilation_cache() -> None:
    """Make JAX keep every compiled program, so that a second start compiles nothing."""
    if jax.config.jax_compilation_cache_dir is None:  # pyright: ignore[reportAttributeAccessIssue] - made at run time
        jax.config.update("jax_compilation_cache_dir", str(cache_folder("compiled")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


class CompileCounter:
    """Counts programs in whichever thread compiles them."""

    def __init__(self) -> None:
        self.programs = 0
        self.seconds = 0.0  # tracing, lowering and compiling
        # Start and end of the latest spans.
        self._spans: collections.deque[tuple[float, float]] = collections.deque(
            maxlen=REMEMBERED_SPANS
        )
        self._lock = threading.Lock()

    def add(self, event: str, start_time: float, end_time: float, **_: str | int) -> None:
        """Add a span of time that JAX has measured.

        Spans are nested, as a traced function calls others. Each second counts once.
        """
        if event not in STAGES:
            return
        with self._lock:
            if event == COMPILED:
                self.programs += 1
            self.seconds += end_time - start_time

            # The spans inside this one have ended before it, and were counted.
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
