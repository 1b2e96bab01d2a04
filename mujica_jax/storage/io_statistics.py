"""Count and time the reads and writes of this process in the run directory."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Literal

Kind = Literal["write", "read"]
SUMS = ("writes", "write_seconds", "write_bytes", "reads", "read_seconds", "read_bytes")


class IoStatistics:
    """Numbers, seconds and bytes of reads and writes since the last `reset`.

    Threads may share an object.
    """

    def __init__(self, retries: Callable[[], int] = lambda: 0) -> None:
        """Start with zeros. `retries` returns how many requests were repeated so far."""
        self._retries = retries
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Set all sums to zero."""
        with self._lock:
            self._sums: dict[str, float] = dict.fromkeys(SUMS, 0.0)
            self._retries_before = self._retries()

    @contextlib.contextmanager
    def timed(self, kind: Kind, size_bytes: int = 0) -> Iterator[None]:
        """Time the body of the `with`, and count it as one write or read of this size.

        If the size is known only later, leave it 0 here and call `add_bytes`.
        """
        start_time = time.monotonic()
        try:
            yield
        finally:
            # A failed write counts too, because it also took time.
            self.add(kind, time.monotonic() - start_time, size_bytes)

    def add(self, kind: Kind, seconds: float, size_bytes: int) -> None:
        """Count one write or read."""
        with self._lock:
            self._sums[f"{kind}s"] += 1
            self._sums[f"{kind}_seconds"] += seconds
            self._sums[f"{kind}_bytes"] += size_bytes

    def add_bytes(self, kind: Kind, size_bytes: int) -> None:
        """Add bytes to a write or read that is already counted."""
        with self._lock:
            self._sums[f"{kind}_bytes"] += size_bytes

    def summary(self) -> dict[str, int | float]:
        """Return the sums since the last reset: those of `SUMS`, and `repeated_requests`."""
        summary: dict[str, int | float] = {}
        with self._lock:
            for name, value in self._sums.items():
                summary[name] = round(value, 6) if "seconds" in name else int(value)
            summary["repeated_requests"] = self._retries() - self._retries_before
        return summary
