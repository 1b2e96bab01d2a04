"""Measure how many seconds a run spends in each stage. Every second counts for exactly one stage.

    clock = StageClock(compiled=lambda: compile_counter().seconds)
    with clock.stage("sampling"): ...
    clock.take()        # {"sampling": 12.1, "compiling": 3.0, "other": 0.2}

Each call of `take` returns the seconds since the call before.
"""

import collections
import contextlib
import time
from collections.abc import Callable, Iterator

# The stage of all time that is spent outside every other stage.
OTHER = "other"
COMPILING = "compiling"


class StageClock:
    """A clock that divides the time of a program among its stages.

    Stages may be nested; the time then counts for the inner stage. Time for compilation counts for
    the stage "compiling", in whichever stage it happens.
    """

    def __init__(
        self,
        *,
        compiled: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the clock. `compiled` returns how many seconds compilation has taken so far."""
        self._compiled = compiled
        self._clock = clock
        self._open_stages = [OTHER]
        self._mark_time = clock()
        self._mark_compiled = compiled()
        self._total: dict[str, float] = collections.defaultdict(float)
        self._total_at_take: dict[str, float] = {}

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the time of this block for the stage `name`."""
        self._mark()
        self._open_stages.append(name)
        try:
            yield
        finally:
            self._mark()
            self._open_stages.pop()

    def seconds(self, name: str) -> float:
        """Return the seconds of one stage since the clock was started."""
        self._mark()
        return self._total[name]

    def take(self) -> dict[str, float]:
        """Return the seconds of each stage since the last call, without stages that took none."""
        self._mark()
        seconds_by_stage = {}
        for name, total in self._total.items():
            seconds = total - self._total_at_take.get(name, 0.0)
            if seconds > 0:
                seconds_by_stage[name] = seconds
        self._total_at_take = dict(self._total)
        return seconds_by_stage

    def _mark(self) -> None:
        """Add the time since the last mark to the innermost open stage.

        The part of it that was spent on compilation is added to the stage "compiling" instead.
        """
        now = self._clock()
        compiled = self._compiled()
        seconds = now - self._mark_time
        compiling_seconds = min(seconds, compiled - self._mark_compiled)
        self._total[COMPILING] += compiling_seconds
        self._total[self._open_stages[-1]] += seconds - compiling_seconds
        self._mark_time = now
        self._mark_compiled = compiled
