"""Training, attention and embedding do not depend on the number of devices and processes.

One device reads what eight devices saved. A lost process ends the others.
"""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from mujica_jax.learning.batches import rows_of_step
from mujica_jax.learning.checkpoints import Checkpoints
from mujica_jax.learning.optimizer import schedule
from mujica_jax.learning.packing import pack
from mujica_jax.learning.trainer import Trainer, TrainState, fit
from mujica_jax.models.weights import load_checkpoint
from tests.helpers.packed_rows import MODEL, TRAINER, random_conversations, tiny_decoder
from tests.helpers.paths import ROOT
from tests.helpers.patience import HANG_SECONDS
from tests.helpers.whole_runs import free_port

# Compiling for eight devices takes most of the time: half as long without optimisation.
ENVIRONMENT = os.environ | {
    "XLA_FLAGS": "--xla_backend_optimization_level=0",
    "PYTHONPATH": str(ROOT),
}
STEPS = 4
DEADLINE_SECONDS = 900  # of a heartbeat, where nothing is lost


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    return Trainer(MODEL, TRAINER)


@pytest.fixture(scope="module")
def on_one_device(trainer) -> TrainState:
    rows = pack(random_conversations(36), sequence_length=TRAINER.sequence_length, seed=0)
    curve = schedule(peak=1e-2, end_value=1e-3, total_steps=STEPS)
    state = trainer.initial_state(tiny_decoder())
    return fit(trainer, state, trainer.batches(rows, seed=0), schedule=curve, steps=STEPS).state


def begin(folder: Path, processes: int, *options: float) -> list[subprocess.Popen[str]]:
    """Start the processes of one job on eight devices.

    `options` are the steps, the deadline and the pause of `train_on_devices.py`.
    """
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "tests.helpers.train_on_devices",
        str(folder),
        str(processes),
    ]
    return [
        subprocess.Popen(
            [*command, str(process), str(port), *map(str, options)],
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(processes)
    ]


def finished(job: Sequence[subprocess.Popen[str]]) -> None:
    try:
        for process in job:
            _, messages = process.communicate(timeout=HANG_SECONDS)
            assert process.returncode == 0, messages
    finally:
        for process in job:
            process.kill()
            process.communicate()


def records(folder: Path, processes: int) -> list[dict]:
    return [json.loads((folder / f"{process}.json").read_text()) for process in range(processes)]


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    finished(begin(folder, 2, STEPS, DEADLINE_SECONDS))
    return folder


def assert_state_is(folder: Path, trainer: Trainer, state: TrainState) -> None:
    checkpoint = Checkpoints(folder / "learning", keep=1).restore_latest(trainer.abstract_state())
    assert checkpoint is not None
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5), checkpoint[0], state
    )


@pytest.mark.slow
def test_two_processes_with_four_devices_each_train_like_one_device(
    trainer, on_one_device, two_processes
):
    assert_state_is(two_processes, trainer, on_one_device)


@pytest.mark.slow
def test_each_process_reads_its_half_of_the_rows(two_processes):
    halves = [record["read"] for record in records(two_processes, 2)]
    rows = pack(random_conversations(36), sequence_length=TRAINER.sequence_length, seed=0).num_rows
    assert [len(half) for half in halves] == [STEPS, STEPS]
    for step, (first, second) in enumerate(zip(*halves, strict=True)):
        chosen = rows_of_step(rows, TRAINER.batch_size, seed=0, step=step).tolist()
        assert len(first) == len(second) == TRAINER.batch_size // 2
        assert first + second == chosen


@pytest.mark.slow
def test_what_lies_on_two_processes_is_exported_by_one(trainer, two_processes):
    """Policy and checkpoint hold the same state: each went its own way to disk."""
    checkpoint = Checkpoints(two_processes / "learning", keep=1).restore_latest(
        trainer.abstract_state()
    )
    assert checkpoint is not None
    policy = nnx.state(load_checkpoint(two_processes / "policy"))
    jax.tree.map(np.testing.assert_array_equal, policy, trainer.policy(checkpoint[0]))


@pytest.mark.slow
@pytest.mark.parametrize("tensor", [1, 2])
def test_each_process_has_the_policy_whole_on_its_engine_s_devices(two_processes, tensor):
    policy = jax.tree.leaves(nnx.state(load_checkpoint(two_processes / "policy")))
    for process in range(2):
        handed = np.load(two_processes / f"{process}-engine-{tensor}.npz")
        for array, expected in zip(handed.values(), policy, strict=True):
            np.testing.assert_array_equal(array, expected)


@pytest.mark.slow
def test_two_processes_have_the_loss_curve_of_one(trainer, on_one_device, two_processes, tmp_path):
    finished(begin(tmp_path, 1, STEPS, DEADLINE_SECONDS))
    (alone,) = records(tmp_path, 1)
    assert len(alone["losses"]) == STEPS
    assert len(set(alone["losses"])) == STEPS
    assert_state_is(tmp_path, trainer, on_one_device)
    for record in records(two_processes, 2):
        np.testing.assert_allclose(record["losses"], alone["losses"], rtol=0, atol=1e-5)


@dataclasses.dataclass(frozen=True)
class Loss:
    victim: int
    number: signal.Signals  # killed, or as silent as a host without power


LOSSES = (Loss(0, signal.SIGKILL), Loss(0, signal.SIGSTOP), Loss(1, signal.SIGSTOP))


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: f"{loss.number.name}-{loss.victim}")
def test_a_process_that_is_lost_ends_the_other_which_has_said_what_to_do(loss, tmp_path):
    """JAX ends it, or the error of a collective whose connection is gone."""
    deadline = 10
    job = begin(tmp_path, 2, 10_000, deadline, 0.1)
    victim = job[loss.victim]
    other = job[1 - loss.victim]
    try:
        for line in victim.stdout or ():
            if line.strip() == "3":  # steps: both are among the collectives
                break
        victim.send_signal(loss.number)
        _, messages = other.communicate(timeout=HANG_SECONDS)
    finally:
        for process in job:
            process.kill()
            process.communicate()
    assert other.returncode in (1, -signal.SIGABRT), messages
    note = (
        f"If one of them is lost, JAX ends the others within about {deadline} s with 'detected "
        "fatal errors'; the same command on all hosts continues from what was saved\n"
    )
    reasons = messages.partition(note)[2]
    assert "detected fatal errors" in reasons or "ends because of this error" in reasons, messages


@pytest.mark.slow
def test_every_mesh_computes_what_one_device_does():
    """The program trains on three meshes, with LoRA, with Muon and with a z-loss in parts of a
    batch, and runs splash attention, embedder and engine.
    """
    command = [sys.executable, "-m", "tests.helpers.differences_on_devices"]
    shown = subprocess.run(
        command, env=ENVIRONMENT, capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert shown.returncode == 0, shown.stderr
    differences = json.loads(shown.stdout)
    assert len(differences) == 18
    assert {name: difference for name, difference in differences.items() if difference > 1e-5} == {}
