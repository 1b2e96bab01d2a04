"""Sections of methods; each joins the union in `schema.py`."""

import dataclasses
from typing import ClassVar, Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class MygoConfig:
    """MyGO: rounds of sample, select above a rising threshold, maximise likelihood."""

    kind: Literal["mygo"] = "mygo"
    implementation: ClassVar[str] = "mujica_jax.methods.mygo:mygo"
    rounds: int
    max_attempts: int  # attempts a question (16 in the paper)
    keep_per_question: int  # m, trajectories kept a question (3 in the paper)
    learning_rate: float
    end_learning_rate: float
    epochs: int  # passes over a round's selected trajectories
    # Which policy samples a round: the newest one, the one before it (so that sampling and learning can go on at once),
    # or the warm-up's for all rounds.
    schedule: Literal["online", "asynchronous", "offline"] = "online"
    threshold: Literal["rising", "fixed"] = "rising"  # whether K follows the policy's mean reward
    fixed_threshold: float = 0.0  # K where it is fixed; at 0 all that earns anything is kept
    replay: float  # rows of earlier rounds and of the warm-up mixed in, as a share of the new rows
