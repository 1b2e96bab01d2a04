"""Asked to end: heard from anywhere, told to whoever polls, and carried out by force where nobody
does.
"""

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from mujica_jax.runtime import distributed
from mujica_jax.runtime.preemption import PreemptedError, Preemption
from tests.helpers.paths import ROOT
from tests.helpers.patience import HANG_SECONDS
from tests.helpers.whole_runs import free_port

COMPILING = """
import os, signal, threading
import jax, jax.numpy as jnp
from mujica_jax.runtime.preemption import Preemption

def deep(x):
    for _ in range(4000):
        x = jnp.sin(x) @ x
    return x

with Preemption(grace_seconds=0.5) as preemption:
    preemption.then = "go on"
    preemption.enter("warm-up: learning")
    lowered = jax.jit(deep).lower(jnp.ones((64, 64)))
    # The signal comes while the main thread is inside the compiler, however busy the machine is.
    threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
    lowered.compile()
    print("compiled", flush=True)
"""
TWO_PROCESSES = """
import os, signal, sys, time
from mujica_jax.runtime import distributed
from mujica_jax.config.schema import DistributedConfig
from mujica_jax.runtime.preemption import PreemptedError, Preemption

process, where = int(sys.argv[1]), sys.argv[3]
preemption = Preemption()

def program():
    job = DistributedConfig(coordinator=sys.argv[2], processes=2, process=process, deadline_seconds=30)
    distributed.start(job, preemption.on_notice)
    preemption.enter("round 1: " + where)
    if process == 1 and where != "learning":
        os.kill(os.getpid(), signal.SIGTERM)
    step = 0
    try:
        if where == "waiting" and process == 0:
            distributed.barrier("where the other one never comes")
        while where != "learning":
            preemption.check()
            time.sleep(0.01)
        while not preemption.at_step():
            step += 1
            distributed.barrier("a step, which takes both")
            if process == 1 and step == 20:
                os.kill(os.getpid(), signal.SIGTERM)
        preemption.check()
    except PreemptedError as ended:
        print(f"{where} {step}; {ended}", flush=True)
        if where == "learning":
            distributed.barrier("both have said so")
        raise

sys.exit(preemption.exit_status(program))
"""

THREE_PROCESSES = """
import os, signal, sys, time
from mujica_jax.runtime import distributed
from mujica_jax.config.schema import DistributedConfig
from mujica_jax.runtime.preemption import PreemptedError, Preemption

process, leaver = int(sys.argv[1]), int(sys.argv[3])
hear = distributed._on_shutdown
if process == 2:
    distributed._on_shutdown = lambda sender, notice: (time.sleep(4.0), hear(sender, notice))
preemption = Preemption()

def program():
    job = DistributedConfig(coordinator=sys.argv[2], processes=3, process=process, deadline_seconds=30)
    distributed.start(job, preemption.on_notice)
    preemption.enter("round 1: waiting")
    distributed.barrier("the beginning")
    if process == leaver:
        distributed.abort("preempted", 0)
    distributed.barrier("where one never comes")

sys.exit(preemption.exit_status(program))
"""


def until(holds: Callable[[], bool]) -> bool:
    """Wait for a condition, and return whether it came true.

    A thread of its own hears the signal.
    """
    end = time.monotonic() + HANG_SECONDS
    while not holds() and time.monotonic() < end:
        time.sleep(0.001)
    return holds()


@pytest.fixture
def ends() -> list[int]:
    """Return the list of exit statuses that stand in for exits."""
    return []


@pytest.fixture
def preemption(ends):
    with Preemption(
        kept_text="all is kept", end=ends.append, grace_seconds=HANG_SECONDS
    ) as listening:
        listening.then = "go on with: it"
        yield listening


def test_nobody_asked(preemption):
    preemption.enter("warm-up: learning")
    assert not preemption.requested
    assert not preemption.at_step()


