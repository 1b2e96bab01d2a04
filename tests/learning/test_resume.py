"""A run killed by SIGKILL and started again sees the samples of an undisturbed run and ends with
its numbers, also on other devices.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from mujica_jax.learning.checkpoints import COMMITTED, Checkpoints
from mujica_jax.learning.trainer import Trainer, TrainState
from mujica_jax.models.weights import load_checkpoint
from tests.helpers.packed_rows import MODEL, TRAINER
from tests.helpers.paths import ROOT
from tests.helpers.patience import HANG_SECONDS

ENVIRONMENT = os.environ | {
    "XLA_FLAGS": "--xla_backend_optimization_level=0",
    "PYTHONPATH": str(ROOT),
}

pytestmark = pytest.mark.slow


def play(directory: Path, *, data: int = 1, fsdp: int = 1, kill: str = "none") -> Path:
    directory.mkdir(exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "tests.helpers.train_in_pieces",
        str(directory),
        str(data),
        str(fsdp),
        kill,
    ]
    finished = subprocess.run(
        command, env=ENVIRONMENT, capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert finished.returncode == (0 if kill == "none" else -signal.SIGKILL), finished.stderr
    return directory


def samples(directory: Path) -> dict[int, list]:
    """Return what each step saw. Where a step was made twice, check that both agree."""
    samples_of_step = {}
    for line in (directory / "samples.jsonl").read_text().splitlines():
        entry = json.loads(line)
        assert samples_of_step.setdefault(entry["step"], entry["samples"]) == entry["samples"]
    return samples_of_step


def state(directory: Path) -> TrainState:
    restored = Checkpoints(directory, keep=1).restore_latest(
        Trainer(MODEL, TRAINER).abstract_state()
    )
    assert restored is not None
    return restored[0]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    directory = play(tmp_path_factory.mktemp("undisturbed"))
    assert sorted(samples(directory)) == list(range(1, 21))
    return directory


def test_twenty_steps_are_seven_a_kill_and_thirteen_bit_for_bit(undisturbed, tmp_path):
    play(play(tmp_path / "run", kill="loop"))
    assert samples(tmp_path / "run") == samples(undisturbed)
    jax.tree.map(np.testing.assert_array_equal, state(tmp_path / "run"), state(undisturbed))


def test_a_save_that_a_kill_tore_is_not_used(undisturbed, tmp_path):
    run = play(tmp_path / "run", kill="save")
    assert (run / "000002" / "arrays").exists()
    assert not (run / "000002" / COMMITTED).exists()
    assert int(state(run).step) == 7
    play(run)
    assert samples(run) == samples(undisturbed)
    jax.tree.map(np.testing.assert_array_equal, state(run), state(undisturbed))


def test_what_four_devices_began_two_continue_and_export(undisturbed, tmp_path):
    play(play(tmp_path / "run", data=2, fsdp=2, kill="loop"), fsdp=2)
    assert samples(tmp_path / "run") == samples(undisturbed)
    continued = state(tmp_path / "run")
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5),
        continued,
        state(undisturbed),
    )
    exported = nnx.state(load_checkpoint(tmp_path / "run" / "model"))
    jax.tree.map(
        np.testing.assert_array_equal,
        nnx.to_pure_dict(exported),
        nnx.to_pure_dict(continued.params),
    )
