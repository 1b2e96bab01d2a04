"""A window of training steps under JAX's profiler (`--profile.steps 20 25`).

The trace is written into the run directory, once for each start of the program. It begins before
the first step of the window is dispatched and ends when the last one is done on the device. The
phase is the first that reaches the window, or the one that `--profile.phase` names. A phase that
cannot show the whole window says so. docs/reference/metrics.md says how to open the trace.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from mujica_jax.config.schema import ProfileConfig
from mujica_jax.storage.run_directory import RunPath

FOLDER = "profile"


class ProfileWindow:
    """The window of one run.

    `methods.run` asks it how many steps to train at a stretch, and calls it before and after.
    """

    def __init__(
        self, config: ProfileConfig, directory: RunPath, say: Callable[[str], None]
    ) -> None:
        self._steps = config.steps
        self._phase = config.phase
        self._say = say
        # The profiler writes to local disk: where the run is in a bucket, into the folder that it
        # was started in.
        self._directory = (directory if isinstance(directory, Path) else Path()) / FOLDER
        self._open: tuple[int, int] | None = None  # the window, while a phase that shows it trains
        self._is_tracing = False
        self._phase_name = ""

    @contextlib.contextmanager
    def of_phase(self, name: str, *, done: int, steps: int) -> Iterator[None]:
        """Open the window for a phase that goes from step `done` to `steps`.

        A trace that an error or a signal interrupts is ended and kept.
        """
        self._phase_name = name
        self._open = self._window(name, done, steps)
        try:
            yield
        finally:
            self._open = None
            if self._is_tracing:
                self._stop(f"ended early, in {name}")

    def until(self, done: int, until: int) -> int:
        """Return how far a stretch of steps may go, so that it begins or ends with the window."""
        if self._open is None:
            return until
        first, last = self._open
        borders = [border for border in (first - 1, last) if border > done]
        return min([until, *borders])

    def before(self, done: int) -> None:
        """Start the trace if the next step is the first of the window.

        `done` steps are made, and the next one is about to be dispatched.
        """
        if self._open is not None and done == self._open[0] - 1:
            jax.profiler.start_trace(self._trace_folder())
            self._is_tracing = True

    def after(self, done: int, state: Any) -> None:
        """Stop the trace if the window's last step is made.

        `done` steps are made, and `state` is the result of the last one.
        """
        if self._is_tracing and self._open is not None and done >= self._open[1]:
            jax.block_until_ready(state)
            self._steps = None  # A run has one trace.
            self._open = None
            self._stop("traced")

    def close(self) -> None:
        """Print at the end of a run if the window never came."""
        if self._steps is not None:
            where = "no phase" if self._phase is None else f"no phase {self._phase}"
            self._say(
                f"profile.steps {self._steps[0]} {self._steps[1]}: {where} of this run trained "
                "these steps from their beginning, and nothing was traced"
            )

    def _window(self, name: str, done: int, steps: int) -> tuple[int, int] | None:
        """Return the window if this phase shows it whole, and say why where it does not."""
        if self._steps is None or self._phase not in (None, name):
            return None
        first, last = self._steps
        if last > steps:
            self._say(
                f"{name} has {steps} steps and profile.steps is {first} {last}: this phase is not "
                "traced"
            )
            return None
        if done >= first:
            self._say(
                f"{name} goes on after step {done} and profile.steps is {first} {last}: this phase "
                "is not traced"
            )
            return None
        return first, last

    def _trace_folder(self) -> Path:
        return self._directory / self._phase_name.replace(" ", "-")

    def _stop(self, reason: str) -> None:
        self._is_tracing = False
        jax.profiler.stop_trace()
        assert self._directory.exists(), "the profiler writes where it was told to"
        self._say(f"profile.steps: {reason}; the trace is in {self._trace_folder()}")
