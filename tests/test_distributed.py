"""Rendezvous, heartbeat, notices, and what one process makes of a job. Jobs of several:
`test_devices.py`, `loops/test_hosts.py`."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from jax.errors import JaxRuntimeError
from patience import HANG_SECONDS
from whole_runs import free_port

from mujica_jax import train
from mujica_jax.config.schema import DistributedConfig
from mujica_jax.errors import UserError
from mujica_jax.runs import setup as start
from mujica_jax.runtime import distributed, heartbeat
from mujica_jax.runtime import rendezvous as rendezvous_module
from mujica_jax.runtime.distributed import PREEMPTED, SHUTDOWN, HostMissing
from mujica_jax.runtime.heartbeat import LOST, Heartbeat
from mujica_jax.runtime.rendezvous import rendezvous

ROOT = Path(__file__).resolve().parent.parent
DEADLINE = 10.0


def called(
    *callers: tuple[int, int],
    process_0_waits: float = HANG_SECONDS,
    others_wait: float = HANG_SECONDS,
) -> list[object]:
    """What each of the callers, (number of processes, process), is answered."""
    address = f"localhost:{free_port()}"

    def call(caller: tuple[int, int]) -> object:
        processes, process = caller
        seconds = others_wait if process else process_0_waits
        try:
            return rendezvous(
                address, processes, process, host=f"host {process}", deadline_seconds=seconds
            )
        except UserError as error:
            return str(error).replace(address, "ADDRESS")

    with ThreadPoolExecutor(len(callers)) as threads:
        return list(threads.map(call, callers))


def test_the_rendezvous_tells_all_processes_the_names_of_all():
    assert called((3, 0), (3, 1), (3, 2)) == [("host 0", "host 1", "host 2")] * 3


def test_the_rendezvous_names_the_missing_processes(monkeypatch):
    has_called, create_server, send = (
        threading.Event(),
        socket.create_server,
        rendezvous_module._send,
    )

    def send_and_tell(connection, value):
        send(connection, value)
        has_called.set()

    def create_server_that_was_called(*arguments, **options):
        server = create_server(*arguments, **options)
        assert has_called.wait(HANG_SECONDS)  # by process 2, however busy the machine is
        return server

    monkeypatch.setattr(rendezvous_module, "_send", send_and_tell)
    monkeypatch.setattr(socket, "create_server", create_server_that_was_called)
    answer = (
        "processes 1, 3 of 4 did not come to distributed.coordinator ADDRESS within 1 s: start all "
        "of them at the same time, and let their machines reach that address"
    )
    assert called((4, 0), (4, 2), process_0_waits=1.0) == [answer, answer]


def test_a_coordinator_that_no_process_serves_is_one_sentence():
    (answer,) = called((2, 1), others_wait=1.0)
    assert str(answer).startswith(
        "process 1 on host 1 did not reach process 0 at distributed.coordinator ADDRESS within 1 s"
    )


def test_a_process_that_calls_too_slowly_is_let_go_and_calls_again(monkeypatch):
    monkeypatch.setattr(rendezvous_module, "CALLER_SECONDS", 0.05)
    address, send, calls = ("localhost", free_port()), rendezvous_module._send, []

    def send_too_late(connection, value):
        if value.get("process") == 1:
            calls.append(value)
            if len(calls) == 1:
                assert connection.recv(1) == b"", "process 0 lets it go"
                monkeypatch.setattr(rendezvous_module, "CALLER_SECONDS", HANG_SECONDS)
        send(connection, value)

    monkeypatch.setattr(rendezvous_module, "_send", send_too_late)
    with ThreadPoolExecutor(2) as threads:
        both = [
            threads.submit(
                rendezvous,
                f"{address[0]}:{address[1]}",
                2,
                process,
                host="ab"[process],
                deadline_seconds=HANG_SECONDS,
            )
            for process in range(2)
        ]
        assert [one.result() for one in both] == [("a", "b")] * 2
    assert len(calls) == 2


def test_the_rendezvous_refuses_other_counts_and_numbers_that_come_twice():
    answers = called((2, 0), (3, 1))
    assert answers[0] == answers[1]
    assert (
        "process 1 on host 1 was started with distributed.processes 3 and process 0 on host 0 with "
        "2" in str(answers[0])
    )
    answers = called((3, 0), (3, 1), (3, 1))
    assert answers[0] == answers[1] == answers[2]
    assert "distributed.process is 1 on host 1 and on host 1" in str(answers[0])


def test_the_rendezvous_listens_to_no_strangers():
    port = free_port()

    def connected() -> socket.socket:
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                return socket.create_connection(("localhost", port))

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(
            rendezvous, f"localhost:{port}", 2, 0, host="a", deadline_seconds=HANG_SECONDS
        )
        for said in (
            b"GET / HTTP/1.1\r\n\r\n",
            b'{"process": 1}\n',
            b"[]\n",
            b"[" * 100_000 + b"\n",
        ):
            with connected() as stranger:
                stranger.sendall(said)
        second = threads.submit(
            rendezvous, f"localhost:{port}", 2, 1, host="b", deadline_seconds=HANG_SECONDS
        )
        assert first.result() == second.result() == ("a", "b")


def test_a_port_that_is_taken_is_one_sentence():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            UserError, match=f"process 0 cannot listen at port {port} of distributed.coordinator"
        ):
            rendezvous(f"localhost:{port}", 2, 0, host="a", deadline_seconds=1.0)


@pytest.mark.parametrize(
    "address", ["somewhere", ":8476", "host:", "host:0", "host:99999", "host:port"]
)
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
        (
            ["--distributed.coordinator", "a:1"],
            "distributed.coordinator is a:1 and distributed.processes is 1",
        ),
        (
            [
                "--distributed.coordinator",
                "a:1",
                "--distributed.processes",
                "2",
                "--distributed.process",
                "2",
            ],
            "distributed.process is 2 and distributed.processes 2: number the processes from 0 to 1",
        ),
        (
            ["--distributed.deadline-seconds", "0"],
            "distributed.deadline_seconds is 0.0 and must be at least 1",
        ),
        (
            ["--distributed.barrier-seconds", "0"],
            "distributed.barrier_seconds is 0.0 and must be at least 1",
        ),
        (
            ["--distributed.coordinator", "nowhere", "--distributed.processes", "2"],
            "distributed.coordinator is nowhere and must be the host of process 0 and a free port "
            "there",
        ),
    ],
)
def test_a_job_that_is_half_described_is_one_sentence(flags, sentence, capsys):
    assert train.main(flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {sentence}")


class Exit(BaseException):
    """In the place of the end of the process."""


class Service:
    """JAX's coordination service, as a client of it sees it."""

    def __init__(self) -> None:
        self.store: dict[str, str] = {}
        # what `get_live_nodes` returns, one call after the other; then process 0 is gone
        self.living: list[set[int]] = []
        self.is_late = self.is_gone = False

    def key_value_set(self, key: str, value: str) -> None:
        if key in self.store:
            raise JaxRuntimeError(f"ALREADY_EXISTS: {key}")
        self.store[key] = value

    def key_value_dir_get(self, folder: str) -> list[tuple[str, str]]:
        if self.is_gone:
            raise JaxRuntimeError("UNAVAILABLE: Socket closed")
        return [(key, value) for key, value in self.store.items() if key.startswith(folder)]

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        self._wait()
        return self.store[key]

    def wait_at_barrier(self, key: str, timeout_in_ms: int) -> None:
        self._wait()

    def _wait(self) -> None:
        if self.is_late or self.is_gone:
            raise JaxRuntimeError(
                "DEADLINE_EXCEEDED: too late" if self.is_late else "UNAVAILABLE: Socket closed"
            )

    def get_live_nodes(self, processes: list[int]) -> set[int]:
        assert processes == [0, 1, 2]
        if not self.living:
            raise JaxRuntimeError("UNAVAILABLE: Socket closed")
        return self.living.pop(0)


