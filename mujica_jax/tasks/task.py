"""What a task is: questions by split, an environment to search, a scoring rule, and text for a tokenizer.

Methods and agents see these two protocols and never a concrete task.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal, Protocol

from mujica_jax.metrics import Rule
from mujica_jax.records import Entity, Question

Split = Literal["train", "test"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Material:
    """One thing a search returned: the line shown to the worker, and the entities it names (graphs only)."""

    text: str  # "subject, relation, object", or "title: passage"
    entities: tuple[Entity, ...] = ()  # subject and object of a triple; literals (dates) are no entities
    title: str = ""  # passage title (text environments)


class Environment(Protocol):
    """Where a worker looks things up. `kind` decides the planner's action syntax."""

    kind: Literal["graph", "text"]

    async def search(self, query: str, entity: Entity | None) -> tuple[Material, ...]:
        """Materials for one sub-question, best first; `entity` is given for graphs only. Raises RetrievalError."""
        ...


class Task(Protocol):
    name: str
    rule: Rule  # scoring rule of `metrics.score`
    environment: Environment

    def questions(self, split: Split) -> Sequence[Question]:
        """Questions in a fixed order; train and test share no entity (tiny world) or no id (real data)."""
        ...

    def demonstrations(self) -> Sequence[tuple[Question, Environment]]:
        """Questions with gold evidence for scripted demonstrations, each with the environment it is answered in."""
        ...

    def reading_documents(self, seed: int) -> Iterator[str]:
        """Endless training-side text (never held-out) that a from-scratch model reads before it is shown any demonstration."""
        ...

    def tokenizer_text(self) -> Iterator[str]:
        """Training-side text (never held-out) on which a from-scratch tokenizer is trained."""
        ...