def test_sigterm_is_told_to_whoever_polls(preemption, ends):
    preemption.enter("warm-up: learning")
    signal.raise_signal(signal.SIGTERM)
    assert until(lambda: preemption.requested)
    assert preemption.at_step()
    with pytest.raises(
        PreemptedError, match=r"^preempted in warm-up: learning; all is kept; go on with: it$"
    ):
        preemption.check()
    assert str(preemption.ended("step 3 is saved")).startswith(
        "preempted in warm-up: learning; step 3 is saved;"
    )
    assert preemption.status == 0
    assert ends == []


def test_a_phase_that_is_entered_afterwards_does_not_begin(preemption):
    preemption.enter("warm-up: learning")
    signal.raise_signal(signal.SIGTERM)
    assert until(lambda: preemption.requested)
    with pytest.raises(PreemptedError, match="in round 1: sampling; shards are kept;"):
        preemption.enter("round 1: sampling", kept_text="shards are kept")


def test_ctrl_c_ends_with_130_and_a_second_one_at_once(preemption, ends, capsys):
    preemption.enter("warm-up: learning")
    signal.raise_signal(signal.SIGINT)
    assert until(lambda: preemption.requested)
    assert preemption.status == 130
    assert ends == []
    signal.raise_signal(signal.SIGINT)
    assert until(lambda: bool(ends))
    assert ends == [130]
    message = capsys.readouterr().err
    assert "press Ctrl-C again to end at once" in message
    assert "interrupted in warm-up: learning; all is kept; go on" in message


def test_many_sigterms_are_one(preemption, ends):
    preemption.enter("warm-up: learning")
    for _ in range(100):
        signal.raise_signal(signal.SIGTERM)
    assert until(lambda: preemption.requested)
    assert ends == []


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_before_anything_began_the_end_comes_at_once(preemption, ends, capsys, number, status):
    signal.raise_signal(number)
    assert until(lambda: bool(ends))
    assert ends == [status]
    assert "before anything began; go on with: it" in capsys.readouterr().err


def test_where_nobody_polls_the_process_ends_after_the_grace_time(ends, capsys):
    with Preemption(end=ends.append, grace_seconds=0.05) as preemption:
        preemption.enter("warm-up: learning", kept_text="step 7 is kept")
        preemption.keeps("step 9 is kept")
        signal.raise_signal(signal.SIGTERM)
        assert until(lambda: bool(ends))
        assert ends == [0]
    assert "preempted in warm-up: learning; step 9 is kept" in capsys.readouterr().err


def test_whoever_was_told_is_not_ended_in_the_middle(ends, monkeypatch):
    polled = threading.Event()
    grace_is_over = threading.Event()
    wait_for_bytes = select.select

    def wait_until_polled(reading, writing, errors, seconds):
        """Stand in for `select`: the grace time ends when the main thread has polled.

        A wait after that has no time limit and says that the grace is over.
        """
        if seconds is not None:
            assert polled.wait(HANG_SECONDS)
        elif polled.is_set():
            grace_is_over.set()
        return wait_for_bytes(reading, writing, errors, seconds)

    monkeypatch.setattr(select, "select", wait_until_polled)
    with Preemption(end=ends.append, grace_seconds=0.1) as preemption:
        preemption.enter("warm-up: learning")
        signal.raise_signal(signal.SIGTERM)
        assert until(lambda: preemption.requested)
        polled.set()
        assert grace_is_over.wait(HANG_SECONDS)
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
    own = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    streams: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(
        [sys.executable, "-c", source, *words], cwd=ROOT, env=os.environ | own, **streams
    )


def test_a_compilation_cannot_be_interrupted_and_is_ended():
    compiling = program(COMPILING)
    try:
        output, messages = compiling.communicate(timeout=HANG_SECONDS)
    finally:
        compiling.kill()
    # It ended before the program was compiled.
    assert compiling.returncode == 0
    assert output == ""
    assert messages.strip().endswith(
        "preempted in warm-up: learning; finished work is saved; go on"
    )


