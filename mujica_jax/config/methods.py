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
    replay: float  # rows of earlier rounds and of the warm-up mixed in, as a share of the new rows
