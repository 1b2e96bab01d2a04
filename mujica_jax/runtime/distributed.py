"""Several processes, usually one a host, that train as one job.

A job starts before anything else of JAX is used: on a TPU pod from what the pod says of itself,
elsewhere from an explicit coordinator (`DistributedConfig`). Then the processes run the same
program and agree at four kinds of places:

    barrier(name)               all wait for all, at most `barrier_seconds`; a process that does not come is named
    broadcast(name, decide)     process 0 decides, all get its answer: where a clock or a disk decides for all
    exchange(name, own)         all get what each of them has
    primary_first(name, work)   process 0 does the work first; what it created once, the others find

A lost process is named within `deadline_seconds` (`heartbeat`), one that ends by itself leaves a
shutdown notice (`abort`). All of it goes through JAX's coordination service: `multihost_utils` has
collectives for the same, which wait for ever and name nobody. With one process all of this is
nothing: no import, no thread, no wait.
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
from typing import TYPE_CHECKING, Any, TypeVar

from mujica_jax.config.schema import DistributedConfig
from mujica_jax.errors import UserError
from mujica_jax.runtime.rendezvous import rendezvous

if TYPE_CHECKING:
    from mujica_jax.runtime.heartbeat import Heartbeat

TPU_DEVICES = ("/dev/accel0", "/dev/vfio/0")  # one of them exists where a TPU is
HEARTBEAT_FRACTION = (
    0.6  # of the deadline: JAX's own timeout may come a quarter late, and is then looked into
)
PREEMPTED, SHUTDOWN = (
    "notice/preempted",
    "notice/shutdown",
)  # keys in the job's store; the first notice of each counts
DAY_SECONDS = 86_400.0
SHUTDOWN_BARRIER_SECONDS = 6.0  # a lost process never comes
SHUTDOWN_SECONDS = (
    8.0  # after a preemption's grace time of 20 s; platforms kill 30 s after the notice
)
Result = TypeVar("Result")


class HostMissing(UserError):
    """A process of the job did not come to where the others waited."""


@dataclasses.dataclass(kw_only=True)
class Job:
    """The processes, as one of them sees them."""

    hosts: tuple[str, ...]  # names by process number
    process: int = 0
    coordinator: str = "localhost:0"
    deadline_seconds: float = 0.0
    barrier_seconds: float = 0.0
    client: Any = None  # JAX's client of the coordination service: key-value store and barriers
    heartbeat: "Heartbeat | None" = None
    # so far: every process counts the same, and every barrier and broadcast has a name of its own
    agreements: int = 0
    # Taken by the thread that ends the process.
    ending: threading.Lock = dataclasses.field(default_factory=threading.Lock)


# Like JAX's own state of its processes: one a process, set once, before anything else runs.
_job = Job(hosts=("this host",))


def start(config: DistributedConfig, on_preemption: Callable[[int], object]) -> None:
    """Join the job that the configuration or the TPU pod names; nothing happens without either.

    `on_preemption(signal's number)` is called when another process of the job was asked to end.
    """
    global _job
    if (place := _place(config)) is None:
        return
    coordinator, count, number = place
    hosts = rendezvous(
        coordinator,
        count,
        number,
        host=socket.gethostname(),
        deadline_seconds=config.deadline_seconds,
    )
    import jax
    from jax._src.distributed import (
        global_state,
    )  # the client has no public name; Orbax takes it from here too

    from mujica_jax.runtime.heartbeat import Heartbeat

    jax.config.update(
        "jax_enable_preemption_service", False
    )  # it would keep SIGTERM for training steps alone
    jax.config.update(
        "jax_enable_recoverability", True
    )  # a lost process is named by `heartbeat`, not aborted by JAX
    jax.distributed.initialize(
        coordinator,
        count,
        number,
        cluster_detection_method="deactivate",  # nothing is guessed beside what was said
        initialization_timeout=math.ceil(config.deadline_seconds),
        heartbeat_timeout_seconds=max(1, int(HEARTBEAT_FRACTION * config.deadline_seconds)),
    )
    client = global_state.client
    heartbeat = Heartbeat(client, hosts, number, deadline_seconds=config.deadline_seconds)
    _job = Job(
        hosts=hosts,
        process=number,
        coordinator=coordinator,
        deadline_seconds=config.deadline_seconds,
        barrier_seconds=config.barrier_seconds,
        client=client,
        heartbeat=heartbeat,
    )
    heartbeat.start()
    for key, heard in (
        (PREEMPTED, lambda sender, signal: on_preemption(signal)),
        (SHUTDOWN, _on_shutdown),
    ):
        threading.Thread(target=_wait_for_notice, args=(key, heard), name=key, daemon=True).start()


def process() -> int:
    return _job.process


def host() -> str:
    """The name of the machine, as messages give it."""
    return _job.hosts[_job.process]


def address() -> str:
    """The IPv4 address of this machine in the network of the job."""
    name, _, port = _job.coordinator.rpartition(":")
    with socket.socket(
        socket.AF_INET, socket.SOCK_DGRAM
    ) as unsent:  # connecting a datagram socket sends nothing
        unsent.connect((name, int(port) or 1))
        return unsent.getsockname()[0]


def processes() -> int:
    return len(_job.hosts)


def is_primary() -> bool:
    """Whether this process writes what is written once: metrics, tables, manifests."""
    return _job.process == 0


def shard_for_process(items: Iterable[Result]) -> list[Result]:
    """This process's part of units of work: every `processes()`-th."""
    return [item for number, item in enumerate(items) if number % processes() == _job.process]


