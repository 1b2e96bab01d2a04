"""Seconds and bytes of what a process wrote to and read from the run directory since the last
`reset`."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Literal

Kind = Literal["write", "read"]


class IoStatistics:
    """Sums; threads may share them. `retries` gives how many requests were repeated so far."""

    def __init__(self, retries: Callable[[], int] = lambda: 0) -> None:
        self._retries = retries
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        with self._lock:
            self._sums = {
                f"{kind}{what}": 0.0
                for kind in ("write", "read")
                for what in ("s", "_seconds", "_bytes")
            }
            self._retries_before = self._retries()

    @contextlib.contextmanager
    def timed(self, kind: Kind, size_bytes: int = 0) -> Iterator[None]:
        """Counts the block as one write or read of this size; `add_bytes` takes what is known only
        later."""
        began = time.monotonic()
        try:
            yield
        finally:  # a write that failed took its time too
            self.add(kind, time.monotonic() - began, size_bytes)

    def add(self, kind: Kind, seconds: float, size_bytes: int) -> None:
        """Counts one write or read."""
        with self._lock:
            self._sums[f"{kind}s"] += 1
            self._sums[f"{kind}_seconds"] += seconds
            self._sums[f"{kind}_bytes"] += size_bytes

    def add_bytes(self, kind: Kind, size_bytes: int) -> None:
        with self._lock:
            self._sums[f"{kind}_bytes"] += size_bytes

    def summary(self) -> dict[str, int | float]:
        """`writes`, `write_seconds`, `write_bytes`, the same of reads, and `repeated_requests`."""
        with self._lock:
            sums = {
                name: round(sum_, 6) if "seconds" in name else int(sum_)
                for name, sum_ in self._sums.items()
            }
            return sums | {"repeated_requests": self._retries() - self._retries_before}
