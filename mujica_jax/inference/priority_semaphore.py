"""Who may go on at once: a number of places, and a line of bounded length before them."""

import asyncio
import contextlib
import heapq
from collections.abc import AsyncIterator

from mujica_jax.inference.requests import OverloadError


class PrioritySemaphore:
    """Use from one event loop at a time."""

    def __init__(self, places: int, max_waiting: int) -> None:
        self._places, self._most_waiting = places, max_waiting
        self._free = places
        self._arrived = 0
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []

    @contextlib.asynccontextmanager
    async def place(self, *, overtakes: bool) -> AsyncIterator[None]:
        """Hold one of the places; callers with `overtakes` go before those without. Raises OverloadError where the line
        is full.
        """
        await self._enter(overtakes)
        try:
            yield
        finally:
            self._leave()

    async def _enter(self, overtakes: bool) -> None:
        if self._free:
            self._free -= 1
            return
        if len(self._waiting) >= self._most_waiting:
            raise OverloadError(
                f"{self._places} requests are under way and {len(self._waiting)} wait, of at most "
                f"{self._most_waiting}: come back later, or send fewer at once"
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._arrived += 1
        entry = (0 if overtakes else 1, self._arrived, turn)
        heapq.heappush(self._waiting, entry)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # the place came in the same moment
                self._leave()
            elif entry in self._waiting:
                self._waiting.remove(entry)
                heapq.heapify(self._waiting)
            raise

    def _leave(self) -> None:
        while self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():  # else cancelled, and not yet taken out of the line
                turn.set_result(None)  # the place is handed on
                return
        self._free += 1
