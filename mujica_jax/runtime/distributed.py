"""Run several processes, usually one on each host, as one training job.

`start` must be called before anything else uses JAX. On a TPU pod it reads the list of hosts from
the pod. Elsewhere it needs the address of a coordinator (`DistributedConfig`). All processes run
the same program, and synchronise with these functions:

    barrier(name)               Wait until all processes arrive, for at most `barrier_seconds`.
    broadcast(name, decide)     Process 0 decides and all processes get its answer. Use it for
                                decisions that depend on a clock or a disk.
    primary_first(name, work)   Process 0 does the work first. The others then find its files.

The start, heartbeats, barriers and the key-value store are those of JAX's coordination service,
which runs in process 0. If a process is lost, JAX ends all others. A process that ends by itself
first writes a notice to the store (`abort`). The other processes then end with the same message and
exit status.

The collectives of JAX's `multihost_utils` are not used, because they need devices and wait without
a limit. With a single process, these functions import nothing, start no thread and never wait.
"""

import contextlib
import dataclasses
import json
import math
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from mujica_jax.config.schema import DistributedConfig
from mujica_jax.errors import UserError

# A machine with a TPU has one of these devices.
TPU_DEVICES = ("/dev/accel0", "/dev/vfio/0")
# Keys in the job's key-value store. Only the first notice under each key counts.
PREEMPTED = "notice/preempted"
SHUTDOWN = "notice/shutdown"
DAY_SECONDS = 86_400.0
# How long a process that ends waits for the others to end too. A lost process never arrives.
SHUTDOWN_BARRIER_SECONDS = 6.0
# The longest time of an orderly end. It begins after the grace time of a preemption (20 s) at the
# latest, and platforms kill the process 30 s after the notice.
SHUTDOWN_SECONDS = 8.0
CONTINUES = "the same command on all hosts continues from what was saved"
Result = TypeVar("Result")


class HostMissingError(UserError):
    """A process of the job did not arrive at a barrier in time."""


@dataclasses.dataclass(kw_only=True)
class Job:
    """This process's view of the job."""

    # Number of processes of the job.
    processes: int = 1
    # Number of this process, from 0.
    process: int = 0
    # The longest time that a barrier or broadcast waits.
    barrier_seconds: float = 0.0
    # JAX's client of the coordination service, with the key-value store and the barriers.
    client: Any = None
    # Number of barriers and broadcasts so far. It is the same in all processes, and gives each
    # barrier and broadcast a name of its own.
    agreements: int = 0
    # Held by the thread that ends the process.
    ending: threading.Lock = dataclasses.field(default_factory=threading.Lock)


# The state of this process. Like JAX's own state, it is global and set once, before anything else.
_job = Job()


def start(config: DistributedConfig, on_preemption: Callable[[int], object]) -> None:
    """Join the job that the configuration or the TPU pod describes.

    Do nothing if neither describes a job of several processes. When another process of the job gets
    a signal to end, `on_preemption` is called with the number of the signal. If a process does not
    start in time, JAX aborts this one. Raises UserError if process 0 cannot listen at the
    coordinator's port.
    """
    global _job
    place = _place(config)
    if place is None:
        return
    coordinator, count, number = place
    if number == 0:
        _check_port_is_free(coordinator)

    # JAX may end this process by an abort, after which nothing can be printed. Explain it before.
    _print_note(
        f"process {number} of {count} on {host()} waits for the other processes at {coordinator}. "
        f"If JAX ends it after about {config.deadline_seconds:g} s (distributed.deadline_seconds) "
        "with DEADLINE_EXCEEDED, a process is missing: start all processes at the same time, each "
        "with its own number, and check that their machines can reach that address"
    )
    client = _join_service(coordinator, count, number, deadline_seconds=config.deadline_seconds)
    _print_note(
        f"all {count} processes have started. If one of them is lost, JAX ends the others within "
        f"about {config.deadline_seconds:g} s with 'detected fatal errors'; {CONTINUES}"
    )

    _job = Job(
        processes=count, process=number, barrier_seconds=config.barrier_seconds, client=client
    )
    _listen(PREEMPTED, lambda sender, signal: on_preemption(signal))
    _listen(SHUTDOWN, _on_shutdown)


