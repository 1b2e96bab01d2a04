"""Asked to end: heard from anywhere, told to whoever polls, and carried out by force where nobody does."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mujica_jax.preemption import Preempted, Preemption

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 60.0  # far more than anything here takes
COMPILING = """
import sys
import jax, jax.numpy as jnp
from mujica_jax.preemption import Preemption

def deep(x):
    for _ in range(4000):
        x = jnp.sin(x) @ x
    return x

with Preemption(grace_seconds=0.5) as preemption:
    preemption.then = "go on"
    preemption.enter("warm-up: learning")
    lowered = jax.jit(deep).lower(jnp.ones((64, 64)))
    print("compiling", flush=True)
    lowered.compile()
    print("compiled", flush=True)
"""
TWO_PROCESSES = """
import os, signal, sys, time
import jax
from mujica_jax.preemption import Preemption

process = int(sys.argv[1])
with Preemption() as preemption:
    jax.distributed.initialize(sys.argv[2], num_processes=2, process_id=process)
    preemption.enter("warm-up: learning")
    step = 0
    while not preemption.at_step():
        step += 1
        time.sleep(0.01 * (1 + process))
        if process == 1 and step == 20:
            os.kill(os.getpid(), signal.SIGTERM)
    print(f"stopped at {step}", flush=True)
"""


def until(holds: Callable[[], bool]) -> bool:
    """Whether it comes true: a thread of its own hears the signal."""
    end = time.monotonic() + SECONDS
    while not holds() and time.monotonic() < end:
        time.sleep(0.001)
    return holds()


@pytest.fixture
def ends() -> list[int]:
    """Exit statuses, in the place of exits."""
    return []


@pytest.fixture
def preemption(ends):
    with Preemption(kept="all is kept", end=ends.append, grace_seconds=SECONDS) as listening:
        listening.then = "go on with: it"
        yield listening


def test_nobody_asked(preemption):
    preemption.enter("warm-up: learning")
    assert not preemption.requested and not preemption.at_step()


def test_sigterm_is_told_to_whoever_polls(preemption, ends):
    preemption.enter("warm-up: learning")
    signal.raise_signal(signal.SIGTERM)
    assert until(lambda: preemption.requested) and preemption.at_step()
    with pytest.raises(Preempted, match=r"^preempted in warm-up: learning; all is kept; go on with: it$"):
        preemption.check()
    assert str(preemption.ended("step 3 is saved")).startswith("preempted in warm-up: learning; step 3 is saved;")
    assert (preemption.status, ends) == (0, [])


def test_a_phase_that_is_entered_afterwards_does_not_begin(preemption):
    preemption.enter("warm-up: learning")
    signal.raise_signal(signal.SIGTERM)
    assert until(lambda: preemption.requested)
    with pytest.raises(Preempted, match="in round 1: sampling; shards are kept;"):
        preemption.enter("round 1: sampling", kept="shards are kept")


def test_ctrl_c_ends_with_130_and_a_second_one_at_once(preemption, ends, capsys):
    preemption.enter("warm-up: learning")
    signal.raise_signal(signal.SIGINT)
    assert until(lambda: preemption.requested)
    assert (preemption.status, ends) == (130, [])
    signal.raise_signal(signal.SIGINT)
    assert until(lambda: bool(ends)) and ends == [130]
    said = capsys.readouterr().err
    assert "Ctrl-C again ends at once" in said and "interrupted in warm-up: learning; all is kept; go on" in said


def test_many_sigterms_are_one(preemption, ends):
    preemption.enter("warm-up: learning")
    for _ in range(100):
        signal.raise_signal(signal.SIGTERM)
    assert until(lambda: preemption.requested) and ends == []


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_before_anything_began_the_end_comes_at_once(preemption, ends, capsys, number, status):
    signal.raise_signal(number)
    assert until(lambda: bool(ends)) and ends == [status]
    assert "before anything began; go on with: it" in capsys.readouterr().err


def test_where_nobody_polls_the_process_ends_after_the_grace_time(ends, capsys):
    with Preemption(end=ends.append, grace_seconds=0.05) as preemption:
        preemption.enter("warm-up: learning", kept="step 7 is kept")
        signal.raise_signal(signal.SIGTERM)
        assert until(lambda: bool(ends)) and ends == [0]
    assert "preempted in warm-up: learning; step 7 is kept" in capsys.readouterr().err


def test_whoever_was_told_is_not_ended_in_the_middle(ends):
    with Preemption(end=ends.append, grace_seconds=0.1) as preemption:
        preemption.enter("warm-up: learning")
        signal.raise_signal(signal.SIGTERM)
        assert until(lambda: preemption.requested)
        time.sleep(0.3)
    assert ends == []


def test_afterwards_everything_is_as_before():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    descriptors = os.listdir("/proc/self/fd")
    with Preemption():
        assert signal.getsignal(signal.SIGTERM) is not before[0]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert len(os.listdir("/proc/self/fd")) == len(descriptors)


def test_in_another_thread_it_hears_nothing_and_does_no_harm():
    heard = []

    def listen() -> None:
        with Preemption() as preemption:
            heard.append(preemption.requested)

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert heard == [False]


def program(source: str, *words: str) -> subprocess.Popen[str]:
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }
    command = [sys.executable, "-c", source, *words]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_compilation_cannot_be_interrupted_and_is_ended():
    compiling = program(COMPILING)
    try:
        assert compiling.stdout is not None and compiling.stdout.readline() == "compiling\n"
        compiling.send_signal(signal.SIGTERM)
        said, messages = compiling.communicate(timeout=SECONDS)
    finally:
        compiling.kill()
    assert (compiling.returncode, said) == (0, ""), "it ended before the program was compiled"
    assert messages.strip().endswith("preempted in warm-up: learning; what was finished is kept; go on")


@pytest.mark.slow
def test_the_processes_of_a_run_stop_at_the_same_step(free_port):
    address = f"localhost:{free_port}"
    running = [program(TWO_PROCESSES, str(process), address) for process in range(2)]
    try:
        said = [process.communicate(timeout=SECONDS) for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], said
    first, second = (output for output, _ in said)
    assert first == second and int(first.split()[-1]) > 20


@pytest.fixture
def free_port() -> int:
    import socket

    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        return listening.getsockname()[1]
