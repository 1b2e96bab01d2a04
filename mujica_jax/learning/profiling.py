"""Trace a window of training steps with JAX's profiler (`--profile.steps 20 25`).

The trace begins before the first step of the window is dispatched. It ends when the devices have
finished the last step. The traced phase is the one that `--profile.phase` names, or else the first
phase that trains the whole window. A phase that does not train the whole window prints a line that
says why.

The trace is written into the run directory. Each start of the program writes at most one trace.
docs/reference/metrics.md explains how to open it.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from mujica_jax.config.schema import ProfileConfig
from mujica_jax.storage.run_directory import RunPath

# Folder for traces in the run directory.
FOLDER = "profile"


class ProfileWindow:
    """The window of steps that a run traces.

    The loop that trains a phase opens the window with `of_phase`. It trains a few steps at a time:
    `until` limits how many, so that the window is not cut. It calls `before` before these steps and
    `after` after them.
    """

    def __init__(
        self, config: ProfileConfig, directory: RunPath, say: Callable[[str], None]
    ) -> None:
        self._steps = config.steps
        self._phase = config.phase
        self._say = say
        # The profiler can only write to local disk. For a run in a bucket it writes into the
        # current directory.
        self._directory = (directory if isinstance(directory, Path) else Path()) / FOLDER
        # First and last step of the window, while a phase that will be traced trains.
        self._open: tuple[int, int] | None = None
        self._is_tracing = False
        self._phase_name = ""

    @contextlib.contextmanager
    def of_phase(self, name: str, *, done: int, steps: int) -> Iterator[None]:
        """Open the window for a phase that has made `done` of its `steps` steps.

        If an error or a signal ends the phase during the trace, the trace is stopped and written.
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
        """Return up to which step to train next.

        This is `until`, or an earlier step at which the window begins or ends. `done` steps are
        made.
        """
        if self._open is None:
            return until
        first, last = self._open
        borders = [border for border in (first - 1, last) if border > done]
        return min([until, *borders])

    def before(self, done: int) -> None:
        """Start the trace if the next step is the first step of the window.

        `done` steps are made, and the next step has not been dispatched yet.
        """
        if self._open is not None and done == self._open[0] - 1:
            jax.profiler.start_trace(self._trace_folder())
            self._is_tracing = True

    def after(self, done: int, state: Any) -> None:
        """Stop the trace if the last step of the window is made.

        `done` steps are made, and `state` is the result of the last step. The function waits until
        the devices have computed it.
        """
        if self._is_tracing and self._open is not None and done >= self._open[1]:
            jax.block_until_ready(state)
            # A run has only one trace.
            self._steps = None
            self._open = None
            self._stop("traced")

    def close(self) -> None:
        """Print a line at the end of a run if no phase trained the whole window."""
        if self._steps is not None:
            where = "no phase" if self._phase is None else f"no phase named {self._phase}"
            self._say(
                f"profile.steps {self._steps[0]} {self._steps[1]}: nothing was traced, because "
                f"{where} of this run trained all of these steps"
            )

    def _window(self, name: str, done: int, steps: int) -> tuple[int, int] | None:
        """Return the window if this phase trains all of its steps, else print why not."""
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
                f"{name} continues after step {done} and profile.steps is {first} {last}: this "
                "phase is not traced"
            )
            return None
        return first, last

    def _trace_folder(self) -> Path:
        """Return the folder for the trace of the current phase."""
        return self._directory / self._phase_name.replace(" ", "-")

    def _stop(self, reason: str) -> None:
        """Stop the trace and print where it was written."""
        self._is_tracing = False
        jax.profiler.stop_trace()
        assert self._directory.exists(), f"the profiler has not written to {self._directory}"
        self._say(f"profile.steps: {reason}; the trace is in {self._trace_folder()}")
