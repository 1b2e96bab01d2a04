"""Before the processes of a job start JAX together: are all of them here, and were all started for
the same job?

JAX's own start aborts the process when another one is missing, without its name. So process 0 first
listens at the coordinator's address itself: each other process connects and sends one line of JSON
(its number, the number of processes, its host's name), and the answer is the names of all hosts, or
one sentence about what is wrong. Then the port is free for JAX. Called by `distributed.start`;
needs no JAX.
"""

import contextlib
import json
import socket
import time
from typing import Any

from mujica_jax.errors import UserError

MAX_LINE_BYTES = 1_000_000  # more than the names of 10,000 hosts
RETRY_SECONDS = 0.1
# for one caller's line: one that connects and says nothing is no process of this job
CALLER_SECONDS = 5.0


def rendezvous(
    coordinator: str, processes: int, process: int, *, host: str, deadline_seconds: float
) -> tuple[str, ...]:
    """The host names of all processes, by number. Raises UserError in all of them if one is missing
    or was started for another job.
    """
    address = _split(coordinator)
    until = time.monotonic() + deadline_seconds
    if process > 0:
        said = {"process": process, "processes": processes, "host": host}
        # process 0 may begin later, and waits for as long
        answer = _call(address, said, until, 2 * deadline_seconds)
        if answer is None:
            raise UserError(
                f"process {process} on {host} did not reach process 0 at distributed.coordinator "
                f"{coordinator} within {deadline_seconds:g} s: start process 0 there with the same "
                "address, and let this machine reach that port"
            )
    else:
        try:
            server = socket.create_server(("", address[1]), backlog=processes)
        except OSError as error:
            raise UserError(
                f"process 0 cannot listen at port {address[1]} of distributed.coordinator "
                f"{coordinator} ({error.strerror}): choose a port that is free on this machine"
            ) from error
        late = (
            f"did not come to distributed.coordinator {coordinator} within {deadline_seconds:g} s"
        )
        answer = _gather(server, processes, host, until, late)
    if "refused" in answer:
        raise UserError(answer["refused"])
    return tuple(answer["hosts"])


def _split(coordinator: str) -> tuple[str, int]:
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError(
            f"distributed.coordinator is {coordinator} and must be the host of process 0 and a "
            "free port there, as in 10.0.0.2:8476"
        )
    return host, int(port)


def _gather(
    server: socket.socket, processes: int, host: str, until: float, late: str
) -> dict[str, Any]:
    """What process 0 answers to all, once all have called or one of them is wrong."""
    names, callers, refused = {0: host}, [], None
    with contextlib.ExitStack() as opened:
        opened.enter_context(server)
        while len(names) < processes and refused is None:
            server.settimeout(max(0.01, until - time.monotonic()))
            try:
                caller, _ = server.accept()
            except TimeoutError:
                missing = [str(number) for number in range(processes) if number not in names]
                refused = (
                    f"process{'es' if len(missing) > 1 else ''} {', '.join(missing)} of "
                    f"{processes} {late}: start all of them at the same time, and let their "
                    "machines reach that address"
                )
                break
            opened.enter_context(caller)
            said = _receive(caller, CALLER_SECONDS)
            if said is None or said.keys() != {"process", "processes", "host"}:
                caller.close()  # a process of this job that was too slow calls again
                continue
            callers.append(caller)
            refused = _conflict(said, names, processes)
            names.setdefault(said["process"], said["host"])
        # before the answer: a process that has it goes on to JAX, which needs the port
        server.close()
        hosts = [names.get(number) for number in range(processes)]
        answer = {"hosts": hosts} if refused is None else {"refused": refused}
        for caller in callers:
            with contextlib.suppress(OSError):  # gone again: JAX's start says so
                _send(caller, answer)
    return answer


def _conflict(said: dict[str, Any], names: dict[int, str], processes: int) -> str | None:
    number, count, host = said["process"], said["processes"], said["host"]
    if count != processes:
        return (
            f"process {number} on {host} was started with distributed.processes {count} and "
            f"process 0 on {names[0]} with {processes}: give all of them the same number"
        )
    if number in names:
        return (
            f"distributed.process is {number} on {names[number]} and on {host}: number the "
            f"{processes} processes from 0, each once"
        )
    return None


def _call(
    address: tuple[str, int], said: dict[str, Any], until: float, answer_seconds: float
) -> dict[str, Any] | None:
    """What process 0 answers. None if it cannot be reached."""
    while (left := until - time.monotonic()) > 0:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(address, timeout=left) as connection,
        ):
            _send(connection, said)
            if (answer := _receive(connection, answer_seconds)) is not None:
                return answer
        time.sleep(RETRY_SECONDS)  # it has not begun yet
    return None


def _receive(connection: socket.socket, seconds: float) -> dict[str, Any] | None:
    """One line of JSON. None from a stranger, who sends something else or ends."""
    connection.settimeout(seconds)
    try:
        with connection.makefile("rb") as file:
            value = json.loads(file.readline(MAX_LINE_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _send(connection: socket.socket, value: dict[str, Any]) -> None:
    connection.sendall(json.dumps(value).encode() + b"\n")