@pytest.fixture
def service(monkeypatch) -> Service:
    def exit_now(status: int) -> None:
        raise Exit(status)

    monkeypatch.setattr(os, "_exit", exit_now)
    monkeypatch.setattr(heartbeat, "SECONDS_BETWEEN", 0.0)
    return Service()


def beating(service: Service, process: int) -> Heartbeat:
    return Heartbeat(service, ("a", "b", "c"), process, deadline_seconds=DEADLINE)


def test_the_heartbeat_is_content_with_processes_that_live(service):
    service.living = [{0, 1, 2}] * 10
    beating(service, 1).watch()
    assert not service.living


@pytest.mark.parametrize(
    ("me", "living", "lost"),
    [
        (0, {0, 1}, "process 2 on c is lost"),
        (1, {0, 1}, "process 2 on c is lost"),
        (0, {0}, "process 1 on b and process 2 on c are lost"),
    ],
)
def test_the_heartbeat_names_the_processes_that_are_lost(service, capsys, me, living, lost):
    service.living = [{0, 1, 2}, living]
    with pytest.raises(Exit, match=rf"^{LOST}$"):
        beating(service, me).watch()
    said = capsys.readouterr().err
    assert said.startswith(
        f"\n{lost}, without a heartbeat for up to 10 s (distributed.deadline_seconds)"
    )
    assert f"so process {me} on {'ab'[me]} ends too: what was saved is in the run directory" in said


