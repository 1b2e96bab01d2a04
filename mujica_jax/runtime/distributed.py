"""Several processes, usually one a host, that train as one job.

A job starts before anything else of JAX is used: on a TPU pod from what the pod says of itself,
elsewhere from an explicit coordinator (`DistributedConfig`). Then the processes run the same
program and agree at three kinds of places:

    barrier(name)               all wait for all, at most `barrier_seconds`
    broadcast(name, decide)     process 0 decides, and all get its answer: for questions that a
                                clock or a disk decides
    primary_first(name, work)   process 0 does the work first, and the others find its files

Start, heartbeats, barriers and the store of keys and values are those of JAX's coordination
service, which lives in process 0. JAX itself ends every process of a job that has lost one. A
process that ends by itself first leaves a notice in the store (`abort`), and the others end with
its sentence and status. `multihost_utils` has collectives for agreements: they need devices, and
they wait for ever. With one process all of this is nothing: no import, no thread, no wait.
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

TPU_DEVICES = ("/dev/accel0", "/dev/vfio/0")  # one of them exists where a TPU is
# Keys in the job's store. The first notice of each counts.
PREEMPTED = "notice/preempted"
SHUTDOWN = "notice/shutdown"
DAY_SECONDS = 86_400.0
# How long the end of a process waits for the others to end too. A lost process never comes.
SHUTDOWN_BARRIER_SECONDS = 6.0
# After a preemption's grace time of 20 s. Platforms kill 30 s after the notice.
SHUTDOWN_SECONDS = 8.0
CONTINUES = "the same command on all hosts continues from what was saved"
Result = TypeVar("Result")


class HostMissingError(UserError):
    """A process of the job did not come to where the others waited."""


@dataclasses.dataclass(kw_only=True)
class Job:
    """The processes, as one of them sees them."""

    processes: int = 1
    process: int = 0  # the number of this one
    barrier_seconds: float = 0.0
    client: Any = None  # JAX's client of the coordination service: key-value store and barriers
    # so far: every process counts the same, and every barrier and broadcast has a name of its own
    agreements: int = 0
    # Taken by the thread that ends the process.
    ending: threading.Lock = dataclasses.field(default_factory=threading.Lock)


# Like JAX's own state of its processes: one a process, set once, before anything else runs.
_job = Job()


def start(config: DistributedConfig, on_preemption: Callable[[int], object]) -> None:
    """Join the job that the configuration or the TPU pod names. Do nothing without either.

    `on_preemption(signal's number)` is called when another process of the job was asked to end.
    Where a process does not come in time, JAX aborts this one. Raises UserError if process 0 cannot
    listen at the coordinator's port.
    """
    global _job
    place = _place(config)
    if place is None:
        return
    coordinator, count, number = place
    if number == 0:
        _check_port_is_free(coordinator)

    # JAX ends a process by an abort. What it means is said before, because nothing can be after.
    _print_note(
        f"process {number} of {count} on {host()} waits for the others at {coordinator}. If JAX "
        f"ends it after about {config.deadline_seconds:g} s (distributed.deadline_seconds) with "
        "DEADLINE_EXCEEDED, a process did not come: start all of them at the same time, each with "
        "a number of its own, and let their machines reach that address"
    )
    client = _join_service(coordinator, count, number, deadline_seconds=config.deadline_seconds)
    _print_note(
        f"all {count} processes are here. If one of them is lost, JAX ends the others within "
        f"about {config.deadline_seconds:g} s with 'detected fatal errors': {CONTINUES}"
    )

    _job = Job(
        processes=count, process=number, barrier_seconds=config.barrier_seconds, client=client
    )
    _listen(PREEMPTED, lambda sender, signal: on_preemption(signal))
    _listen(SHUTDOWN, _on_shutdown)


def _join_service(coordinator: str, count: int, number: int, *, deadline_seconds: float) -> Any:
    """Join JAX's coordination service, and return its client."""
    # The client has no public name; Orbax takes it from here too.
    import jax
    from jax._src.distributed import global_state

    # JAX's preemption service would keep SIGTERM for training steps alone.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        coordinator,
        count,
        number,
        cluster_detection_method="deactivate",  # guess nothing
        initialization_timeout=math.ceil(deadline_seconds),
        heartbeat_timeout_seconds=math.ceil(deadline_seconds),
    )
    return global_state.client


def _check_port_is_free(coordinator: str) -> None:
    """Check that this machine can listen at the coordinator's port: JAX crashes if it cannot."""
    port = int(coordinator.rpartition(":")[2])
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        raise UserError(
            f"process 0 cannot listen at port {port} of distributed.coordinator {coordinator} "
            f"({error.strerror}): choose a port that is free on this machine"
        ) from error


def _print_note(note: str) -> None:
    print(note, file=sys.stderr, flush=True)


def _listen(key: str, on_notice: Callable[[int, Any], object]) -> None:
    """Wait for a notice in a thread of its own."""
    threading.Thread(target=_wait_for_notice, args=(key, on_notice), name=key, daemon=True).start()


def process() -> int:
    """Return the number of this process."""
    return _job.process


def host() -> str:
    """Return the name of the machine, as messages give it."""
    return socket.gethostname()


