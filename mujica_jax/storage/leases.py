"""Who works on what: leases in the run directory, for processes that know nothing else of each
other.

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
    """What a lease says."""

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
        """`process`: another one of this host than the one that calls."""
        self._directory, self.seconds, self._clock = directory, seconds, clock
        self._revision = revision or ""
        self._host, self._process = (
            socket.gethostname(),
            os.getpid() if process is None else process,
        )
        try:
            self._space = os.readlink("/proc/self/ns/pid")
        except OSError:
            self._space = ""
        self.owner = f"{self._host}-{self._process}-{uuid.uuid4().hex[:6]}"
        self.takeovers = 0  # leases that another one had let expire
        self.takeover_seconds = 0.0  # the longest time from a last renewal until then

    def newest(self, name: str) -> Holder | None:
        """Who has it, or had it last."""
        numbers = self._numbers(name)
        return self._read(name, numbers[-1]) if numbers else None

    def holder(self, name: str) -> Holder | None:
        """Who has it now."""
        found = self.newest(name)
        return found if found and self._counts(found) else None

    def claim(self, name: str, *, fresh: bool = False) -> "Lease | None":
        """None where another process has it, or was faster. `fresh`: nobody has had it, as a
        listing said just now."""
        numbers = [] if fresh else self._numbers(name)
        found = self._read(name, numbers[-1]) if numbers else None
        if found and self._counts(found):
            return None
        number = (numbers[-1] if numbers else 0) + 1
        if not self._directory.create(
            _file(name, number), self._bytes(self._clock() + self.seconds)
        ):
            return None
        self.takeovers += bool(numbers)
        if found and found.until:  # it was not released
            silent = self._clock() - (found.until - self.seconds)
            self.takeover_seconds = max(self.takeover_seconds, silent)
        return Lease(self, name, number)

    def _counts(self, found: Holder) -> bool:
        return found.until > self._clock() and (
            found.owner == self.owner or not self._is_gone(found)
        )

    def is_near(self, found: Holder) -> bool:
        """Among the processes that this one can see."""
        return (found.host, found.space) == (self._host, self._space)

    def _is_gone(self, found: Holder) -> bool:
        """Known for a process of this host alone. One of our own number was here before a
        container's restart."""
        if not self.is_near(found):
            return False
        try:
            os.kill(found.process, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return found.process == self._process

    def _numbers(self, name: str) -> list[int]:
        return [
            int(file.rpartition("/")[2].removesuffix(".json"))
            for file in self._directory.names(f"{name}/")
        ]

    def _read(self, name: str, number: int) -> Holder | None:
        try:
            return Holder(**self._directory.read_json(_file(name, number)))
        except (StoreError, TypeError):
            return None  # nothing that this program wrote: over

    def _bytes(self, until: float) -> bytes:
        said = {
            "owner": self.owner,
            "host": self._host,
            "space": self._space,
            "process": self._process,
        }
        return json_bytes(said | {"until": until, "revision": self._revision})

    def _write(self, name: str, number: int, until: float) -> None:
        with self._directory.io_statistics.timed("write"):
            atomic_write(self._directory.root / _file(name, number), self._bytes(until))


class Lease:
    """One that this process has. `renew` may be called at any rate: it writes when a quarter of the
    time is over."""

    def __init__(self, leases: Leases, name: str, number: int) -> None:
        self._leases, self._name, self._number = leases, name, number
        self._written = leases._clock()

    @property
    def is_lost(self) -> bool:
        """It was over at some time, and another process has it since."""
        return self._leases._directory.exists(_file(self._name, self._number + 1))

    def renew(self) -> None:
        leases, now = self._leases, self._leases._clock()
        if now - self._written >= leases.seconds / RENEWALS_A_LEASE:
            leases._write(self._name, self._number, now + leases.seconds)
            self._written = now

    def release(self) -> None:
        """Whoever asks next has it."""
        self._leases._write(self._name, self._number, 0.0)


def _file(name: str, number: int) -> str:
    return f"{name}/{number:05d}.json"
