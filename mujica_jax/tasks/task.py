"""The task door: questions by split, an environment for each question, and a scoring rule.

Methods and agents see these protocols and never a concrete task. What only a model that starts from
scratch needs (demonstrations, pre-training text, text for a tokenizer) is a second protocol, which
a real data set may leave out.
"""

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, Protocol, runtime_checkable

from mujica_jax.metrics import Rule
from mujica_jax.records import Entity, GoldPassage, Question
from mujica_jax.retrieval.statistics import RetrievalStatistics

Split = Literal["train", "dev", "test"]  # learn on train, choose on dev, report test
EnvironmentKind = Literal["graph", "text"]


def hash_of(question_id: str) -> int:
    """Return a hash of an id, by which questions are split and ordered.

    It is the same on every machine, and does not change when files are added.
    """
    return int(hashlib.sha256(question_id.encode()).hexdigest(), 16)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Material:
    """One thing a search returned: the line shown to the worker, and the entities it names."""

    # "subject, relation, object", or "title: passage".
    text: str
    # Subject and object of a triple. Literals (dates) are no entities. Passages have none.
    entities: tuple[Entity, ...] = ()
    # The title of a passage. Triples have none.
    title: str = ""

    @property
    def parts(self) -> tuple[str, ...]:
        """Subject, relation and object of a triple.

        For a passage, and for a line that was cut, it is the text alone. Subject and object may
        have commas, and the relation none.
        """
        subject = self.entities[0].label if self.entities else ""
        if not subject or not self.text.startswith(f"{subject}, "):
            return (self.text,)
        relation_and_object = self.text.removeprefix(f"{subject}, ")
        relation, comma, triple_object = relation_and_object.partition(", ")
        return (subject, relation, triple_object) if comma else (self.text,)

    def shows(self, passage: GoldPassage, *, cut: bool = False) -> bool:
        """Return whether this is the passage.

        It has the same title, and the same text if the passage's text is known. With `cut` it may
        be the beginning of a longer passage.
        """
        same_title = " ".join(self.title.split()) == " ".join(passage.title.split())
        return same_title and passage.is_shown_by(self.text, cut=cut)


class Environment(Protocol):
    """A place where an agent looks things up. `kind` decides the planner's action syntax."""

    kind: EnvironmentKind

    @property
    def statistics(self) -> RetrievalStatistics:
        """Statistics of all searches so far. Environments with one retriever share them."""
        ...

    async def search(self, query: str, entity: Entity | None) -> tuple[Material, ...]:
        """Return the materials for one sub-question, best first.

        `entity` is given for graphs only. Raises RetrievalError.
        """
        ...


class Task(Protocol):
    """Questions with their environments and the rule that scores answers.

    A task may have three more attributes: `left_out`, ids of questions that cannot be asked;
    `notes`, sentences that are printed before questions are asked and kept with results; `shown`,
    how many of a question's own passages one search shows, as in "5 of 10 passages".
    """

    name: str
    rule: Rule  # scoring rule of `metrics.score`
    environment_kind: EnvironmentKind

    def questions(self, split: Split) -> Sequence[Question]:
        """Return questions in a fixed order.

        Splits share no entity (tiny world) or no id (real data).
        """
        ...

    def environment(self, question: Question) -> Environment:
        """Return where this question is answered, which is often the same environment for all."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Remarks:
    """A task's remarks about its questions, which it shows as its own attributes."""

    left_out: Sequence[str] = ()  # ids of questions that cannot be asked
    notes: Sequence[str] = ()  # sentences for the user
    shown: str = ""  # how many of a question's own passages a search shows


@runtime_checkable
class ParagraphTask(Protocol):
    """A task whose data set gives paragraphs with its questions."""

    def own_paragraphs(self, question: Question) -> Sequence[GoldPassage]:
        """Return the paragraphs that the data set gives with this question, gold and others.

        The result is empty where it gives none.
        """
        ...


@runtime_checkable
class FromScratchTask(Protocol):
    """The material that a model from scratch needs besides questions.

    All of it comes from the training side, never from dev or test.
    """

    def demonstrations(self) -> Iterable[tuple[Question, Environment]]:
        """Return questions with gold evidence for scripted demonstrations. They are read once.

        Each comes with the environment in which it is answered.
        """
        ...

    def pretraining_documents(self, seed: int) -> Iterator[str]:
        """Endless text that a model reads before it is shown any demonstration."""
        ...

    def tokenizer_text(self) -> Iterator[str]:
        """Text that a tokenizer is trained on."""
        ...
