"""Before the processes of a job start JAX together: is everybody there, and was everybody started for the same job?

JAX's own start-up ends a process by `abort` when somebody is missing, without a word about who. So process 0 first listens at the
coordinator's address itself: every other process connects and says its number, the number of processes it was started for and its host
name, and is answered with the names of all, or with what is wrong, as process 0 sees it. Then the port is free for JAX. Called by
`distributed.start`; needs no JAX.
"""

import contextlib
import json
import socket
import time
from collections.abc import Sequence
from typing import Any

from mujica_jax.errors import UserError

LINE_BYTES = 1_000_000  # more than the names of 10,000 hosts
RETRY_SECONDS = 0.1
PATIENCE_SECONDS = 5.0  # for one caller's line: whoever connects and says nothing is no process of ours


def rendezvous(
    coordinator: str, processes: int, process: int, *, host: str, deadline_seconds: float
) -> tuple[str, ...]:
    """The host names of all processes, by number. Raises UserError, in all of them, where one is missing or was started otherwise."""
    until = time.monotonic() + deadline_seconds
    address = split_address(coordinator)
    if process == 0:
        return _listen(address, processes, host, coordinator, until, deadline_seconds)
    return _report(address, processes, process, host, coordinator, until, deadline_seconds)


def split_address(coordinator: str) -> tuple[str, int]:
    """`host:port`. Raises UserError for anything else."""
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError(
            f"distributed.coordinator is {coordinator} and must be the host of process 0 and a free port there, as in 10.0.0.2:8476"
        )
    return host, int(port)


def listens(address: tuple[str, int], timeout_seconds: float) -> bool:
    """False where it is certain that no process listens there any more; no answer at all is no certainty."""
    try:
        socket.create_connection(address, timeout=timeout_seconds).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return True
    return True


def _listen(
    address: tuple[str, int], processes: int, host: str, coordinator: str, until: float, deadline_seconds: float
) -> tuple[str, ...]:
    try:
        server = socket.create_server(("", address[1]), backlog=processes)
    except OSError as error:
        raise UserError(
            f"process 0 cannot listen at port {address[1]} of distributed.coordinator {coordinator} ({error.strerror}): "
            "choose a port that is free on this machine"
        ) from error
    names, callers = {0: host}, []
    with contextlib.ExitStack() as opened:
        opened.enter_context(server)
        try:
            while len(names) < processes:
                server.settimeout(max(0.01, until - time.monotonic()))
                try:
                    caller, _ = server.accept()
                except TimeoutError:
                    raise UserError(_missing(names, processes, coordinator, deadline_seconds)) from None
                opened.enter_context(caller)
                if (said := _line(caller, PATIENCE_SECONDS)) is None or said.keys() != {"process", "processes", "host"}:
                    continue
                callers.append(caller)
                _refuse_others(said, names, processes)
                names[said["process"]] = said["host"]
        except UserError as refusal:
            _answer(callers, {"refused": str(refusal)})
            raise
        hosts = tuple(names[number] for number in range(processes))
        server.close()  # before the answer: whoever has it goes on to JAX, which is to have the port
        _answer(callers, {"hosts": hosts})
    return hosts


def _report(
    address: tuple[str, int],
    processes: int,
    process: int,
    host: str,
    coordinator: str,
    until: float,
    deadline_seconds: float,
) -> tuple[str, ...]:
    while (left := until - time.monotonic()) > 0:
        try:
            with socket.create_connection(address, timeout=left) as connection:
                _answer([connection], {"process": process, "processes": processes, "host": host})
                # Process 0 began at another time, and waits for as long.
                answer = _line(connection, 2 * deadline_seconds)
        except OSError:  # it has not begun yet
            answer = None
        if answer is None:
            time.sleep(RETRY_SECONDS)
        elif "refused" in answer:
            raise UserError(answer["refused"])
        else:
            return tuple(answer["hosts"])
    raise UserError(
        f"process {process} on {host} did not reach process 0 at distributed.coordinator {coordinator} within {deadline_seconds:g} s: "
        "start process 0 there with the same address, and let this machine reach that port"
    )


def _refuse_others(said: dict[str, Any], names: dict[int, str], processes: int) -> None:
    number, count, host = said["process"], said["processes"], said["host"]
    if count != processes:
        raise UserError(
            f"process {number} on {host} was started with distributed.processes {count} and process 0 on {names[0]} with {processes}: "
            "give all of them the same number"
        )
    if number in names:
        raise UserError(
            f"distributed.process is {number} on {names[number]} and on {host}: number the {processes} processes from 0, each once"
        )


def _missing(names: dict[int, str], processes: int, coordinator: str, deadline_seconds: float) -> str:
    missing = [str(number) for number in range(processes) if number not in names]
    which = f"process {missing[0]}" if len(missing) == 1 else f"processes {', '.join(missing)}"
    return (
        f"{which} of {processes} did not come to distributed.coordinator {coordinator} within {deadline_seconds:g} s: "
        "start all of them at the same time, and let their machines reach that address"
    )


def _line(connection: socket.socket, seconds: float) -> dict[str, Any] | None:
    """One line of JSON; None from whoever sends anything else, or ends."""
    connection.settimeout(seconds)
    try:
        with connection.makefile("rb") as file:
            value = json.loads(file.readline(LINE_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _answer(connections: Sequence[socket.socket], value: dict[str, Any]) -> None:
    for connection in connections:
        with contextlib.suppress(OSError):  # gone again: the roll call or the watch says so
            connection.sendall(json.dumps(value).encode() + b"\n")
