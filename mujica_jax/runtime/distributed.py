"""Several processes, usually one a host, that train as one job.

A job is started before anything else of JAX is used: on a TPU pod from what the pod says of itself, elsewhere from an explicit coordinator
(`DistributedConfig`). Then the processes run the same program and agree at three kinds of places:

    barrier(name)                 all wait for all, at most `barrier_seconds`; whoever does not come is named
    broadcast(name, decide)         process 0 decides, everybody gets its answer: where a clock or a disk decides, and all must do the same
    primary_first(name, work)        process 0 does the work first; what it created once, the others find

Somebody who dies is noticed within `deadline_seconds` (`heartbeat`), somebody who ends by an error tells the others why (`abort`).
With one process all of this is nothing: no import, no thread, no wait. Called by every floor that shares work or files.
"""

import dataclasses
import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from mujica_jax.config.schema import DistributedConfig
from mujica_jax.errors import UserError
from mujica_jax.runtime.rendezvous import listens, rendezvous, split_address

if TYPE_CHECKING:
    from mujica_jax.runtime.heartbeat import Heartbeat
    from mujica_jax.runtime.preemption import Preemption

TPU_DEVICES = ("/dev/accel0", "/dev/vfio/0")  # one of them is there where a TPU is
USER_ERROR = 2
LEFT, KNOWS = "watch/left/", "watch/knows/"  # in the job's store: who ended by itself, who has read that somebody did
SECONDS_A_LOOK = 0.05
BEATS_TO_A_VERDICT = 4  # two in which the store does not answer, the look at its address, and half a one of the judge's
LEAVE_SECONDS = 8.0  # after a preemption's grace time of 20 s; platforms kill 30 s after the notice
Result = TypeVar("Result")


class HostMissing(UserError):
    """A process of the job did not come to where the others waited."""


@dataclasses.dataclass(kw_only=True)
class Job:
    """The processes, as one of them sees them."""

    hosts: tuple[str, ...]  # names by process number
    process: int = 0
    deadline_seconds: float = 0.0
    barrier_seconds: float = 0.0
    coordinator: str | None = None
    meetings: int = 0  # so far: every process counts the same, and every meeting has a name of its own
    watch: "Heartbeat | None" = None


# Like JAX's own state of its processes: one a process, set once, before anything else runs.
_job = Job(hosts=("this host",))


def start(config: DistributedConfig, preemption: "Preemption") -> None:
    """Join the job that the configuration or the TPU pod names; nothing happens where there is neither.

    From then on whoever of its processes is asked to end tells the others.
    """
    global _job
    if config.coordinator is None:
        if (count := _pod_processes()) < 2:
            return
        _initialise(count, config.deadline_seconds)
        import jax

        _job = _job_of(config, process=jax.process_index(), hosts=("?",) * count)
        _job.hosts = tuple(str(broadcast(f"host {number}", _host_name, source=number)) for number in range(count))
    else:
        hosts = rendezvous(
            config.coordinator,
            config.processes,
            config.process,
            host=_host_name(),
            deadline_seconds=config.deadline_seconds,
        )
        _initialise(
            config.processes,
            config.deadline_seconds,
            coordinator_address=config.coordinator,
            num_processes=config.processes,
            process_id=config.process,
            cluster_detection_method="deactivate",  # nothing is guessed beside what was said
        )
        _job = _job_of(config, process=config.process, hosts=hosts)
    _begin_watch(_job, preemption)


def process() -> int:
    return _job.process


def host() -> str:
    """The name of the machine, as messages give it."""
    return _job.hosts[_job.process]


def processes() -> int:
    return len(_job.hosts)


def is_primary() -> bool:
    """Whether this process writes what is written once: metrics, tables, manifests."""
    return _job.process == 0


def shard_for_process(items: Iterable[Result]) -> list[Result]:
    """This process's part of units of work: every `processes()`-th."""
    return [item for number, item in enumerate(items) if number % processes() == _job.process]


