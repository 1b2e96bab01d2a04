"""Start, notices, and what one process makes of a job. Jobs of several also in `test_devices.py`
and `runs/test_hosts.py`.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from jax.errors import JaxRuntimeError

from mujica_jax.commands import eval as evaluation
from mujica_jax.commands import train
from mujica_jax.config.checks import check_distributed
from mujica_jax.config.schema import DistributedConfig
from mujica_jax.errors import UserError
from mujica_jax.runs import setup as start
from mujica_jax.runtime import distributed
from mujica_jax.runtime.distributed import PREEMPTED, SHUTDOWN, HostMissingError
from tests.helpers.paths import ROOT
from tests.helpers.patience import HANG_SECONDS
from tests.helpers.whole_runs import free_port


@pytest.mark.parametrize("process", [0, 1])
def test_where_a_process_never_comes_the_other_says_what_to_do_and_is_ended(process):
    """JAX ends it, and prints its own page last."""
    address = f"localhost:{free_port()}"
    flags = f"--distributed.coordinator {address} --distributed.num-processes 2 --distributed.process-id "
    command = [sys.executable, "-m", "mujica_jax.train", *flags.split(), str(process)]
    ended = subprocess.run(
        [*command, "--distributed.deadline-seconds", "1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert ended.returncode == -signal.SIGABRT, ended.stderr
    note, _, reason = ended.stderr.partition("\n")
    assert note.startswith(
        f"process {process} of 2 on {socket.gethostname()} waits for the other processes at "
        f"{address}. If JAX ends it after about 1 s (distributed.deadline_seconds) with "
        "DEADLINE_EXCEEDED, a process is missing: start all processes at the same time"
    )
    assert "DEADLINE_EXCEEDED" in reason
    assert "processes have started" not in reason


WAITING_PROCESS = """
import sys
from mujica_jax.config.schema import DistributedConfig
from mujica_jax.runtime import distributed
from mujica_jax.runtime.preemption import Preemption

preemption = Preemption()

def program():
    job = DistributedConfig(
        coordinator=sys.argv[1], processes=2, process=int(sys.argv[2]), deadline_seconds=5
    )
    distributed.start(job, preemption.on_notice)
    print("started", flush=True)
    if job.process == int(sys.argv[3]):
        sys.stdin.read()
    distributed.barrier("where one never comes")

sys.exit(preemption.exit_status(program))
"""


@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_is_killed_ends_the_other_which_has_said_what_to_do(victim):
    address = f"localhost:{free_port()}"
    job = [
        subprocess.Popen(
            [sys.executable, "-c", WAITING_PROCESS, address, str(process), str(victim)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]
    try:
        for process in job:
            assert process.stdout is not None
            assert process.stdout.readline() == "started\n"
        job[victim].kill()
        _, messages = job[1 - victim].communicate(timeout=HANG_SECONDS)
    finally:
        for process in job:
            process.kill()
            process.communicate()
    assert job[1 - victim].returncode in (1, -signal.SIGABRT), messages
    note = (
        "all 2 processes have started. If one of them is lost, JAX ends the others within about "
        "5 s with 'detected fatal errors'; the same command on all hosts continues from what was "
        "saved"
    )
    assert note in messages.splitlines()
    reasons = messages.partition(note)[2]
    assert "detected fatal errors" in reasons or "ends because of this error" in reasons


def test_a_port_that_is_taken_is_one_sentence(capsys):
    with socket.create_server(("", 0)) as listener:
        port = listener.getsockname()[1]
        flags = [
            "--distributed.coordinator",
            f"localhost:{port}",
            "--distributed.num-processes",
            "2",
        ]
        assert train.main(flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    sentence = f"error: process 0 cannot listen on port {port} of distributed.coordinator localhost"
    assert line.startswith(sentence)


@pytest.mark.parametrize(
    "address", ["somewhere", ":8476", "host:", "host:0", "host:99999", "host:port"]
)
def test_an_address_without_a_port_is_refused(address):
    with pytest.raises(UserError, match="must be the host of process 0 and a free port there"):
        check_distributed(DistributedConfig(coordinator=address, num_processes=2, process_id=1))


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            ["--distributed.num-processes", "2"],
            "distributed.num_processes is 2 and distributed.process_id 0, but there is no coordinator",
        ),
        (
            ["--distributed.process-id", "1"],
            "distributed.num_processes is 1 and distributed.process_id 1, but there is no coordinator",
        ),
        (
            ["--distributed.coordinator", "a:1"],
            "distributed.coordinator is a:1, but distributed.num_processes is 1",
        ),
        (
            [
                "--distributed.coordinator",
                "a:1",
                "--distributed.num-processes",
                "2",
                "--distributed.process-id",
                "2",
            ],
            "distributed.process_id is 2, but distributed.num_processes is 2: number the processes "
            "from 0 to 1",
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
            ["--distributed.coordinator", "nowhere", "--distributed.num-processes", "2"],
            "distributed.coordinator is nowhere and must be the host of process 0 and a free port "
            "there",
        ),
    ],
)
def test_a_job_that_is_half_described_is_one_sentence(flags, sentence, capsys):
    assert train.main(flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {sentence}")


def test_eval_refuses_a_job_that_is_half_described(capsys):
    endpoint = ["tiny_world", "--remote.base-url", "http://localhost:1"]
    flags = ["--distributed.coordinator", "nowhere", "--distributed.num-processes", "2"]
    assert evaluation.main([*endpoint, *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: distributed.coordinator is nowhere and must be the host of")


class Exit(BaseException):
    """Stands in for the end of the process."""


class Service:
    """JAX's coordination service, as a client of it sees it."""

    def __init__(self) -> None:
        self.store: dict[str, str] = {}
        self.is_late = False
        self.is_gone = False

    def key_value_set(self, key: str, value: str) -> None:
        if key in self.store:
            raise JaxRuntimeError(f"ALREADY_EXISTS: {key}")
        self.store[key] = value

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        self._wait()
        return self.store[key]

    def wait_at_barrier(self, key: str, timeout_in_ms: int) -> None:
        self._wait()

    def _wait(self) -> None:
        if self.is_late or self.is_gone:
            late = "DEADLINE_EXCEEDED: too late\nSome timed out task names:\n2\n"
            raise JaxRuntimeError(late if self.is_late else "UNAVAILABLE: Socket closed")


