"""The interface of a task: questions in splits, an environment for each, and a scoring rule.

Methods and agents use only these protocols and never a concrete task. `FromScratchTask` adds what
only a model from scratch needs: demonstrations, pre-training text and tokenizer text. A real data
set does not have to implement it.
"""

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, Protocol, runtime_checkable

from mujica_jax.metrics import Rule
from mujica_jax.records import Entity, GoldPassage, Question
from mujica_jax.retrieval.statistics import RetrievalStatistics

# Learn on train, choose settings on dev, report scores on test.
Split = Literal["train", "dev", "test"]
EnvironmentKind = Literal["graph", "text"]


def hash_of(question_id: str) -> int:
    """Return a hash of a question's id. Questions are split and ordered by it.

    The hash is the same on every machine, and does not change when files are added.
    """
    return int(hashlib.sha256(question_id.encode()).hexdigest(), 16)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Material:
    """One result of a search: a triple or a passage, as the model reads it."""

    # The line that the model reads: "subject, relation, object" or "title: passage".
    text: str
    # The subject and the object of a triple. A literal, such as a date, is not an entity. Empty
    # for a passage.
    entities: tuple[Entity, ...] = ()
    # The title of a passage. Empty for a triple.
    title: str = ""

    @property
    def parts(self) -> tuple[str, ...]:
        """Subject, relation and object of a triple.

        For a passage, and for a line that was cut, the only part is the text. The subject and the
        object may contain commas. The relation contains none.
        """
        subject = self.entities[0].label if self.entities else ""
        if not subject or not self.text.startswith(f"{subject}, "):
            return (self.text,)
        relation_and_object = self.text.removeprefix(f"{subject}, ")
        relation, comma, triple_object = relation_and_object.partition(", ")
        return (subject, relation, triple_object) if comma else (self.text,)

    def shows(self, passage: GoldPassage, *, cut: bool = False) -> bool:
        """Return whether this search result is the gold passage.

        The titles must be equal. If the text of the gold passage is known, the texts must be equal
        too. With `cut` the search result may be the beginning of the gold passage.
        """
        same_title = " ".join(self.title.split()) == " ".join(passage.title.split())
        return same_title and passage.is_shown_by(self.text, cut=cut)


class Environment(Protocol):
    """The interface of what an agent searches: a knowledge graph or passages.

    `kind` determines the syntax of the planner's actions.
    """

    kind: EnvironmentKind

    @property
    def statistics(self) -> RetrievalStatistics:
        """Statistics of all searches so far. Environments with the same retriever share them."""
        ...

    async def search(self, query: str, entity: Entity | None) -> tuple[Material, ...]:
        """Return the search results for one query, best first.

        A search of a graph starts from `entity`. For a search of passages, `entity` is None. Raises
        RetrievalError if the search fails.
        """
        ...


class Task(Protocol):
    """Questions with their environments, and the rule that scores answers.

    A task may have three more attributes:

    - `left_out`: the ids of questions that cannot be asked.
    - `notes`: sentences that are printed before questions are asked, and stored with results.
    - `shown`: how many of a question's own passages one search shows, as in "5 of 10 passages".
    """

    name: str
    # The scoring rule of `metrics.score`.
    rule: Rule
    environment_kind: EnvironmentKind

    def questions(self, split: Split) -> Sequence[Question]:
        """Return the questions of a split in a fixed order.

        Two splits share no entity (tiny world) or no question id (real data).
        """
        ...

    def environment(self, question: Question) -> Environment:
        """Return the environment of this question. Several questions may have the same one."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Remarks:
    """The optional attributes of a `Task`, for the tasks of this package."""

    # The ids of questions that cannot be asked.
    left_out: Sequence[str] = ()
    # Sentences for the user.
    notes: Sequence[str] = ()
    # How many of a question's own passages a search shows, as in "5 of 10 passages".
    shown: str = ""


@runtime_checkable
class ParagraphTask(Protocol):
    """A task whose data set gives paragraphs with its questions."""

    def own_paragraphs(self, question: Question) -> Sequence[GoldPassage]:
        """Return the paragraphs that the data set gives with this question.

        They are the gold paragraphs and the distractors. The result is empty if the data set gives
        none.
        """
        ...


@runtime_checkable
class FromScratchTask(Protocol):
    """A task with everything that a model from scratch needs besides questions.

    Demonstrations and texts come from the training side only, never from dev or test.
    """

    def demonstrations(self) -> Iterable[tuple[Question, Environment]]:
        """Return questions with gold evidence for scripted demonstrations.

        Each question comes with the environment in which it is answered. Callers iterate once.
        """
        ...

    def pretraining_documents(self, seed: int) -> Iterator[str]:
        """Yield pre-training documents without end. A model reads them before demonstrations."""
        ...

    def tokenizer_text(self) -> Iterator[str]:
        """Yield the text on which a tokenizer is trained."""
        ...
