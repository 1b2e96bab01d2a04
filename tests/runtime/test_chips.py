"""What a device could do: from the table for chips that are in it, measured for the others."""

import itertools
import types
from typing import Any

import jax
import pytest

from mujica_jax.runtime import chips
from mujica_jax.runtime.chips import (
    CHIPS,
    chip_of,
    measured_flops_per_second,
    peak_flops_per_second,
)


def devices(kind: str, platform: str, count: int, processes: int = 1) -> list[Any]:
    return [
        types.SimpleNamespace(device_kind=kind, platform=platform, process_index=number % processes)
        for number in range(count)
    ]


def test_chips_are_known_by_what_jax_calls_them():
    names = {
        "TPU v4": "v4",
        "TPU v5 lite": "v5e",
        "TPU v5": "v5p",
        "TPU v6 lite": "v6e",
        "TPU7x": "v7x",
    }
    assert {kind: chip_of(kind).name for kind in names} == names
    assert chip_of("cpu") is None
    assert chip_of("NVIDIA H200") is None
    assert len({kind for chip in CHIPS for kind in chip.kinds}) == sum(
        len(chip.kinds) for chip in CHIPS
    )


def test_a_slice_can_do_what_its_chips_can():
    assert peak_flops_per_second(devices("TPU v5 lite", "tpu", 32), "float32") == 32 * 197e12


@pytest.mark.parametrize(
    ("same_machine", "times"),
    [
        (devices("cpu", "cpu", 8), 1),
        (devices("cpu", "cpu", 8, processes=2), 2),
        (devices("H200", "gpu", 8), 8),
    ],
)
def test_devices_of_one_cpu_are_one_machine(same_machine, times, monkeypatch):
    monkeypatch.setattr(chips, "measured_flops_per_second", lambda platform, dtype: 5.0)
    assert peak_flops_per_second(same_machine, "float32") == 5.0 * times


def test_a_cpu_is_measured_once():
    first = peak_flops_per_second(jax.devices(), "float32")
    assert 1e8 < first < 1e15
    measured = measured_flops_per_second.cache_info().misses
    assert peak_flops_per_second(jax.devices(), "float32") == first
    assert measured_flops_per_second.cache_info().misses == measured >= 1


class CallClock:
    """A clock that only calls move: the first call is slow, as one that compiles."""

    def __init__(self) -> None:
        self.now = 100.0
        self._call_seconds = itertools.cycle([9.0, 0.03125, 0.015625])

    def call(self) -> None:
        self.now += next(self._call_seconds)


def test_measuring_spends_what_it_may_and_keeps_the_fastest(monkeypatch):
    clock = CallClock()
    monkeypatch.setattr(chips, "time", types.SimpleNamespace(perf_counter=lambda: clock.now))

    assert chips.fastest_seconds(clock.call, spend_seconds=0.0625) == 0.015625
    assert clock.now == 100.0 + 9.0 + (0.03125 + 0.015625 + 9.0), (
        "the first one's time is not among what it may spend"
    )
    assert chips.fastest_seconds(clock.call, spend_seconds=0.0) > 0, "once at least"
