"""Ctrl-C and SIGTERM, held back while a file is being written.

Both end a run by `KeyboardInterrupt` (see `train.main`). Raised inside a checkpoint library's save, it would leave that library's
threads without the executor they still submit to; so a save is finished first, which takes a moment.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Signals that come inside are delivered at the end, once each kind. Off the main thread, where none arrives, it does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: set[int] = set()

    def remember(number: int, frame: FrameType | None) -> None:
        arrived.add(number)

    previous = {number: signal.signal(number, remember) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        for number in arrived:
            signal.raise_signal(number)
