"""Training, attention and embedding do not depend on the number of devices and processes; what eight devices saved is read on one."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from packed_rows import MODEL, SHORT_SCHEDULE, TRAINER, random_conversations, tiny_decoder

from mujica_jax.learning.checkpoints import Checkpoints
from mujica_jax.learning.trainer import Trainer, TrainState, fit
from mujica_jax.trajectories.packing import pack

ROOT = Path(__file__).resolve().parent.parent
# Compiling for eight devices takes most of the time: half as long without optimisation.
ENVIRONMENT = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0", "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    return Trainer(MODEL, TRAINER)


@pytest.fixture(scope="module")
def on_one_device(trainer) -> TrainState:
    rows = pack(random_conversations(36), row_tokens=TRAINER.row_tokens, seed=0)
    return fit(trainer, trainer.initial_state(tiny_decoder()), rows, schedule=SHORT_SCHEDULE, steps=3, seed=0).state


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_eight_devices_equal_one(trainer, on_one_device, processes, tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(ROOT / "tests" / "train_on_devices.py"), str(tmp_path), str(processes)]
    others = [
        subprocess.Popen([*command, str(process), str(port)], env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
        for process in range(processes)
    ]
    try:
        for other in others:
            _, messages = other.communicate(timeout=120)
            assert other.returncode == 0, messages
    finally:
        for other in others:
            other.kill()
    on_eight, _ = Checkpoints(tmp_path, keep=1).restore_latest(trainer.abstract_state())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5), on_eight, on_one_device)


@pytest.mark.slow
def test_every_mesh_computes_what_one_device_does():
    """Training on three meshes, with LoRA, with a z-loss in parts of a batch; splash attention, embedder and engine."""
    command = [sys.executable, str(ROOT / "tests" / "differences_on_devices.py")]
    shown = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=240)
    assert shown.returncode == 0, shown.stderr
    found = json.loads(shown.stdout)
    assert len(found) == 17
    assert {name: difference for name, difference in found.items() if difference > 1e-5} == {}
