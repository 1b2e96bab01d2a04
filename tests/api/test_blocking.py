"""Functions that need an event loop of their own, called inside and outside of one."""

import asyncio
import threading

import pytest

from mujica_jax.api.blocking import outside_event_loop


async def answer() -> str:
    await asyncio.sleep(0)
    return "Ghent"


def ask() -> str:
    return asyncio.run(answer())


def fail() -> str:
    raise ValueError("no answer")


def test_outside_of_an_event_loop_the_function_runs_in_this_thread():
    assert outside_event_loop(threading.get_ident) == threading.get_ident()
    assert outside_event_loop(ask) == "Ghent"


async def test_inside_an_event_loop_it_runs_in_another_thread():
    assert outside_event_loop(threading.get_ident) != threading.get_ident()
    assert outside_event_loop(ask) == "Ghent"


async def test_its_exception_arrives_in_the_calling_thread():
    with pytest.raises(ValueError, match="no answer"):
        outside_event_loop(fail)


async def test_ctrl_c_asks_the_function_to_end_and_waits_for_it(monkeypatch):
    is_asked = threading.Event()
    has_ended = threading.Event()
    join = threading.Thread.join
    waits: list[str] = []

    def work() -> None:
        is_asked.wait()
        has_ended.set()

    def interrupted_join(thread: threading.Thread, timeout: float | None = None) -> None:
        waits.append(thread.name)
        if len(waits) == 1:
            raise KeyboardInterrupt
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", interrupted_join)
    with pytest.raises(KeyboardInterrupt):
        outside_event_loop(work, interrupt=is_asked.set)
    assert has_ended.is_set()
