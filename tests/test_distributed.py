"""Roll call, watch and what one process makes of a job. Jobs of several processes: `test_devices.py`, `loops/test_hosts.py`."""

import contextlib
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mujica_jax import train
from mujica_jax.config.schema import DistributedConfig
from mujica_jax.errors import UserError
from mujica_jax.methods import setup as start
from mujica_jax.runtime import distributed
from mujica_jax.runtime.heartbeat import LOST, MAX_SECONDS_FOR_ALL_TO_KNOW, Heartbeat
from mujica_jax.runtime.preemption import Preemption
from mujica_jax.runtime.preemption_sync import PreemptionSync
from mujica_jax.runtime.rendezvous import listens, rendezvous

ROOT = Path(__file__).resolve().parent.parent
DEADLINE = 10.0


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def called(*callers: tuple[int, int], deadline: float = 5.0, host: str = "host {}") -> list[object]:
    """What each of the callers, (number of processes, process), is answered; `(0, 0)` connects and says nothing."""
    address = f"localhost:{free_port()}"

    def call(caller: tuple[int, int]) -> object:
        processes, process = caller
        try:
            return rendezvous(address, processes, process, host=host.format(process), deadline_seconds=deadline)
        except UserError as error:
            return str(error).replace(address, "ADDRESS")

    with ThreadPoolExecutor(len(callers)) as threads:
        return list(threads.map(call, callers))


def test_the_roll_call_tells_everybody_everybodys_name():
    assert called((3, 0), (3, 1), (3, 2)) == [("host 0", "host 1", "host 2")] * 3


def test_the_roll_call_names_who_does_not_come():
    answer = (
        "processes 1, 3 of 4 did not come to distributed.coordinator ADDRESS within 1 s: start all of them at the same time, "
        "and let their machines reach that address"
    )
    assert called((4, 0), (4, 2), deadline=1.0) == [answer, answer]


def test_a_coordinator_that_nobody_serves_is_one_sentence_within_the_deadline():
    began = time.monotonic()
    (answer,) = called((2, 1), deadline=1.0)
    assert time.monotonic() - began < 10
    assert str(answer).startswith(
        "process 1 on host 1 did not reach process 0 at distributed.coordinator ADDRESS within 1 s"
    )


def test_the_roll_call_refuses_other_counts_and_numbers_that_come_twice():
    answers = called((2, 0), (3, 1))
    assert answers[0] == answers[1]
    assert "process 1 on host 1 was started with distributed.processes 3 and process 0 on host 0 with 2" in str(
        answers[0]
    )
    answers = called((3, 0), (3, 1), (3, 1))
    assert answers[0] == answers[1] == answers[2]
    assert "distributed.process is 1 on host 1 and on host 1" in str(answers[0])


def test_the_roll_call_listens_to_no_strangers():
    port = free_port()
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(rendezvous, f"localhost:{port}", 2, 0, host="a", deadline_seconds=20.0)
        until = time.monotonic() + 5
        while not listens(("localhost", port), 1.0) and time.monotonic() < until:
            time.sleep(0.01)
        for said in (b"GET / HTTP/1.1\r\n\r\n", b'{"process": 1}\n', b"[]\n", b"[" * 100_000 + b"\n"):
            with socket.create_connection(("localhost", port)) as stranger:
                stranger.sendall(said)
        second = threads.submit(rendezvous, f"localhost:{port}", 2, 1, host="b", deadline_seconds=20.0)
        assert first.result() == second.result() == ("a", "b")


def test_a_port_that_is_taken_is_one_sentence():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"process 0 cannot listen at port {port} of distributed.coordinator"):
            rendezvous(f"localhost:{port}", 2, 0, host="a", deadline_seconds=1.0)


