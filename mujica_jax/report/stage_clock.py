"""Where the time of a run goes: seconds by stage, each second in one of them.

clock = StageClock(compiled=lambda: compile_counter().seconds)
with clock.stage("sampling"): ...
clock.take()        # {"sampling": 12.1, "compiling": 3.0, "other": 0.2}, and start from zero
"""

import collections
import contextlib
import time
from collections.abc import Callable, Iterator

OTHER = "other"  # outside every stage
COMPILING = "compiling"


class StageClock:
    """Stages may be nested: the inner one has the time. Compilation is a stage of its own wherever
    it happens."""

    def __init__(
        self,
        *,
        compiled: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`compiled` gives the seconds that compiling has taken so far."""
        self._compiled, self._clock = compiled, clock
        self._open = [OTHER]
        self._since, self._compiled_before = clock(), compiled()
        self._total: dict[str, float] = collections.defaultdict(float)
        self._taken: dict[str, float] = {}

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self._mark()
        self._open.append(name)
        try:
            yield
        finally:
            self._mark()
            self._open.pop()

    def seconds(self, name: str) -> float:
        """Of one stage, since the beginning."""
        self._mark()
        return self._total[name]

    def take(self) -> dict[str, float]:
        """Seconds of every stage since the last time that this was asked."""
        self._mark()
        found = {name: total - self._taken.get(name, 0.0) for name, total in self._total.items()}
        self._taken = dict(self._total)
        return {name: seconds for name, seconds in found.items() if seconds > 0}

    def _mark(self) -> None:
        """Give the time since the last mark to the stage that is open."""
        now, compiled = self._clock(), self._compiled()
        passed = now - self._since
        compiling = min(passed, compiled - self._compiled_before)
        self._total[COMPILING] += compiling
        self._total[self._open[-1]] += passed - compiling
        self._since, self._compiled_before = now, compiled