@pytest.fixture
def service(monkeypatch) -> Service:
    def exit_now(status: int) -> None:
        raise Exit(status)

    monkeypatch.setattr(os, "_exit", exit_now)
    return Service()


@pytest.fixture
def job(service, monkeypatch) -> distributed.Job:
    """Return a job of three processes, as the second one sees it."""
    job_of_three = distributed.Job(processes=3, process=1, barrier_seconds=5, client=service)
    monkeypatch.setattr(distributed, "_job", job_of_three)
    monkeypatch.setattr(distributed, "host", lambda: "b")
    monkeypatch.setattr(threading.Timer, "start", lambda timer: None)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    return job_of_three


def test_a_barrier_is_bounded_and_says_whom_jax_misses(job, service):
    distributed.barrier("the first")
    service.is_late = True
    sentence = (
        r"process 1 on b waited 5 s at 'round 1', but another process did not arrive: "
        r".* distributed\.barrier_seconds \(DEADLINE_EXCEEDED: too late Some timed out task names: "
        r"2\)"
    )
    with pytest.raises(HostMissingError, match=sentence):
        distributed.barrier("round 1")


def test_what_process_0_decides_is_the_same_everywhere_and_bounded(job, service):
    service.store["broadcast/1 a policy"] = "[true, 3]"
    assert distributed.broadcast("a policy", lambda: None) == [True, 3]
    service.is_late = True
    with pytest.raises(
        HostMissingError, match=r"waited 5 s at 'a policy', but another process did not arrive"
    ):
        distributed.broadcast("a policy", lambda: None)


def test_other_errors_of_the_service_stay_what_they_are(job, service):
    service.is_gone = True
    with pytest.raises(JaxRuntimeError, match="UNAVAILABLE"):
        distributed.barrier("anything")


@pytest.mark.parametrize("is_late", [False, True])
def test_a_process_that_ends_tells_the_others_why(job, service, is_late):
    # A process that is lost reads nothing: the others end all the same.
    service.is_late = is_late
    with pytest.raises(Exit, match=r"^2$"):
        distributed.abort("the disk is full", 2)
    assert json.loads(service.store[SHUTDOWN]) == [1, ["b", 2, "the disk is full"]]


def test_all_processes_finish_together(job):
    with pytest.raises(Exit, match=r"^0$"):
        distributed.finish()


def test_a_process_ends_as_another_one_did(job, service, capsys):
    service.store[SHUTDOWN] = json.dumps([2, ["c", 130, "interrupted"]])
    with pytest.raises(Exit, match=r"^130$"):
        distributed._wait_for_notice(SHUTDOWN, distributed._on_shutdown)
    assert capsys.readouterr().err == "\nprocess 2 on c ended: interrupted\n"


def test_the_first_notice_counts_and_its_sender_does_not_hear_it(job, service):
    heard = []
    distributed._announce(PREEMPTED, 15)
    distributed._announce(PREEMPTED, 2)
    distributed._wait_for_notice(PREEMPTED, lambda sender, notice: heard.append((sender, notice)))
    job.process = 0
    distributed._wait_for_notice(PREEMPTED, lambda sender, notice: heard.append((sender, notice)))
    assert heard == [(1, 15)]


def test_an_error_of_the_program_is_shown_and_ends_the_others(job, service, capsys):
    with pytest.raises(Exit, match=r"^1$"):
        try:
            raise KeyError("a mistake")
        except KeyError:
            distributed.abort_with_traceback()
    messages = capsys.readouterr().err
    assert "KeyError: 'a mistake'" in messages
    last_line = messages.splitlines()[-1]
    assert last_line.startswith("process 1 on b ends because of this error. If the error is about")
    assert "the program failed" in service.store[SHUTDOWN]


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
        "print('jax' in sys.modules)"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert shown.stdout.strip() == "False"


def test_a_run_directory_that_hosts_do_not_share_is_one_sentence(monkeypatch, tmp_path):
    start._open_shared(tmp_path / "a", {})
    monkeypatch.setattr(distributed, "_job", distributed.Job(processes=2, process=1))
    monkeypatch.setattr(distributed, "host", lambda: "b")
    assert start._open_shared(tmp_path / "a", {}).root == tmp_path / "a"
    with pytest.raises(
        UserError, match=r"process 1 on b finds no run in .*, although process 0 has started one"
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
