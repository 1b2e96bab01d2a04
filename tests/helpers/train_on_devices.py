"""Train on eight virtual devices, in one process or several. Started by `test_devices.py`.

    python -m tests.helpers.train_on_devices DIRECTORY PROCESSES PROCESS PORT STEPS DEADLINE_SECONDS [SECONDS_A_STEP]

Each process writes DIRECTORY/PROCESS.json: the losses, and which packed rows it read. The last
state is saved as a checkpoint, and its policy as a Hugging Face directory;
DIRECTORY/PROCESS-engine-N.npz holds the policy as an engine over N devices of this process gets it.
With SECONDS_A_STEP it is slow enough to be killed between two steps.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from mujica_jax.config.schema import DistributedConfig
from mujica_jax.learning.checkpoints import Checkpoints
from mujica_jax.learning.optimizer import schedule
from mujica_jax.learning.packing import Batch, PackedRows, pack
from mujica_jax.learning.trainer import StepMetrics, Trainer, fit
from mujica_jax.models.sharding import make_mesh
from mujica_jax.models.weight_sync import sync_weights
from mujica_jax.models.weights import gather_checkpoint, save_checkpoint
from mujica_jax.runtime import distributed
from mujica_jax.runtime.preemption import Preemption
from tests.helpers.packed_rows import MODEL, TRAINER, random_conversations, tiny_decoder

AXES = {"data_parallel_size": 2, "fsdp": 2, "tensor_parallel_size": 2}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RecordedRows(PackedRows):
    """Rows that record which of them were read, batch by batch."""

    read: list[list[int]] = dataclasses.field(default_factory=list)

    def batch(self, rows: np.ndarray | slice, columns: Sequence[str] = ()) -> Batch:
        assert isinstance(rows, np.ndarray)
        self.read.append(rows.tolist())
        return super().batch(rows, columns)


def main(
    directory: str,
    processes: int,
    process: int,
    port: int,
    steps: int,
    deadline: int,
    pause: float = 0,
) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8 // processes)
    if processes > 1:
        coordinator = f"localhost:{port}"
        distributed.start(
            DistributedConfig(
                coordinator=coordinator,
                num_processes=processes,
                process_id=process,
                deadline_seconds=deadline,
            ),
            Preemption().on_notice,
        )
    assert (len(jax.devices()), len(jax.local_devices())) == (8, 8 // processes)
    trainer = Trainer(MODEL, dataclasses.replace(TRAINER, **AXES))
    packed = pack(random_conversations(36), sequence_length=TRAINER.sequence_length, seed=0)
    rows = RecordedRows(**vars(packed))
    losses = []

    def on_step(metrics: StepMetrics) -> None:
        losses.append(metrics.loss)
        print(metrics.step, flush=True)
        time.sleep(pause)

    curve = schedule(peak=1e-2, end_value=1e-3, total_steps=steps)
    state = trainer.initial_state(tiny_decoder())
    batches = trainer.batches(rows, seed=0)
    result = fit(trainer, state, batches, schedule=curve, steps=steps, on_step=on_step)

    of_state = jax.tree.leaves((result.state.params, result.state.opt_state))
    split = [array for array in of_state if array.addressable_shards[0].data.size < array.size]
    assert len(split) == 3 * 8, (
        "every matrix is split over fsdp or tensor, and so are both its moments"
    )
    with Checkpoints(Path(directory) / "learning", keep=1) as checkpoints:
        checkpoints.save(result.state, {})
    for tensor in (1, 2):
        mesh = make_mesh(1, 1, tensor, jax.local_devices()) if tensor > 1 else None
        handed = jax.tree.leaves(sync_weights(trainer.policy(result.state), mesh))
        assert {frozenset(array.sharding.device_set) for array in handed} == {
            frozenset(jax.local_devices()[:tensor])
        }
        np.savez(Path(directory) / f"{process}-engine-{tensor}.npz", *map(np.asarray, handed))
    decoder = trainer.decoder(result.state)
    if distributed.is_primary():
        save_checkpoint(decoder, Path(directory) / "policy")
    else:
        gather_checkpoint(decoder)
    (Path(directory) / f"{process}.json").write_text(
        json.dumps({"losses": losses, "read": rows.read})
    )
    distributed.finish()


def guarded() -> None:
    """Run `main` and tell the other processes of an error, as `train.main` does."""
    try:
        main(sys.argv[1], *map(int, sys.argv[2:7]), *map(float, sys.argv[7:]))
    except Exception:
        distributed.abort_with_traceback()
        raise


if __name__ == "__main__":
    guarded()