def barrier(name: str) -> None:
    """Wait until every process is here. Raises HostMissing naming who did not come within `barrier_seconds`."""
    if processes() == 1:
        return
    from jax.errors import JaxRuntimeError

    client, key = _client(), _key(name)
    client.key_value_set(f"arrived/{key}/{_job.process}", host())
    try:
        client.wait_at_barrier(key, _milliseconds(_job.barrier_seconds))
    except JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        arrived = {int(place.rpartition("/")[2]) for place, _ in client.key_value_dir_get(f"arrived/{key}/")}
        missing = [number for number in range(processes()) if number not in arrived]
        raise HostMissing(_did_not_come(missing, name)) from error


def broadcast(name: str, decide: Callable[[], Any], *, source: int = 0) -> Any:
    """What `decide` returns in process `source`: a value that JSON holds. The others wait for it."""
    if processes() == 1:
        return decide()
    from jax.errors import JaxRuntimeError

    client, key = _client(), f"told/{_key(name)}"
    if _job.process == source:
        client.key_value_set(key, json.dumps(decide()))
    try:
        return json.loads(client.blocking_key_value_get(key, _milliseconds(_job.barrier_seconds)))
    except JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        raise HostMissing(_did_not_come([source], name)) from error


def primary_first(name: str, work: Callable[[], Result]) -> Result:
    """`work` in process 0, and then in all the others."""
    if is_primary():
        result = work()
        barrier(name)
        return result
    barrier(name)
    return work()


def finish() -> None:
    """The end of a job that went well, for all processes together."""
    if _job.watch is None:
        return
    barrier("the end")
    _job.watch.stop()
    import jax

    jax.distributed.shutdown()


def abort(sentence: str, status: int) -> None:
    """This process ends by itself, and the others are told why. Returns only where there are no others."""
    if _job.watch is None:
        return
    _job.watch.stop()
    # Where process 0 is gone this call may hang, and the watch no longer ends it.
    _at_the_latest(LEAVE_SECONDS, lambda: os._exit(status))
    try:
        _client().key_value_set(f"{LEFT}{_job.process}", json.dumps([status, sentence]))
        if is_primary():  # the store ends with this process: everybody is to read it before, and to have ended
            while not _all_know():
                time.sleep(SECONDS_A_LOOK)
            time.sleep(_job.watch.seconds_to_end)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # An orderly end would wait for the others, and abort when they do not come.
        os._exit(status)


def wait_for_heartbeat() -> None:
    """An operation over all hosts failed: if one of them is lost, the watch says so and ends this process within its deadline."""
    if _job.watch is not None:
        time.sleep(_job.deadline_seconds)


def wait_for_shutdown_notice(error: Exception) -> None:
    """Where `error` is how JAX shows that another process has ended, and that one said why, the watch ends this process in here."""
    from jax.errors import JaxRuntimeError

    chain: BaseException | None = error
    while chain is not None and not isinstance(chain, JaxRuntimeError):
        chain = chain.__cause__ or chain.__context__
    if _job.watch is not None and chain is not None:
        time.sleep(BEATS_TO_A_VERDICT * _job.watch.interval_seconds)


def _pod_processes() -> int:
    """Processes of the TPU pod that this machine belongs to; 1 without one. JAX is asked only where there is a TPU."""
    asked_for = os.environ.get("JAX_PLATFORMS", "tpu")
    if "tpu" not in asked_for or not any(Path(device).exists() for device in TPU_DEVICES):
        return 1
    from jax._src.clusters.cloud_tpu_cluster import GceTpuCluster, GkeTpuCluster

    for cluster in (GkeTpuCluster, GceTpuCluster):
        if cluster.is_env_present():
            return cluster.get_process_count()
    return 1


