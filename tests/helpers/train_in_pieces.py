"""Train twenty steps on virtual devices with a save after every seventh, and die by SIGKILL where
that is asked for. Started by `test_resume.py`.

python -m tests.helpers.train_in_pieces DIRECTORY DATA FSDP [none|loop|save]

Goes on from the newest checkpoint in DIRECTORY. `loop` ends it in the ninth step, two after the
save; `save` in the middle of the second save, when the arrays are written and COMMITTED is not.
DIRECTORY/samples.jsonl gets a line a step: which conversations it trained on.
"""

import dataclasses
import json
import os
import signal
import sys
from pathlib import Path

import jax

from mujica_jax.learning import checkpoints as checkpoints_module
from mujica_jax.learning.checkpoints import Checkpoints
from mujica_jax.learning.optimizer import schedule
from mujica_jax.learning.packing import pack
from mujica_jax.learning.trainer import Trainer, fit
from mujica_jax.models.weights import save_checkpoint
from tests.helpers.packed_rows import MODEL, TRAINER, random_conversations, tiny_decoder

STEPS = 20
SAVE_EVERY = 7


def main(directory: str, data: int, fsdp: int, kill: str) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", data * fsdp)
    trainer = Trainer(MODEL, dataclasses.replace(TRAINER, data_parallel_size=data, fsdp=fsdp))
    rows = pack(random_conversations(36), sequence_length=TRAINER.sequence_length, seed=0)
    samples = {row.tobytes(): [] for row in rows.tokens}
    for conversation, (row, _) in enumerate(rows.placements):
        samples[rows.tokens[row].tobytes()].append(conversation)
    log = open(Path(directory) / "samples.jsonl", "a")  # noqa: SIM115
    train_step = trainer.train_step

    def logged(state, batch, rate):
        line = {
            "step": int(state.step) + 1,
            "samples": [samples[row.tobytes()] for row in batch.tokens],
        }
        log.write(json.dumps(line) + "\n")
        log.flush()
        if kill == "loop" and line["step"] == 9:
            checkpoints.finish()
            os.kill(os.getpid(), signal.SIGKILL)
        return train_step(state, batch, rate)

    def torn(folder):
        if folder.name == "000002":
            os.kill(os.getpid(), signal.SIGKILL)
        return commit(folder)

    trainer.train_step = logged
    commit = checkpoints_module._commit
    if kill == "save":
        checkpoints_module._commit = torn
    checkpoints = Checkpoints(directory, keep=2)

    with checkpoints:
        checkpoint = checkpoints.restore_latest(trainer.abstract_state())
        batches = trainer.batches(rows, seed=0)
        if checkpoint is None:
            state = trainer.initial_state(tiny_decoder())
        else:
            state, loop_state = checkpoint
            batches.set_state(loop_state["place"])
        rates = schedule(peak=1e-2, end_value=1e-3, total_steps=STEPS)
        while state.step < STEPS:
            until = min(STEPS, int(state.step) + SAVE_EVERY)
            result = fit(trainer, state, batches, schedule=rates, steps=until)
            state = result.state
            checkpoints.save(state, {"place": result.input_state})
        restored, _ = checkpoints.restore_latest(trainer.abstract_state()) or (None, None)
    assert restored is not None
    save_checkpoint(trainer.decoder(restored), Path(directory) / "model")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
