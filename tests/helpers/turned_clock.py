"""A clock that a test turns, for code that waits in an event loop.

The load of the machine does not matter then.

The thread that makes the clock sees it as `time.monotonic` and in its event loops, so that
time-outs of asyncio follow it. A coroutine that sleeps turns the clock itself and goes on at once.
Other threads, such as those of a test's server, keep the real clock.
"""

import asyncio
import contextlib
import threading
import time

import pytest


class TurnedClock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self._thread = threading.current_thread()
        self._lock = threading.Lock()
        self._loops: set[asyncio.BaseEventLoop] = set()
        self._real_seconds = time.monotonic
        self._real_sleep = asyncio.sleep
        monkeypatch.setattr(time, "monotonic", self._seconds)
        monkeypatch.setattr(asyncio.BaseEventLoop, "time", lambda loop: self._seconds_of(loop))
        monkeypatch.setattr(asyncio, "sleep", self._sleep)

    def turn(self, seconds: float) -> None:
        """Let this much time pass. Any thread may call this."""
        self._turn_to(self.now + seconds)

    def _turn_to(self, now: float) -> None:
        with self._lock:
            self.now = max(self.now, now)
        for loop in list(self._loops):
            # A loop that waits for its next time-out looks at the clock again. One that is closed
            # does not.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(lambda: None)

    def _is_turned_here(self) -> bool:
        return threading.current_thread() is self._thread

    def _seconds(self) -> float:
        return self.now if self._is_turned_here() else self._real_seconds()

    def _seconds_of(self, loop: asyncio.BaseEventLoop) -> float:
        if self._is_turned_here():
            self._loops.add(loop)
        return self._seconds()

    async def _sleep(self, seconds: float, result: object = None) -> object:
        if not self._is_turned_here():
            return await self._real_sleep(seconds, result)
        until = self.now + seconds
        await self._real_sleep(0)
        self._turn_to(until)
        return result
