"""The equal-compute control: what MyGO's computation gives when it is spent on the warm-up's own demonstrations.

From the warmed-up state, supervised training goes on over the same rows with MyGO's learning rates, until as many floating-point
operations are spent as MyGO used for sampling and learning together. A token that goes forward counts one, a trained slot three (the
backward pass costs twice the forward pass).
"""

import time
from collections.abc import Sequence

from mujica_jax.learning.trainer import TrainState
from mujica_jax.methods.run import PhaseResult, Run
from mujica_jax.records import Conversation
from mujica_jax.trajectories.packing import pack

NAME = "control"
POLICY = 1_000_000  # above every round's policy: the control is never what a round samples from
FORWARD_AND_BACKWARD = 3


def run_control(
    run: Run, state: TrainState, demonstrations: Sequence[Conversation], rounds: Sequence[PhaseResult]
) -> PhaseResult:
    began = time.monotonic()
    spent = sum(result.forward_tokens + FORWARD_AND_BACKWARD * result.trained_slots for result in rounds)
    slots = run.config.trainer.rows_per_step * run.config.trainer.row_tokens
    steps = max(1, round(spent / (FORWARD_AND_BACKWARD * slots)))
    trained = run.learn(
        NAME,
        lambda: state,
        lambda: pack(list(demonstrations), row_tokens=run.config.trainer.row_tokens, seed=run.config.seed),
        steps=steps,
        peak=run.config.mygo.learning_rate,
        floor=run.config.mygo.learning_rate_floor,
    )
    return run.finish_phase(NAME, trained, POLICY, began=began, trained_slots=steps * slots)