def test_an_abort_of_jax_is_the_loss_of_process_0_if_its_store_does_not_answer(service, capsys):
    service.is_gone = True
    with pytest.raises(Exit, match=rf"^{LOST}$"):
        beating(service, 2).on_abort()
    assert capsys.readouterr().err.startswith("\nprocess 0 on a is lost")


def test_any_other_abort_goes_on(service, capsys):
    beating(service, 2).on_abort()
    assert capsys.readouterr().err == ""


def test_after_the_end_no_process_is_lost(service, capsys):
    beats = beating(service, 2)
    beats.stop(3)
    beats.watch()
    service.is_gone = True
    with pytest.raises(Exit, match=r"^3$"):
        beats.on_abort()
    assert capsys.readouterr().err == ""


@pytest.fixture
def job(service, monkeypatch) -> distributed.Job:
    """Of three processes, as the second one sees it."""
    seen = distributed.Job(
        hosts=("a", "b", "c"),
        process=1,
        barrier_seconds=5,
        client=service,
        heartbeat=beating(service, 1),
    )
    monkeypatch.setattr(distributed, "_job", seen)
    monkeypatch.setattr(threading.Timer, "start", lambda timer: None)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    return seen


def test_a_barrier_is_bounded_and_names_who_does_not_come(job, service):
    distributed.barrier("the first")
    service.store["arrived/2 round 1/0"] = "a"
    service.is_late = True
    sentence = (
        r"process 2 on c did not come to 'round 1' within 5 s \(distributed.barrier_seconds\), "
        r"where process 1 on b"
    )
    with pytest.raises(HostMissing, match=sentence):
        distributed.barrier("round 1")


def test_what_process_0_decides_is_the_same_everywhere_and_bounded(job, service):
    service.store["broadcast/1 a policy"] = "[true, 3]"
    assert distributed.broadcast("a policy", lambda: None) == [True, 3]
    service.is_late = True
    with pytest.raises(HostMissing, match="process 0 on a did not come to 'a policy' within 5 s"):
        distributed.broadcast("a policy", lambda: None)


def test_other_errors_of_the_service_stay_what_they_are(job, service):
    service.is_gone = True
    with pytest.raises(JaxRuntimeError, match="UNAVAILABLE"):
        distributed.barrier("anything")


@pytest.mark.parametrize("is_late", [False, True])
def test_a_process_that_ends_tells_the_others_why(job, service, is_late):
    service.is_late = is_late  # a process that is lost reads nothing: the others end all the same
    with pytest.raises(Exit, match=r"^2$"):
        distributed.abort("the disk is full", 2)
    assert json.loads(service.store[SHUTDOWN]) == [1, [2, "the disk is full"]]


def test_all_processes_finish_together(job):
    with pytest.raises(Exit, match=r"^0$"):
        distributed.finish()