@pytest.mark.parametrize("address", ["somewhere", ":8476", "host:", "host:0", "host:99999", "host:port"])
def test_an_address_without_a_port_is_refused(address):
    with pytest.raises(UserError, match="must be the host of process 0 and a free port there"):
        rendezvous(address, 2, 1, host="a", deadline_seconds=1.0)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            ["--distributed.processes", "2"],
            "distributed.processes is 2, distributed.process 0 and there is no coordinator",
        ),
        (
            ["--distributed.process", "1"],
            "distributed.processes is 1, distributed.process 1 and there is no coordinator",
        ),
        (["--distributed.coordinator", "a:1"], "distributed.coordinator is a:1 and distributed.processes is 1"),
        (
            ["--distributed.coordinator", "a:1", "--distributed.processes", "2", "--distributed.process", "2"],
            "distributed.process is 2 and distributed.processes 2: number the processes from 0 to 1",
        ),
        (["--distributed.deadline-seconds", "0"], "distributed.deadline_seconds is 0.0 and must be at least 1"),
        (["--distributed.barrier-seconds", "0"], "distributed.barrier_seconds is 0.0 and must be at least 1"),
        (
            ["--distributed.coordinator", "nowhere", "--distributed.processes", "2"],
            "distributed.coordinator is nowhere and must be the host of process 0 and a free port there",
        ),
    ],
)
def test_a_job_that_is_half_described_is_one_sentence(flags, sentence, capsys):
    assert train.main(flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {sentence}")


class Others:
    """The store of a job of three processes as process `me` sees it, on a clock of its own."""

    def __init__(self, monkeypatch, me: int, *, gone: bool = False) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.silent: set[int] = set()
        self.left: dict[int, tuple[int, str]] = {}
        self.confirmed: set[int] = set()
        self.all_know = True
        self.counts = dict.fromkeys(range(3), 0)
        self.watch = Heartbeat(
            ("a", "b", "c"),
            me,
            deadline_seconds=DEADLINE,
            exchange=self.exchange,
            shutdown_notices=lambda: self.left,
            confirm=lambda: self.confirmed.add(me),
            all_know=lambda: self.all_know,
            preemption_sync=PreemptionSync(3, read=lambda what: {}, write=lambda what, value: None),
            store_is_gone=lambda: gone,
        )

    def exchange(self, count: int) -> dict[int, int]:
        if 0 in self.silent:
            raise ConnectionError("the store lives in process 0")
        self.counts |= {process: count for process in self.counts if process not in self.silent}
        return dict(self.counts)

    def until_a_verdict(self, most_seconds: float) -> tuple[float, tuple[int, str] | None]:
        """Seconds on the clock until the watch has something to say."""
        began, count = self.now, 0
        while self.now - began < most_seconds:
            self.now += self.watch.interval_seconds
            count += 1
            with contextlib.suppress(ConnectionError):
                self.watch.beat(int(self.now * 1000))
            if (verdict := self.watch.verdict()) is not None:
                return self.now - began, verdict
        return most_seconds, None


def test_the_watch_is_content_with_processes_that_beat(monkeypatch):
    assert Others(monkeypatch, 1).until_a_verdict(10 * DEADLINE)[1] is None


@pytest.mark.parametrize("me", [0, 1])
def test_the_watch_names_who_is_silent_before_the_deadline(monkeypatch, me):
    others = Others(monkeypatch, me)
    assert others.until_a_verdict(3)[1] is None
    others.silent = {2}
    seconds, verdict = others.until_a_verdict(DEADLINE)
    assert DEADLINE / 2 < seconds < DEADLINE
    assert verdict is not None
    assert verdict[0] == LOST
    assert verdict[1].startswith("process 2 on c has not been heard of for")
    assert f"so process {me} on {'ab'[me]} ends too" in verdict[1]


def test_the_watch_names_several(monkeypatch):
    others = Others(monkeypatch, 0)
    others.silent = {1, 2}
    _, verdict = others.until_a_verdict(DEADLINE)
    assert verdict is not None and verdict[1].startswith("process 1 on b and process 2 on c have not been heard of for")


@pytest.mark.parametrize(("gone", "least", "most"), [(False, DEADLINE / 2, DEADLINE), (True, 0, DEADLINE / 3)])
def test_the_watch_names_the_process_that_holds_the_store(monkeypatch, gone, least, most):
    """At once where it is certain, after the silence where it only does not answer."""
    others = Others(monkeypatch, 2, gone=gone)
    others.silent = {0}
    seconds, verdict = others.until_a_verdict(DEADLINE)
    assert least < seconds < most
    assert verdict is not None and verdict[0] == LOST
    assert verdict[1].startswith("process 0 on a is gone" if gone else "process 0 on a has not been heard of for")


def test_the_watch_passes_on_how_another_one_ended(monkeypatch):
    others = Others(monkeypatch, 0)
    others.left = {0: (2, "its own sentence")}
    assert others.until_a_verdict(3)[1] is None
    others.left[1] = (2, "the disk is full")
    assert others.until_a_verdict(3)[1] == (2, "process 1 on b ended: the disk is full")


def test_a_process_confirms_that_it_has_read_of_an_end_and_ends(monkeypatch):
    others = Others(monkeypatch, 1)
    assert others.until_a_verdict(3)[1] is None and not others.confirmed
    others.left = {2: (0, "preempted")}
    others.all_know = False  # for process 0 alone to wait for
    seconds, verdict = others.until_a_verdict(DEADLINE)
    assert verdict == (0, "process 2 on c ended: preempted") and seconds == others.watch.interval_seconds
    assert others.confirmed == {1}


def test_the_process_that_holds_the_store_ends_when_all_know_and_had_time_to_end(monkeypatch):
    others = Others(monkeypatch, 0)
    others.left, others.all_know = {1: (0, "preempted")}, False
    assert others.until_a_verdict(3)[1] is None
    others.all_know = True
    others.watch.beat(1)
    assert others.watch.verdict() is None
    assert others.until_a_verdict(3) == (others.watch.seconds_to_end, (0, "process 1 on b ended: preempted"))


def test_the_process_that_holds_the_store_does_not_wait_for_one_that_is_lost(monkeypatch):
    others = Others(monkeypatch, 0)
    others.left, others.all_know, others.silent = {1: (0, "preempted")}, False, {2}
    seconds, verdict = others.until_a_verdict(DEADLINE)
    assert verdict == (0, "process 1 on b ended: preempted")
    assert seconds <= MAX_SECONDS_FOR_ALL_TO_KNOW + 2 * others.watch.interval_seconds


def test_an_end_that_cannot_be_confirmed_is_one_all_the_same(monkeypatch):
    others = Others(monkeypatch, 1)

    def fails() -> None:
        raise ConnectionError("the store is gone")

    others.watch._confirm = fails
    others.left = {2: (0, "preempted")}
    assert others.until_a_verdict(DEADLINE)[1] == (0, "process 2 on c ended: preempted")


def test_the_watch_ends_the_process_once_and_says_why(capsys):
    ended = threading.Event()
    statuses = []

    def end(status: int) -> None:
        statuses.append(status)
        ended.set()

    watch = Heartbeat(
        ("a", "b"),
        0,
        deadline_seconds=1.0,
        exchange=lambda count: {0: count, 1: 0},
        shutdown_notices=dict,
        confirm=lambda: None,
        all_know=lambda: True,
        preemption_sync=PreemptionSync(2, read=lambda what: {}, write=lambda what, value: None),
        store_is_gone=lambda: False,
        end=end,
    )
    for thread in watch._threads:  # without `start`, which changes what SIGABRT does to this process
        thread.start()
    assert ended.wait(5)
    watch.stop()
    for thread in watch._threads:
        thread.join(5)
    assert statuses == [LOST]
    assert "process 1 on b has not been heard of" in capsys.readouterr().err


def test_a_job_of_one_process_waits_for_nobody_and_keeps_all_the_work():
    distributed.start(DistributedConfig(), Preemption())
    distributed.barrier("anything")
    assert distributed.broadcast("anything", lambda: [1, 2]) == [1, 2]
    assert distributed.primary_first("anything", lambda: 3) == 3
    assert distributed.shard_for_process("abc") == ["a", "b", "c"]
    assert distributed.is_primary()
    distributed.abort("nothing happens", 2)
    distributed.finish()


def test_a_job_of_one_process_imports_nothing():
    program = (
        "import sys\nfrom mujica_jax.runtime import distributed\nfrom mujica_jax.config.schema import DistributedConfig\n"
        "from mujica_jax.runtime.preemption import Preemption\n"
        "distributed.start(DistributedConfig(), Preemption()); distributed.barrier('x'); distributed.finish()\n"
        "print([name for name in ('jax', 'mujica_jax.runtime.heartbeat') if name in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_a_run_directory_that_hosts_do_not_share_is_one_sentence(monkeypatch, tmp_path):
    start._open_shared(tmp_path / "a", {})
    monkeypatch.setattr(distributed, "_job", distributed.Job(hosts=("a", "b"), process=1))
    assert start._open_shared(tmp_path / "a", {}).root == tmp_path / "a"
    with pytest.raises(UserError, match=r"process 1 on b sees no run in .*, which process 0 has begun"):
        start._open_shared(tmp_path / "b", {})
    assert not (tmp_path / "b" / "config.json").exists()


def test_a_pod_of_several_workers_is_recognised(monkeypatch, tmp_path):
    from jax._src.clusters import cloud_tpu_cluster

    device = tmp_path / "accel0"
    monkeypatch.setattr(distributed, "TPU_DEVICES", (str(device),))
    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "10.0.0.1,10.0.0.2,10.0.0.3,10.0.0.4")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.delenv("MEGASCALE_NUM_SLICES", raising=False)
    assert distributed._pod_processes() == 1, "no TPU here"
    device.touch()
    monkeypatch.setenv("MEGASCALE_NUM_SLICES", "2")
    assert distributed._pod_processes() == 8
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert distributed._pod_processes() == 1