class Others:
    """Records what the other processes of the job are told. `answer` is that of process 0."""

    def __init__(self, monkeypatch) -> None:
        self.announced: list[int] = []
        self.aborts: list[tuple[str, int]] = []
        # None means that this is process 0.
        self.answer: list[object] | None = None
        monkeypatch.setattr(distributed, "announce_preemption", self.announced.append)
        monkeypatch.setattr(
            distributed, "abort", lambda sentence, status: self.aborts.append((sentence, status))
        )
        monkeypatch.setattr(distributed, "broadcast", lambda name, decide: self.answer or decide())


@pytest.fixture
def others(monkeypatch) -> Others:
    return Others(monkeypatch)


def test_the_others_are_told_of_a_signal(preemption, others):
    preemption.enter("warm-up: learning")
    signal.raise_signal(signal.SIGTERM)
    assert until(lambda: preemption.requested)
    assert others.announced == [signal.SIGTERM]


def test_a_notice_of_another_process_is_heard_as_a_signal_and_not_told_again(
    preemption, ends, others
):
    preemption.enter("warm-up: learning")
    preemption.on_notice(signal.SIGTERM)
    assert until(lambda: preemption.requested)
    assert preemption.at_step()
    assert preemption.status == 0
    assert ends == []
    assert others.aborts == []
    assert others.announced == []


def test_process_0_decides_before_which_step_all_stop(preemption, others):
    preemption.enter("warm-up: learning")
    others.answer = [False, 0]
    signal.raise_signal(signal.SIGTERM)
    # The others do not stop here.
    assert until(lambda: preemption._asked)
    assert not preemption.at_step()
    others.answer = [True, 130]
    assert preemption.at_step()
    assert preemption.status == 130


def test_an_interrupt_in_all_processes_at_once_is_no_second_one(preemption, ends, others, capsys):
    """A terminal sends it so: each process hears its own, and those of the others."""
    preemption.enter("warm-up: learning")
    preemption.on_notice(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)
    preemption.on_notice(signal.SIGINT)
    assert until(lambda: others.announced == [signal.SIGINT])
    assert preemption.requested
    assert preemption.status == 130
    assert ends == []


def test_a_process_that_is_ended_in_the_middle_tells_the_others(ends, others):
    with Preemption(end=ends.append, grace_seconds=0.05) as preemption:
        preemption.enter("round 1: sampling", kept_text="shards are kept")
        signal.raise_signal(signal.SIGTERM)
        assert until(lambda: bool(ends))
    assert others.aborts == [("preempted in round 1: sampling; shards are kept", 0)]


def said_by_processes(count: int, source: str, word: str) -> list[tuple[str, str]]:
    """Return output and messages of each process of a job, all of which end well."""
    address = f"localhost:{free_port()}"
    running = [program(source, str(process), address, word) for process in range(count)]
    try:
        outputs = [process.communicate(timeout=HANG_SECONDS) for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0] * count, outputs
    assert not any("Traceback" in messages for _, messages in outputs), outputs
    return outputs


@pytest.mark.slow
@pytest.mark.parametrize("where", ["learning", "sampling", "waiting"])
def test_the_processes_of_a_run_end_together(where):
    """One SIGTERM to one of them is enough.

    In training they end before the same step, elsewhere each where it is.
    """
    outputs = said_by_processes(2, TWO_PROCESSES, where)
    (first, reasons), (second, _) = outputs
    if where == "learning":
        assert first == second
        assert int(first.partition(";")[0].split()[-1]) > 20
    else:
        assert "preempted in round 1" in second
        assert first == second or f"ended: preempted in round 1: {where}" in reasons


@pytest.mark.slow
@pytest.mark.parametrize("leaver", [0, 1])
def test_all_read_of_an_end_before_the_process_that_holds_the_store_is_gone(leaver):
    """A process may read it seconds later, since a machine may be that busy."""
    outputs = said_by_processes(3, THREE_PROCESSES, str(leaver))
    for process, (_, messages) in enumerate(outputs):
        assert (f"process {leaver} on" in messages and "ended: preempted" in messages) == (
            process != leaver
        ), outputs