def test_a_process_ends_as_another_one_did(job, service, capsys):
    service.store[SHUTDOWN] = json.dumps([2, [130, "interrupted"]])
    with pytest.raises(Exit, match=r"^130$"):
        distributed._wait_for_notice(SHUTDOWN, distributed._on_shutdown)
    assert capsys.readouterr().err == "\nprocess 2 on c ended: interrupted\n"


def test_the_first_notice_counts_and_its_sender_does_not_hear_it(job, service):
    heard = []
    distributed._announce(PREEMPTED, 15)
    distributed._announce(PREEMPTED, 2)
    distributed._wait_for_notice(PREEMPTED, lambda sender, what: heard.append((sender, what)))
    job.process = 0
    distributed._wait_for_notice(PREEMPTED, lambda sender, what: heard.append((sender, what)))
    assert heard == [(1, 15)]


def test_an_error_of_the_program_is_shown_and_ends_the_others(job, service, capsys):
    with pytest.raises(Exit, match=r"^1$"):
        try:
            raise KeyError("a mistake")
        except KeyError:
            distributed.abort_with_traceback()
    assert "KeyError: 'a mistake'" in capsys.readouterr().err
    assert "an error of the program" in service.store[SHUTDOWN]


def test_a_job_of_one_process_waits_for_nobody_and_keeps_all_the_work():
    distributed.start(DistributedConfig(), print)
    distributed.barrier("anything")
    assert distributed.broadcast("anything", lambda: [1, 2]) == [1, 2]
    assert distributed.primary_first("anything", lambda: 3) == 3
    assert distributed.shard_for_process("abc") == ["a", "b", "c"]
    assert distributed.is_primary()
    distributed.abort("nothing happens", 2)
    distributed.finish()


def test_a_job_of_one_process_imports_nothing():
    program = (
        "import sys\n"
        "from mujica_jax.runtime import distributed\n"
        "from mujica_jax.config.schema import DistributedConfig\n"
        "distributed.start(DistributedConfig(), print); distributed.barrier('x'); "
        "distributed.finish()\n"
        "print([name for name in ('jax', 'mujica_jax.runtime.heartbeat') if name in sys.modules])"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert shown.stdout.strip() == "[]"


def test_a_run_directory_that_hosts_do_not_share_is_one_sentence(monkeypatch, tmp_path):
    start._open_shared(tmp_path / "a", {})
    monkeypatch.setattr(distributed, "_job", distributed.Job(hosts=("a", "b"), process=1))
    assert start._open_shared(tmp_path / "a", {}).root == tmp_path / "a"
    with pytest.raises(
        UserError, match=r"process 1 on b sees no run in .*, which process 0 has begun"
    ):
        start._open_shared(tmp_path / "b", {})
    assert not (tmp_path / "b" / "config.json").exists()


def test_a_pod_of_several_workers_is_recognised(monkeypatch, tmp_path):
    from jax._src.clusters import cloud_tpu_cluster

    device = tmp_path / "accel0"
    monkeypatch.setattr(distributed, "TPU_DEVICES", (str(device),))
    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "10.0.0.1,10.0.0.2,10.0.0.3,10.0.0.4")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setenv("MEGASCALE_NUM_SLICES", "1")
    monkeypatch.setenv("MEGASCALE_SLICE_ID", "0")
    monkeypatch.setenv("MEGASCALE_COORDINATOR_ADDRESS", "10.0.0.1")
    monkeypatch.setenv("TPU_WORKER_ID", "2")
    monkeypatch.setenv("JAX_COORDINATOR_PORT", "9000")
    monkeypatch.setattr(socket, "gethostbyname", lambda name: name)
    assert distributed._place(DistributedConfig()) is None, "no TPU here"
    device.touch()
    assert distributed._place(DistributedConfig()) == ("10.0.0.1:9000", 4, 2)
    monkeypatch.setenv("MEGASCALE_NUM_SLICES", "2")
    monkeypatch.setenv("MEGASCALE_SLICE_ID", "1")
    assert distributed._place(DistributedConfig()) == ("10.0.0.1:9000", 8, 6)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert distributed._place(DistributedConfig()) is None
