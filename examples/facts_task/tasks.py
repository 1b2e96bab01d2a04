"""A task whose questions ask for the facts of a table.

A question reads "What is the capital of Japan?". The table is also the knowledge graph that the agent
searches. Countries of the training questions occur in no dev or test question.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, Literal

from mujica_jax.metrics import Rule
from mujica_jax.records import Entity, Evidence, Question
from mujica_jax.retrieval.graph.tables import read_triples
from mujica_jax.retrieval.graph.triples import Triple, TripleGraph
from mujica_jax.tasks.environment import GraphEnvironment
from mujica_jax.tasks.task import EnvironmentKind, Split


@dataclasses.dataclass(frozen=True, kw_only=True)
class FactsConfig:
    """One question for each row of a table."""

    # Task.
    kind: Literal["facts"] = "facts"
    implementation: ClassVar[str] = "examples.facts_task.tasks:Facts"
    # A table with the columns subject, relation, object, subject_qid and object_qid. The last two
    # may be empty.
    file: str = "examples/facts_task/facts.tsv"


class Facts:
    """The task. Of five subjects, one is for dev, one for test, and three are for training."""

    name = "facts"
    rule: Rule = "two_wiki"
    environment_kind: EnvironmentKind = "graph"

    def __init__(self, config: FactsConfig) -> None:
        self._triples = read_triples(config.file)
        self._graph = GraphEnvironment(TripleGraph(self._triples), top_k=4)
        self._subjects = sorted({triple.subject for triple in self._triples})

    def questions(self, split: Split) -> Sequence[Question]:
        """Return the questions about the subjects of a split, in the order of the table."""
        places = {"dev": (0,), "test": (1,), "train": (2, 3, 4)}[split]
        return [
            self._question(number, triple)
            for number, triple in enumerate(self._triples)
            if self._subjects.index(triple.subject) % 5 in places
        ]

    def environment(self, question: Question) -> GraphEnvironment:
        """Return the graph of all facts, which all questions share."""
        return self._graph

    def _question(self, number: int, triple: Triple) -> Question:
        """Return the question about one fact."""
        return Question(
            id=f"fact-{number}",
            text=f"What is the {triple.relation} of {triple.subject}?",
            answers=(triple.object,),
            candidates=(Entity(id=triple.subject, label=triple.subject),),
            evidences=(
                Evidence(subject=triple.subject, relation=triple.relation, object=triple.object),
            ),
        )

    # Only a model that is trained from scratch needs the methods below. A task without them starts
    # from a checkpoint (`--init`).

    def demonstrations(self) -> Iterable[tuple[Question, GraphEnvironment]]:
        """Return the training questions that a script demonstrates."""
        return [(question, self._graph) for question in self.questions("train")]

    def pretraining_documents(self, seed: int) -> Iterator[str]:
        """Yield plain text without end."""
        return itertools.cycle(triple.text for triple in self._triples)

    def tokenizer_text(self) -> Iterator[str]:
        """Yield the text on which the tokenizer is trained."""
        for triple in self._triples:
            yield f"What is the {triple.relation} of {triple.subject}? {triple.object}"