def barrier(name: str) -> None:
    """Wait until every process is here. Raises HostMissing naming those that do not come within
    `barrier_seconds`."""
    if processes() == 1:
        return
    client, key = _job.client, _key(name)
    client.key_value_set(f"arrived/{key}/{_job.process}", host())
    with _bounded(name, lambda: _not_arrived(key)):
        client.wait_at_barrier(key, _milliseconds(_job.barrier_seconds))


def broadcast(name: str, decide: Callable[[], Any]) -> Any:
    """What `decide` returns in process 0: a value that JSON holds. The others wait for it."""
    if processes() == 1:
        return decide()
    key = f"broadcast/{_key(name)}"
    if is_primary():
        _job.client.key_value_set(key, json.dumps(decide()))
    with _bounded(name, lambda: [0]):
        return json.loads(
            _job.client.blocking_key_value_get(key, _milliseconds(_job.barrier_seconds))
        )


def exchange(name: str, own: Any) -> list[Any]:
    """What each process has, by number: values that JSON holds."""
    if processes() == 1:
        return [own]
    key = f"exchange/{_key(name)}"
    _job.client.key_value_set(f"{key}/{_job.process}", json.dumps(own))
    barrier(name)
    found = dict(_job.client.key_value_dir_get(f"{key}/"))
    return [json.loads(found[f"{key}/{number}"]) for number in range(processes())]


def primary_first(name: str, work: Callable[[], Result]) -> Result:
    """`work` in process 0, and then in all the others."""
    if is_primary():
        result = work()
        barrier(name)
        return result
    barrier(name)
    return work()


def finish() -> None:
    """The end of a job that went well: ends all processes together with status 0. Returns only if
    there are no others.

    An orderly end of the interpreter would meet threads that wait in JAX's client, and crash.
    """
    if processes() > 1:
        barrier("the end")
        with _job.ending:
            _exit_together(0)


def announce_preemption(signal: int) -> None:
    """This process was asked to end: the others hear of it. Returns at once, also where the store
    hangs."""
    if processes() > 1:
        threading.Thread(target=_announce, args=(PREEMPTED, signal), daemon=True).start()


def abort(sentence: str, status: int) -> None:
    """This process ends by itself, and so do the others, which are told why. Returns only if there
    are no others."""
    if processes() > 1:
        with _job.ending:
            _announce(SHUTDOWN, [status, sentence])
            _exit_together(status)


