"""Leases in the run directory. A lease says which process works on a unit of work.

    <name>/00001.json    {"owner", "host", "space", "process", "until", "revision"}

A process claims a lease by creating the file with the next number. Only one process can create it.
The holder renews the lease by writing the same file again. The lease expires at the time `until`,
in seconds since 1970, so the clocks of all hosts must agree within a few seconds. If the holder was
on this host and has ended, its lease expires at once.

If two processes believe that they hold the same lease, they do the same work twice. This does no
harm, because every result is created only once.
"""

import dataclasses
import os
import socket
import time
import uuid
from collections.abc import Callable

from mujica_jax.errors import StoreError
from mujica_jax.storage.manifest import json_bytes
from mujica_jax.storage.run_directory import RunDirectory, atomic_write

# A lease is renewed at most this many times in its duration: whenever a quarter of it has passed.
RENEWALS_A_LEASE = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Holder:
    """The content of a lease."""

    owner: str
    host: str
    # Process namespace. Containers on one host have different ones.
    space: str
    # Process number (pid) in that namespace.
    process: int
    # Time at which the lease expires, in seconds since 1970. 0 if it was released.
    until: float
    # Git revision of the program, or "" if it is unknown.
    revision: str


class Leases:
    """The leases of one process."""

    def __init__(
        self,
        directory: RunDirectory,
        *,
        seconds: float,
        clock: Callable[[], float] = time.time,
        process: int | None = None,
        revision: str | None = None,
    ) -> None:
        """Open the leases of a directory.

        A lease lasts for `seconds` without a renewal. `clock` returns the time in seconds since
        1970. `process` is the number (pid) of the holder on this host; the default is this process.
        `revision` is the git revision of the program, if it is known.
        """
        self.seconds = seconds
        self._directory = directory
        self._clock = clock
        self._revision = revision or ""
        self._host = socket.gethostname()
        self._process = os.getpid() if process is None else process
        try:
            self._space = os.readlink("/proc/self/ns/pid")
        except OSError:
            self._space = ""
        self.owner = f"{self._host}-{self._process}-{uuid.uuid4().hex[:6]}"
        # Number of leases taken over from a process that released them or let them expire.
        self.takeovers = 0
        # The longest time between the last renewal by the old holder and the takeover.
        self.takeover_seconds = 0.0

    def newest(self, name: str) -> Holder | None:
        """Return the holder of a lease, or its last holder. None if nobody ever claimed it."""
        numbers = self._numbers(name)
        return self._read(name, numbers[-1]) if numbers else None

    def holder(self, name: str) -> Holder | None:
        """Return the current holder of a lease, or None."""
        holder = self.newest(name)
        return holder if holder and self._is_valid(holder) else None

    def claim(self, name: str, *, fresh: bool = False) -> "Lease | None":
        """Claim a lease. Return None if another process holds it, or claimed it first.

        Pass `fresh` if a listing has just shown that nobody ever claimed the lease. This saves a
        request.
        """
        numbers = [] if fresh else self._numbers(name)
        last_holder = self._read(name, numbers[-1]) if numbers else None
        if last_holder and self._is_valid(last_holder):
            return None

        number = (numbers[-1] if numbers else 0) + 1
        content = self._bytes(self._clock() + self.seconds)
        if not self._directory.create(_file(name, number), content):
            return None

        if numbers:
            self.takeovers += 1
        # `until` is 0 if the lease was released.
        if last_holder and last_holder.until:
            last_renewal = last_holder.until - self.seconds
            silent_seconds = self._clock() - last_renewal
            self.takeover_seconds = max(self.takeover_seconds, silent_seconds)
        return Lease(self, name, number)

    def _is_valid(self, holder: Holder) -> bool:
        """Return whether a lease has not expired, and its process may be alive."""
        if holder.until <= self._clock():
            return False
        return holder.owner == self.owner or not self._is_gone(holder)

    def is_near(self, holder: Holder) -> bool:
        """Return whether the holder is on this host and in this process namespace.

        Only then can this process find out whether the holder is alive.
        """
        return holder.host == self._host and holder.space == self._space

    def _is_gone(self, holder: Holder) -> bool:
        """Return whether the holder has certainly ended. Holders on other hosts give False."""
        if not self.is_near(holder):
            return False
        try:
            os.kill(holder.process, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        # A holder with our own number is an earlier process: the container was restarted.
        return holder.process == self._process

    def _numbers(self, name: str) -> list[int]:
        """Return the numbers of all files of a lease, in ascending order."""
        files = self._directory.names(f"{name}/")
        return [int(file.rpartition("/")[2].removesuffix(".json")) for file in files]

    def _read(self, name: str, number: int) -> Holder | None:
        """Return the content of a lease's file, or None if it is damaged or of another program."""
        try:
            return Holder(**self._directory.read_json(_file(name, number)))
        except (StoreError, TypeError):
            return None

    def _bytes(self, until: float) -> bytes:
        """Return the content of a lease that this process holds until a time."""
        holder = Holder(
            owner=self.owner,
            host=self._host,
            space=self._space,
            process=self._process,
            until=until,
            revision=self._revision,
        )
        return json_bytes(dataclasses.asdict(holder))

    def _write(self, name: str, number: int, until: float) -> None:
        """Write the file of a lease again, with a new time of expiry."""
        with self._directory.io_statistics.timed("write"):
            atomic_write(self._directory.root / _file(name, number), self._bytes(until))


class Lease:
    """A lease that this process holds."""

    def __init__(self, leases: Leases, name: str, number: int) -> None:
        self._leases = leases
        self._name = name
        self._number = number
        self._renewal_time = leases._clock()

    @property
    def is_lost(self) -> bool:
        """Whether the lease expired and another process claimed it."""
        return self._leases._directory.exists(_file(self._name, self._number + 1))

    def renew(self) -> None:
        """Extend the lease if a quarter of its time has passed. It may be called at any rate."""
        leases = self._leases
        now = leases._clock()
        if now - self._renewal_time >= leases.seconds / RENEWALS_A_LEASE:
            leases._write(self._name, self._number, until=now + leases.seconds)
            self._renewal_time = now

    def release(self) -> None:
        """Give up the lease, so that the next process can claim it at once."""
        self._leases._write(self._name, self._number, until=0.0)


def _file(name: str, number: int) -> str:
    return f"{name}/{number:05d}.json"