def _join_service(coordinator: str, count: int, number: int, *, deadline_seconds: float) -> Any:
    """Join JAX's coordination service, and return its client."""
    # JAX does not export its client. Orbax takes it from the same private module.
    import jax
    from jax._src.distributed import global_state

    # JAX's preemption service would handle SIGTERM, and only for training steps.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        coordinator,
        count,
        number,
        # Do not guess the cluster from the environment.
        cluster_detection_method="deactivate",
        initialization_timeout=math.ceil(deadline_seconds),
        heartbeat_timeout_seconds=math.ceil(deadline_seconds),
    )
    return global_state.client


def _check_port_is_free(coordinator: str) -> None:
    """Raise UserError if this machine cannot listen on the coordinator's port.

    JAX itself would crash.
    """
    port = int(coordinator.rpartition(":")[2])
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        raise UserError(
            f"process 0 cannot listen on port {port} of distributed.coordinator {coordinator} "
            f"({error.strerror}): choose a port that is free on this machine"
        ) from error


def _print_note(note: str) -> None:
    """Print a note on standard error at once."""
    print(note, file=sys.stderr, flush=True)


def _listen(key: str, on_notice: Callable[[int, Any], object]) -> None:
    """Start a thread that waits for a notice and calls `on_notice(sender, notice)`."""
    threading.Thread(target=_wait_for_notice, args=(key, on_notice), name=key, daemon=True).start()


def process() -> int:
    """Return the number of this process."""
    return _job.process


def host() -> str:
    """Return the host name of this machine, for messages."""
    return socket.gethostname()


def processes() -> int:
    """Return the number of processes of the job."""
    return _job.processes


def is_primary() -> bool:
    """Return whether this is process 0, which writes shared files such as metrics and manifests."""
    return _job.process == 0


def shard_for_process(items: Iterable[Result]) -> list[Result]:
    """Return this process's share of the units of work: every `processes()`-th item."""
    return [item for number, item in enumerate(items) if number % processes() == _job.process]


def barrier(name: str) -> None:
    """Wait until every process has called this.

    Raises HostMissingError if a process does not arrive within `barrier_seconds`.
    """
    if processes() == 1:
        return
    with _bounded(name):
        _job.client.wait_at_barrier(_key(name), _milliseconds(_job.barrier_seconds))


def broadcast(name: str, decide: Callable[[], Any]) -> Any:
    """Call `decide` in process 0, and return its result in all processes.

    The result must be a JSON value. Raises HostMissingError if it does not arrive within
    `barrier_seconds`.
    """
    if processes() == 1:
        return decide()
    key = f"broadcast/{_key(name)}"
    if is_primary():
        _job.client.key_value_set(key, json.dumps(decide()))
    with _bounded(name):
        value = _job.client.blocking_key_value_get(key, _milliseconds(_job.barrier_seconds))
        return json.loads(value)


def primary_first(name: str, work: Callable[[], Result]) -> Result:
    """Call `work` in process 0 first, and then in all others. Return its result."""
    if is_primary():
        result = work()
        barrier(name)
        return result
    barrier(name)
    return work()


def finish() -> None:
    """End all processes of a successful job together, with exit status 0.

    With a single process, return and do nothing. With several, the normal end of the interpreter
    would crash, because threads still wait in JAX's client.
    """
    if processes() > 1:
        barrier("the end")
        with _job.ending:
            _exit_together(0)


def announce_preemption(signal: int) -> None:
    """Tell the other processes that this process got a signal to end.

    This returns at once, even if the key-value store hangs.
    """
    if processes() > 1:
        threading.Thread(target=_announce, args=(PREEMPTED, signal), daemon=True).start()


def abort(sentence: str, status: int) -> None:
    """End all processes of the job with this exit status. The others print the sentence.

    With a single process, return and do nothing.
    """
    if processes() > 1:
        with _job.ending:
            _announce(SHUTDOWN, [host(), status, sentence])
            _exit_together(status)