def abort_with_traceback() -> None:
    """As `abort`, by the error that is handled, unless it only shows that another process has ended
    or is lost."""
    if processes() > 1:
        with (
            _job.ending
        ):  # never free again if another thread ends this process: a shutdown notice came
            pass
        traceback.print_exc()
        time.sleep(
            _job.deadline_seconds
        )  # in here `heartbeat` ends this process if another one is lost
        abort("an error of the program, which its output shows", 1)


def _place(config: DistributedConfig) -> tuple[str, int, int] | None:
    """Coordinator, number of processes, and this one's. JAX is asked for those of a pod only where
    there is a TPU."""
    if config.coordinator is not None:
        return config.coordinator, config.processes, config.process
    asked_for = os.environ.get("JAX_PLATFORMS", "tpu")
    if "tpu" not in asked_for or not any(Path(device).exists() for device in TPU_DEVICES):
        return None
    from jax._src.clusters.cloud_tpu_cluster import GceTpuCluster, GkeTpuCluster

    for cluster in (GkeTpuCluster, GceTpuCluster):
        if cluster.is_env_present() and (count := cluster.get_process_count()) > 1:
            port = os.environ.get("JAX_COORDINATOR_PORT")
            address = cluster.get_coordinator_address(math.ceil(config.deadline_seconds), port)
            return address, count, cluster.get_process_id()
    return None


def _announce(key: str, what: Any) -> None:
    with contextlib.suppress(
        RuntimeError
    ):  # of JAX: another process was first, or process 0 is gone
        _job.client.key_value_set(key, json.dumps([_job.process, what]))


def _wait_for_notice(key: str, heard: Callable[[int, Any], object]) -> None:
    from jax.errors import JaxRuntimeError

    with contextlib.suppress(JaxRuntimeError):  # the job is over, or process 0 is gone
        sender, what = json.loads(
            _job.client.blocking_key_value_get(key, _milliseconds(365 * DAY_SECONDS))
        )
        if sender != _job.process:
            heard(sender, what)


def _on_shutdown(sender: int, notice: tuple[int, str]) -> None:
    status, sentence = notice
    with _job.ending:
        print(f"\nprocess {sender} on {_job.hosts[sender]} ended: {sentence}", file=sys.stderr)
        _exit_together(status)


def _exit_together(status: int) -> None:
    """All processes have read the notice before one of them ends, and process 0, which holds the
    store, ends last."""
    assert _job.heartbeat is not None, "the job was started"
    _job.heartbeat.stop(status)
    with contextlib.suppress(OSError):  # the reader may be gone
        sys.stdout.flush()
        sys.stderr.flush()
    at_the_latest = threading.Timer(
        SHUTDOWN_SECONDS, os._exit, (status,)
    )  # where process 0 hangs, so does the barrier
    at_the_latest.daemon = True
    at_the_latest.start()
    with contextlib.suppress(RuntimeError):  # of JAX: one of them is gone
        _job.client.wait_at_barrier(SHUTDOWN, _milliseconds(SHUTDOWN_BARRIER_SECONDS))
    if is_primary():
        time.sleep(1.0)
    os._exit(status)


@contextlib.contextmanager
def _bounded(name: str, missing: Callable[[], list[int]]):
    try:
        yield
    except RuntimeError as error:  # of JAX
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        names = " and ".join(f"process {number} on {_job.hosts[number]}" for number in missing())
        raise HostMissing(
            f"{names} did not come to '{name}' within {_job.barrier_seconds:g} s "
            f"(distributed.barrier_seconds), where process {_job.process} on {host()} waits: look "
            "at the output there, or raise it"
        ) from error


def _not_arrived(key: str) -> list[int]:
    arrived = {
        int(place.rpartition("/")[2])
        for place, _ in _job.client.key_value_dir_get(f"arrived/{key}/")
    }
    return [number for number in range(processes()) if number not in arrived]


def _key(name: str) -> str:
    _job.agreements += 1
    return f"{_job.agreements} {name.replace('/', ' ')}"


def _milliseconds(seconds: float) -> int:
    return math.ceil(1000 * seconds)
