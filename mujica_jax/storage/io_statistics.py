"""What the run directory costs: seconds and bytes of all that was written and read, since they were last asked for."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator


class Costs:
    """Sums of one process; threads may share it. `repeated` says how many requests were sent again so far."""

    def __init__(self, repeated: Callable[[], int] = lambda: 0) -> None:
        self._repeated = repeated
        self._lock = threading.Lock()
        self._sums: dict[str, int | float] = {}
        self.forget()

    @contextlib.contextmanager
    def writing(self, size_bytes: int = 0) -> Iterator[None]:
        """Counts the block as one write of this size; what is known only later is given to `add_bytes`."""
        with self._timed("write", size_bytes):
            yield

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        with self._timed("read", 0):
            yield

    def add_bytes(self, *, written: int = 0, read: int = 0) -> None:
        with self._lock:
            self._sums["write_bytes"] += written
            self._sums["read_bytes"] += read

    def summary(self) -> dict[str, int | float]:
        """`writes`, `write_seconds`, `write_bytes`, the same of reads, and `repeated_requests`."""
        with self._lock:
            sums = {name: round(value, 6) for name, value in self._sums.items()}
            return sums | {"repeated_requests": self._repeated() - self._repeated_before}

    def forget(self) -> None:
        """Begin again at zero."""
        with self._lock:
            for kind in ("write", "read"):
                self._sums |= {f"{kind}s": 0, f"{kind}_seconds": 0.0, f"{kind}_bytes": 0}
            self._repeated_before = self._repeated()

    @contextlib.contextmanager
    def _timed(self, kind: str, size_bytes: int) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:  # a write that failed took its time too
            with self._lock:
                self._sums[f"{kind}s"] += 1
                self._sums[f"{kind}_seconds"] += time.monotonic() - began
                self._sums[f"{kind}_bytes"] += size_bytes
