"""Sections of methods; each joins the union in `schema.py`."""

import dataclasses
from typing import ClassVar, Literal

from mujica_jax.config.remote import RemoteConfig

NO_ENDPOINT = RemoteConfig()


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class EviPathConfig:
    """EviPath: a teacher writes a trajectory for each question, led by its answer and its evidence; they are learnt."""

    kind: Literal["evipath"] = "evipath"
    implementation: ClassVar[str] = "mujica_jax.methods.evipath:evipath"
    # What the teacher is given: answer and gold evidence, the answer alone, or neither. What it answers wrongly is not
    # learnt in any of them.
    mode: Literal["abductive", "no_evidence", "deductive"] = "abductive"
    # The script of a world from scratch, the policy that the run starts with, or the model behind `remote`.
    teacher: Literal["scripted", "policy", "remote"]
    remote: RemoteConfig = NO_ENDPOINT
    tune: Literal["both", "planner", "executor"] = "both"  # whose conversations are learnt
    max_tries: int = 3  # of each turn of the teacher, until it is as it must be
    # What answers and evidence are compared by: words (how often each occurs, for worlds from scratch), or an embedder:
    # a folder, minilm, or a Hugging Face name.
    embedder: str = "minilm"
    threshold: float = 0.9  # cosine above which evidence counts as that of an answer (tau)
    learning_rate: float
    end_learning_rate: float
    epochs: int  # passes over the trajectories
    warmup_ratio: float = 0.1  # share of the steps in which the learning rate rises
