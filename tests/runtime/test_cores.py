"""How many cores a process may use."""

import os

import pytest

from mujica_jax.runtime.cores import usable_cores


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity"), reason="the system does not bind a process to a core"
)
@pytest.mark.parametrize(
    ("limit", "cores"),
    [
        (None, 8),
        ("max 100000", 8),
        ("250000 100000", 2),
        ("50000 100000", 1),
        ("3200000 100000", 8),
    ],
)
def test_a_process_uses_no_more_cores_than_its_container_may(tmp_path, monkeypatch, limit, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    file = tmp_path / "cpu.max"
    if limit is not None:
        file.write_text(limit)
    assert usable_cores(file) == cores
