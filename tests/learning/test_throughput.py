"""The figures of a training step, compared with numbers worked out by hand."""

import dataclasses

import pytest

from mujica_jax.learning import throughput as step_figures
from mujica_jax.learning.packing import pack
from mujica_jax.learning.throughput import Throughput, training_flops
from mujica_jax.learning.trainer import StepMetrics, Trainer
from tests.helpers.packed_rows import MODEL, TRAINER, conversation

# Two rows of 8 slots, 7 and 6 of them full; 5 and 3 tokens are trained.
ROWS = pack(
    [
        conversation((1, 2), (3, 4, 5)),
        conversation((6,), (7,)),
        conversation((1,), (2, 3)),
        conversation((4, 5), (6,)),
    ],
    sequence_length=8,
    seed=0,
)
PEAK = 1e6


def step(number: int) -> StepMetrics:
    return StepMetrics(step=number, loss=1.0, grad_norm=1.0, learning_rate=0.1, trained_tokens=8)


@pytest.fixture
def told(monkeypatch):
    """Return the figures of steps after the tenth, and a clock that a test sets."""
    monkeypatch.setattr(step_figures, "peak_flops_per_second", lambda devices, dtype: PEAK)
    clock = {"seconds": 3.0}
    trainer = Trainer(MODEL, dataclasses.replace(TRAINER, sequence_length=8, batch_size=4))
    return Throughput(trainer, ROWS, done=10, seconds=lambda: clock["seconds"]), clock


def test_speeds_are_those_since_the_step_before(told):
    """A step sees each of the two rows twice: 26 tokens.

    5 steps took 2 seconds, and so did the next 10.
    """
    figures, clock = told
    clock["seconds"] += 2.0
    first = figures.of(step(15))
    clock["seconds"] += 2.0
    second = figures.of(step(25))
    tokens = 2 * (2 + 3 + 1 + 1 + 1 + 2 + 2 + 1)
    assert first["tokens_per_second"] == pytest.approx(5 * tokens / 2)
    assert second["tokens_per_second"] == pytest.approx(10 * tokens / 2)
    assert first["tokens_per_second_per_device"] == first["tokens_per_second"], "one device"
    pairs = 2 * (15 + 3 + 6 + 6)
    operations = training_flops(
        MODEL, slots=32, trained_tokens=2 * ROWS.trained_tokens, pairs=pairs
    )
    assert first["mfu"] == pytest.approx(5 * operations / 2 / PEAK)


def test_rows_and_memory_are_described(told):
    figures, clock = told
    clock["seconds"] += 1.0
    values = figures.of(step(11))
    assert values["packing_efficiency"] == 13 / 16
    assert values["trained_fraction"] == pytest.approx(ROWS.trained_tokens / 13)
    assert values["compiled_programs"] == 0
    assert values["host_peak_bytes"] > 50e6, "an interpreter with JAX"


def test_devices_share_the_tokens(monkeypatch):
    monkeypatch.setattr(step_figures, "peak_flops_per_second", lambda devices, dtype: PEAK)
    trainer = Trainer(MODEL, dataclasses.replace(TRAINER, sequence_length=8, batch_size=4))
    trainer.mesh = type("Mesh", (), {"size": 4, "devices": trainer.mesh.devices})()
    figures = Throughput(trainer, ROWS, done=0, seconds=iter([0.0, 1.0]).__next__)
    values = figures.of(step(1))
    assert values["tokens_per_second_per_device"] == values["tokens_per_second"] / 4
