"""Three steps on eight virtual devices, in one process or several; the last state is saved. Started by `test_devices.py`."""

import dataclasses
import sys

import jax
from packed_rows import MODEL, SHORT_SCHEDULE, TRAINER, random_conversations, tiny_decoder

from mujica_jax.learning.checkpoints import Checkpoints
from mujica_jax.learning.trainer import Trainer, fit
from mujica_jax.trajectories.packing import pack

AXES = {"data": 2, "fsdp": 2, "tensor": 2}


def main(directory: str, processes: int, process: int, port: int) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8 // processes)
    if processes > 1:
        jax.distributed.initialize(f"localhost:{port}", processes, process)
    trainer = Trainer(MODEL, dataclasses.replace(TRAINER, **AXES))
    state = trainer.initial_state(tiny_decoder())
    rows = pack(random_conversations(36), row_tokens=TRAINER.row_tokens, seed=0)
    result = fit(trainer, state, rows, schedule=SHORT_SCHEDULE, steps=3, seed=0)

    of_state = jax.tree.leaves((result.state.params, result.state.opt_state))
    split = [array for array in of_state if array.addressable_shards[0].data.size < array.size]
    assert len(split) == 3 * 8, "every matrix is split over fsdp or tensor, and so are both its moments"
    assert len(jax.devices()) == 8
    with Checkpoints(directory, keep=1) as checkpoints:
        checkpoints.save(result.state, {})


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