def processes() -> int:
    """Return the number of processes of the job."""
    return _job.processes


def is_primary() -> bool:
    """Return whether this process writes what is written once: metrics, tables, manifests."""
    return _job.process == 0


def shard_for_process(items: Iterable[Result]) -> list[Result]:
    """Return this process's part of units of work: every `processes()`-th."""
    return [item for number, item in enumerate(items) if number % processes() == _job.process]


def barrier(name: str) -> None:
    """Wait until every process is here.

    Raises HostMissingError if one does not come within `barrier_seconds`.
    """
    if processes() == 1:
        return
    with _bounded(name):
        _job.client.wait_at_barrier(_key(name), _milliseconds(_job.barrier_seconds))


def broadcast(name: str, decide: Callable[[], Any]) -> Any:
    """Return what `decide` returns in process 0, a value that JSON holds.

    The others wait for it.
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
    """Do `work` in process 0, and then in all the others. Return its result."""
    if is_primary():
        result = work()
        barrier(name)
        return result
    barrier(name)
    return work()


def finish() -> None:
    """End all processes of a job that went well together, with status 0.

    Returns only if there are no others.

    An orderly end of the interpreter would meet threads that wait in JAX's client, and crash.
    """
    if processes() > 1:
        barrier("the end")
        with _job.ending:
            _exit_together(0)


def announce_preemption(signal: int) -> None:
    """Tell the other processes that this one was asked to end.

    Returns at once, also if the store hangs.
    """
    if processes() > 1:
        threading.Thread(target=_announce, args=(PREEMPTED, signal), daemon=True).start()


def abort(sentence: str, status: int) -> None:
    """End this process and the others, which are told why.

    Returns only if there are no others.
    """
    if processes() > 1:
        with _job.ending:
            _announce(SHUTDOWN, [host(), status, sentence])
            _exit_together(status)


def abort_with_traceback() -> None:
    """End all processes as `abort` does, because of the error that is handled.

    The error may only show that another process has ended. Then its notice is the reason.
    """
    if processes() > 1:
        # If a shutdown notice came, another thread has this lock and ends this process.
        with _job.ending:
            pass
        traceback.print_exc()
        _print_note(
            f"\nprocess {_job.process} on {host()} ends because of this error. If it names a "
            f"connection, another process was lost, and {CONTINUES}"
        )
        abort("an error of the program, which its output shows", 1)


def _place(config: DistributedConfig) -> tuple[str, int, int] | None:
    """Return the coordinator, the number of processes, and the number of this one.

    JAX is asked about a pod only if there is a TPU.
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
    """Leave a notice for the other processes."""
    # JAX raises RuntimeError if another process was first, or process 0 is gone.
    with contextlib.suppress(RuntimeError):
        _job.client.key_value_set(key, json.dumps([_job.process, notice]))


def _wait_for_notice(key: str, on_notice: Callable[[int, Any], object]) -> None:
    """Wait for the notice of another process, and call `on_notice(sender, notice)`."""
    from jax.errors import JaxRuntimeError

    with contextlib.suppress(JaxRuntimeError):  # the job is over, or process 0 is gone
        message = _job.client.blocking_key_value_get(key, _milliseconds(365 * DAY_SECONDS))
        sender, notice = json.loads(message)
        if sender != _job.process:
            on_notice(sender, notice)


def _on_shutdown(sender: int, notice: tuple[str, int, str]) -> None:
    """End this process, because another one has ended."""
    sender_host, status, sentence = notice
    with _job.ending:
        _print_note(f"\nprocess {sender} on {sender_host} ended: {sentence}")
        _exit_together(status)


def _exit_together(status: int) -> None:
    """End this process when all have read the notice.

    Process 0, which holds the store, ends last.
    """
    import jax

    with contextlib.suppress(OSError):  # the reader may be gone
        sys.stdout.flush()
        sys.stderr.flush()

    # If process 0 hangs, so does the barrier: the timer ends this process then.
    timer = threading.Timer(SHUTDOWN_SECONDS, os._exit, (status,))
    timer.daemon = True
    timer.start()
    try:
        # JAX aborts a process whose shutdown fails, so the others are waited for first.
        _job.client.wait_at_barrier(SHUTDOWN, _milliseconds(SHUTDOWN_BARRIER_SECONDS))
        jax.distributed.shutdown()
    except RuntimeError:  # of JAX: one of them is gone
        if is_primary():
            time.sleep(1.0)
    os._exit(status)


@contextlib.contextmanager
def _bounded(name: str):
    """Turn the end of a wait into HostMissingError."""
    try:
        yield
    except RuntimeError as error:  # of JAX
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        # JAX says which processes did not come, in several lines.
        reason = " ".join(str(error).split())
        raise HostMissingError(
            f"process {_job.process} on {host()} waited {_job.barrier_seconds:g} s "
            f"(distributed.barrier_seconds) at '{name}' and a process did not come: look at the "
            f"output of the others, or raise it ({reason})"
        ) from error


def _key(name: str) -> str:
    """Return the next key of the job's store, the same in all processes."""
    _job.agreements += 1
    return f"{_job.agreements} {name.replace('/', ' ')}"


def _milliseconds(seconds: float) -> int:
    return math.ceil(1000 * seconds)
