"""Run the functions of the API, which use an event loop of their own, inside any program.

A notebook already runs an event loop, and a thread can run only one. There, the function runs in
another thread.
"""

import asyncio
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")


class _Call(Generic[Result]):
    """A call of a function in a thread, with its result or its exception."""

    def __init__(self, function: Callable[[], Result]) -> None:
        self._function = function
        self._results: list[Result] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        """Call the function, and keep its result or its exception."""
        try:
            self._results.append(self._function())
        except BaseException as error:
            self._error = error

    def result(self) -> Result:
        """Return the result of the call, or raise its exception."""
        if self._error is not None:
            raise self._error
        return self._results[0]


def do_nothing() -> None:
    """Do nothing."""


def outside_event_loop(
    function: Callable[[], Result], *, interrupt: Callable[[], object] = do_nothing
) -> Result:
    """Call a function where no event loop runs, and return its result.

    This is the calling thread, or another thread if an event loop runs here. If Ctrl-C is pressed
    while the other thread works, `interrupt` is called, which asks the function to end. Then the
    call waits for it.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return function()

    call = _Call(function)
    thread = threading.Thread(target=call.run, name="mujica_jax", daemon=True)
    thread.start()
    try:
        thread.join()
    except KeyboardInterrupt:
        interrupt()
        thread.join()
        raise
    return call.result()