def abort_with_traceback() -> None:
    """Print the traceback of the current exception, and end all processes as `abort` does.

    The exception may only be a consequence of the end of another process. If the notice of that
    process has arrived, this process ends with that notice.
    """
    if processes() > 1:
        # If a shutdown notice has arrived, another thread holds this lock and ends the process.
        with _job.ending:
            pass
        traceback.print_exc()
        _print_note(
            f"\nprocess {_job.process} on {host()} ends because of this error. If the error is "
            f"about a connection, another process was lost, and {CONTINUES}"
        )
        abort("the program failed; see the output of that process", 1)


def _place(config: DistributedConfig) -> tuple[str, int, int] | None:
    """Return the coordinator's address, the number of processes, and the number of this process.

    Return None if this process runs alone. JAX is asked about a pod only if there is a TPU.
    """
    if config.coordinator is not None:
        return config.coordinator, config.num_processes, config.process_id

    may_use_tpu = "tpu" in os.environ.get("JAX_PLATFORMS", "tpu")
    if not may_use_tpu or not any(Path(device).exists() for device in TPU_DEVICES):
        return None
    from jax._src.clusters.cloud_tpu_cluster import GceTpuCluster, GkeTpuCluster

    for cluster in (GkeTpuCluster, GceTpuCluster):
        if not cluster.is_env_present():
            continue
        count = cluster.get_process_count()
        if count > 1:
            port = os.environ.get("JAX_COORDINATOR_PORT")
            address = cluster.get_coordinator_address(math.ceil(config.deadline_seconds), port)
            return address, count, cluster.get_process_id()
    return None


def _announce(key: str, notice: Any) -> None:
    """Write a notice for the other processes to the key-value store."""
    # JAX raises RuntimeError if another process has written one already, or process 0 is gone.
    with contextlib.suppress(RuntimeError):
        _job.client.key_value_set(key, json.dumps([_job.process, notice]))


def _wait_for_notice(key: str, on_notice: Callable[[int, Any], object]) -> None:
    """Wait for the notice of another process, and call `on_notice(sender, notice)`."""
    from jax.errors import JaxRuntimeError

    # JAX raises the error when the job is over, or process 0 is gone.
    with contextlib.suppress(JaxRuntimeError):
        message = _job.client.blocking_key_value_get(key, _milliseconds(365 * DAY_SECONDS))
        sender, notice = json.loads(message)
        if sender != _job.process:
            on_notice(sender, notice)


def _on_shutdown(sender: int, notice: tuple[str, int, str]) -> None:
    """End this process, because the process `sender` has ended.

    `notice` holds its host name, its exit status, and the reason in one sentence.
    """
    sender_host, status, sentence = notice
    with _job.ending:
        _print_note(f"\nprocess {sender} on {sender_host} ended: {sentence}")
        _exit_together(status)


def _exit_together(status: int) -> None:
    """End this process as soon as all processes have read the notice.

    Process 0 ends last, because it holds the key-value store.
    """
    import jax

    # The reader of a pipe may be gone.
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()

    # If process 0 hangs, so does the barrier. The timer then ends this process.
    timer = threading.Timer(SHUTDOWN_SECONDS, os._exit, (status,))
    timer.daemon = True
    timer.start()
    try:
        # JAX aborts a process whose shutdown fails, so wait for the other processes first.
        _job.client.wait_at_barrier(SHUTDOWN, _milliseconds(SHUTDOWN_BARRIER_SECONDS))
        jax.distributed.shutdown()
    except RuntimeError:
        # A process is gone. Process 0 gives the others time to read the notice.
        if is_primary():
            time.sleep(1.0)
    os._exit(status)


@contextlib.contextmanager
def _bounded(name: str):
    """Raise a timeout of JAX in the body as a HostMissingError."""
    try:
        yield
    except RuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        # JAX says in several lines which processes are missing.
        reason = " ".join(str(error).split())
        raise HostMissingError(
            f"process {_job.process} on {host()} waited {_job.barrier_seconds:g} s at '{name}', "
            "but another process did not arrive: look at the output of the other processes, or "
            f"raise distributed.barrier_seconds ({reason})"
        ) from error


def _key(name: str) -> str:
    """Return a new key for a barrier or broadcast, the same in all processes."""
    _job.agreements += 1
    return f"{_job.agreements} {name.replace('/', ' ')}"


def _milliseconds(seconds: float) -> int:
    return math.ceil(1000 * seconds)
