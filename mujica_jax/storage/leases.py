"""Leases in the run directory. They say which process works on what.

    <name>/00001.json    {"owner", "host", "space", "process", "until", "revision"}

A lease is claimed by creating the next number, which one process alone can; it is renewed by
writing its own file again, and counts until the time in it is over (seconds since 1970, so clocks
must agree within a few seconds). A lease whose process is known to be gone, on this host, is over
at once. Two holders do no harm to what is created once: they do the same work twice.
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

RENEWALS_A_LEASE = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Holder:
    """The content of a lease."""

    owner: str
    host: str
    space: str  # of processes, where a host has several (containers)
    process: int
    until: float
    revision: str  # of the program; empty where nobody knows


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

        `process` is the number of the process on this host (default: the calling one).
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
        self.takeovers = 0  # leases that another one had let expire
        self.takeover_seconds = 0.0  # the longest time from a last renewal until then

    def newest(self, name: str) -> Holder | None:
        """Return who has a lease, or had it last."""
        numbers = self._numbers(name)
        return self._read(name, numbers[-1]) if numbers else None

    def holder(self, name: str) -> Holder | None:
        """Return who has a lease now."""
        holder = self.newest(name)
        return holder if holder and self._is_valid(holder) else None

    def claim(self, name: str, *, fresh: bool = False) -> "Lease | None":
        """Claim a lease. Return None if another process has it, or was faster.

        `fresh` says that no process has had it yet, as a listing showed just now.
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
        if last_holder and last_holder.until:  # 0 where it was released
            last_renewal = last_holder.until - self.seconds
            silent_seconds = self._clock() - last_renewal
            self.takeover_seconds = max(self.takeover_seconds, silent_seconds)
        return Lease(self, name, number)

    def _is_valid(self, holder: Holder) -> bool:
        """Return whether a lease is not over and its process may be alive."""
        if holder.until <= self._clock():
            return False
        return holder.owner == self.owner or not self._is_gone(holder)

    def is_near(self, holder: Holder) -> bool:
        """Return whether this process can see that one."""
        return holder.host == self._host and holder.space == self._space

    def _is_gone(self, holder: Holder) -> bool:
        """Return whether a process is known to have ended. That can be known on this host alone."""
        if not self.is_near(holder):
            return False
        try:
            os.kill(holder.process, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        # One of our own number was here before a container's restart.
        return holder.process == self._process

    def _numbers(self, name: str) -> list[int]:
        """Return the numbers under which a lease was claimed, ascending."""
        files = self._directory.names(f"{name}/")
        return [int(file.rpartition("/")[2].removesuffix(".json")) for file in files]

    def _read(self, name: str, number: int) -> Holder | None:
        try:
            return Holder(**self._directory.read_json(_file(name, number)))
        except (StoreError, TypeError):
            return None  # nothing that this program wrote: over

    def _bytes(self, until: float) -> bytes:
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
        with self._directory.io_statistics.timed("write"):
            atomic_write(self._directory.root / _file(name, number), self._bytes(until))


class Lease:
    """A lease that this process has.

    `renew` may be called at any rate: it writes when a quarter of the time is over.
    """

    def __init__(self, leases: Leases, name: str, number: int) -> None:
        self._leases = leases
        self._name = name
        self._number = number
        self._renewal_time = leases._clock()

    @property
    def is_lost(self) -> bool:
        """Whether it was over at some time, and another process claimed it."""
        return self._leases._directory.exists(_file(self._name, self._number + 1))

    def renew(self) -> None:
        """Extend the lease, if a quarter of its time is over."""
        leases = self._leases
        now = leases._clock()
        if now - self._renewal_time >= leases.seconds / RENEWALS_A_LEASE:
            leases._write(self._name, self._number, until=now + leases.seconds)
            self._renewal_time = now

    def release(self) -> None:
        """Give the lease up. The next process that claims it has it."""
        self._leases._write(self._name, self._number, until=0.0)


def _file(name: str, number: int) -> str:
    return f"{name}/{number:05d}.json"
