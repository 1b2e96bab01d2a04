"""Leases by a clock that the test turns."""

import json
import os
import socket

from mujica_jax.storage.leases import Leases
from mujica_jax.storage.run_directory import RunDirectory


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


PROCESSES = (os.getpid(), os.getppid(), 1)  # that live


def leases_of(tmp_path, count: int) -> tuple[Clock, list[Leases]]:
    clock = Clock()
    directory = RunDirectory(tmp_path)
    return clock, [
        Leases(directory, seconds=60.0, clock=clock, process=process)
        for process in PROCESSES[:count]
    ]


def test_a_lease_has_one_holder_until_it_is_over(tmp_path):
    clock, (first, second) = leases_of(tmp_path, 2)
    lease = first.claim("unit")
    assert lease is not None
    assert second.claim("unit") is None
    clock.now += 59
    lease.renew()
    clock.now += 59
    assert second.claim("unit") is None, "it was renewed"
    clock.now += 2
    assert not lease.is_lost
    assert second.claim("unit") is not None
    assert second.takeovers == 1
    assert lease.is_lost
    assert second.takeover_seconds == 61, "since the renewal at 1059"
    holder = first.holder("unit")
    assert holder is not None
    assert holder.owner == second.owner


def test_a_lease_is_written_again_only_when_a_quarter_of_it_is_over(tmp_path):
    clock, (first,) = leases_of(tmp_path, 1)
    lease = first.claim("unit")
    assert lease is not None
    file = tmp_path / "unit" / "00001.json"
    clock.now += 14
    lease.renew()
    assert json.loads(file.read_text())["until"] == 1060
    clock.now += 1
    lease.renew()
    assert json.loads(file.read_text())["until"] == 1075


def test_one_that_is_released_or_whose_process_is_gone_is_free_at_once(tmp_path):
    _, (first, second, third) = leases_of(tmp_path, 3)
    lease = first.claim("unit")
    assert lease is not None
    lease.release()
    assert second.claim("unit") is not None
    file = tmp_path / "unit" / "00002.json"
    # Linux gives out no such process id.
    gone = json.loads(file.read_text()) | {"process": 2**22 + 1}
    file.write_text(json.dumps(gone))
    assert third.claim("unit") is not None
    assert gone["host"] == socket.gethostname()
    assert third.claim("other unit") is not None


def test_of_two_that_come_at_the_same_time_one_has_it(tmp_path, monkeypatch):
    _, (first, second) = leases_of(tmp_path, 2)
    # The second one looked before the first one wrote.
    monkeypatch.setattr(second, "_numbers", lambda name: [])
    assert first.claim("unit") is not None
    assert second.claim("unit") is None


def test_what_another_program_left_there_counts_for_nothing(tmp_path):
    (tmp_path / "unit").mkdir()
    (tmp_path / "unit" / "00001.json").write_text("{}")
    _, (lease_holder,) = leases_of(tmp_path, 1)
    assert lease_holder.holder("unit") is None
    assert lease_holder.claim("unit") is not None
