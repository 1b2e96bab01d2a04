"""A signal that comes while a file is written is delivered after it."""

import signal
import threading

import pytest

from mujica_jax.interrupts import interrupts_deferred


@pytest.fixture(autouse=True)
def as_in_training():
    """Both signals raise KeyboardInterrupt, as `train.main` sets them."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_for_the_end(number):
    steps = []
    with pytest.raises(KeyboardInterrupt), interrupts_deferred():
        signal.raise_signal(number)
        steps.append("written")
    assert steps == ["written"]
    assert signal.getsignal(number) is signal.default_int_handler


def test_without_a_signal_nothing_happens():
    with interrupts_deferred():
        written = True
    assert written and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_inside_passes_and_the_handlers_are_put_back():
    with pytest.raises(OSError, match="full"), interrupts_deferred():
        raise OSError("full")
    assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler


def test_in_another_thread_the_handlers_are_left_alone():
    seen = []

    def write():
        with interrupts_deferred():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
