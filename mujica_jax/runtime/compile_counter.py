"""How many programs this process has compiled and how long that took, as JAX itself reports it.

`compile_counter()` counts from its first call on; a program that is read from the cache on disk
counts as one. Under steady work the number stands still: one that grows means that shapes, types or
static arguments change.
"""

import collections
import functools
import threading

import jax

# once a program, also where the cache on disk has it
COMPILED = "/jax/core/compile/backend_compile_duration"
STAGES = (
    COMPILED,
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
)
REMEMBERED_SPANS = 256  # what a span may contain has ended shortly before it


class CompileCounter:
    """Counted in whichever thread compiles."""

    def __init__(self) -> None:
        self.programs = 0
        self.seconds = 0.0  # tracing, lowering and compiling
        self._ended: collections.deque[tuple[float, float]] = collections.deque(
            maxlen=REMEMBERED_SPANS
        )
        self._lock = threading.Lock()

    def add(self, event: str, start_time: float, end_time: float, **_: str | int) -> None:
        """A span of time that JAX has measured. Spans are nested, as a traced function calls
        others: each second counts once.
        """
        if event not in STAGES:
            return
        with self._lock:
            self.programs += event == COMPILED
            self.seconds += end_time - start_time
            while self._ended and self._ended[-1][0] >= start_time:
                inner = self._ended.pop()
                self.seconds -= inner[1] - inner[0]
            self._ended.append((start_time, end_time))


@functools.cache
def compile_counter() -> CompileCounter:
    """The count of this process."""
    counted = CompileCounter()
    jax.monitoring.register_event_time_span_listener(counted.add)
    return counted