def _initialise(processes: int, deadline_seconds: float, **where: Any) -> None:
    import jax

    # JAX would keep SIGTERM for its training steps: no other phase could hear it (`preemption_sync`).
    jax.config.update("jax_enable_preemption_service", False)

    def too_late() -> NoReturn:
        print(
            f"error: not all {processes} processes of the job came within {deadline_seconds:g} s "
            "(distributed.deadline_seconds): start all of them at the same time, or raise it",
            file=sys.stderr,
            flush=True,
        )
        os._exit(USER_ERROR)

    # JAX aborts the process at its own time limit: this one comes before it.
    timer = _at_the_latest(deadline_seconds, too_late)
    patience = math.ceil(deadline_seconds) + 10
    jax.distributed.initialize(
        **where,
        initialization_timeout=patience,
        heartbeat_timeout_seconds=2 * patience,  # behind our own watch, which names who is lost
        shutdown_timeout_seconds=patience,
    )
    timer.cancel()


def _at_the_latest(seconds: float, act: Callable[[], Any]) -> threading.Timer:
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()
    return timer


def _begin_watch(job: Job, preemption: "Preemption") -> None:
    from mujica_jax.runtime.heartbeat import Heartbeat
    from mujica_jax.runtime.preemption_sync import PreemptionSync

    client = _client()
    address = None if job.coordinator is None else split_address(job.coordinator)

    def exchange(count: int) -> dict[int, int]:
        client.key_value_set(f"watch/alive/{job.process}", str(count), allow_overwrite=True)
        return {number: int(value) for number, value in _by_process("watch/alive/")}

    preemption_sync = PreemptionSync(
        len(job.hosts),
        read=lambda what: {number: int(value) for number, value in _by_process(f"stop/{what}/")},
        write=lambda what, value: client.key_value_set(f"stop/{what}/{job.process}", str(value), allow_overwrite=True),
    )
    preemption.join(preemption_sync, abort)
    job.watch = Heartbeat(
        job.hosts,
        job.process,
        deadline_seconds=job.deadline_seconds,
        exchange=exchange,
        preemption_sync=preemption_sync,
        shutdown_notices=lambda: {number: tuple(json.loads(said)) for number, said in _by_process(LEFT)},
        confirm=lambda: client.key_value_set(f"{KNOWS}{job.process}", "", allow_overwrite=True),
        all_know=_all_know,
        store_is_gone=lambda: address is not None and not listens(address, 1.0),
    )
    job.watch.start()


def _job_of(config: DistributedConfig, *, process: int, hosts: tuple[str, ...]) -> Job:
    from jax._src.distributed import global_state  # JAX has no public name for it

    return Job(
        hosts=hosts,
        process=process,
        deadline_seconds=config.deadline_seconds,
        barrier_seconds=config.barrier_seconds,
        coordinator=global_state.coordinator_address,
    )


def _client() -> Any:
    """JAX's client of the coordination service: key-value store and barriers."""
    from jax._src.distributed import global_state

    assert global_state.client is not None, "the job was started"
    return global_state.client


def _by_process(folder: str) -> list[tuple[int, str]]:
    return [(int(place.rpartition("/")[2]), value) for place, value in _client().key_value_dir_get(folder)]


def _all_know() -> bool:
    """Whether every other process has ended, or has read that one did."""
    return (
        len({_job.process, *(number for folder in (LEFT, KNOWS) for number, _ in _by_process(folder))}) == processes()
    )


def _key(name: str) -> str:
    _job.meetings += 1
    return f"{_job.meetings} {name.replace('/', ' ')}"


def _milliseconds(seconds: float) -> int:
    return math.ceil(1000 * seconds)


def _did_not_come(missing: list[int], name: str) -> str:
    names = " and ".join(f"process {number} on {_job.hosts[number]}" for number in missing)
    return (
        f"{names} did not come to '{name}' within {_job.barrier_seconds:g} s (distributed.barrier_seconds), where "
        f"process {_job.process} on {host()} waits: look at the output there, or raise it"
    )


def _host_name() -> str:
    return socket.gethostname()
