"""Environments over the retrievers: the triples of an entity, or the passages that an index
finds."""

import random
import re
from collections.abc import Callable, Sequence
from typing import Literal

from mujica_jax.records import Entity, GoldPassage, Question
from mujica_jax.retrieval.errors import RetrievalError
from mujica_jax.retrieval.graph.knowledge_graph import KnowledgeGraph
from mujica_jax.retrieval.graph.triples import End, TripleGraph
from mujica_jax.retrieval.retriever import Retriever
from mujica_jax.retrieval.statistics import RetrievalStatistics
from mujica_jax.tasks.ranking import Ranking, WordRanking
from mujica_jax.tasks.task import Environment, Material

_words = re.compile(r"\w+")


class GraphEnvironment:
    """Triples of a graph that name the searched entity, in either direction, at most `top_k`.

    An entity with more triples shows those that `ranked` puts first: by default those that share
    the rarest words with the query (`ranking.py`). Without need, nothing is reordered. The searched
    entity is written as the caller calls it, so that materials, candidates and queries agree where
    the graph has several labels.

    On disk or behind an endpoint, an entity whose id the graph does not know is searched by its
    label, where exactly one entity is called so: ids are merged and deleted, and a table may name
    an entity without its id.
    """

    kind: Literal["graph", "text"] = "graph"

    def __init__(
        self, graph: TripleGraph | KnowledgeGraph, top_k: int, ranked: Ranking | None = None
    ) -> None:
        self.graph = graph
        self.top_k = top_k
        self._ranked: Ranking = ranked or WordRanking()

    @property
    def statistics(self) -> RetrievalStatistics:
        return self.graph.statistics

    async def search(self, query: str, entity: Entity | None) -> tuple[Material, ...]:
        if entity is None:
            raise RetrievalError("a graph is searched from an entity and the search names none")
        if isinstance(self.graph, TripleGraph):
            self.graph.count(queries=1)
            ends = self.graph.ends_of(entity.id)
        else:
            ends = await self.graph.ends_of(entity.id)
            if not ends and len(namesakes := await self.graph.find(entity.label)) == 1:
                ends = await self.graph.ends_of(namesakes[0])
        by_text: dict[str, Material] = {}
        for end in ends:
            material = _material(entity, end)
            by_text.setdefault(material.text, material)
        materials = list(by_text.values())
        if len(materials) <= self.top_k:
            return tuple(materials)
        places = await self._ranked(query, list(by_text))
        return tuple(materials[place] for place in places[: self.top_k])


class TextEnvironment:
    """The `top_k` best passages of a retriever."""

    kind: Literal["graph", "text"] = "text"

    def __init__(self, retriever: Retriever, top_k: int) -> None:
        self.retriever, self.top_k = retriever, top_k

    @property
    def statistics(self) -> RetrievalStatistics:
        return self.retriever.statistics

    async def search(self, query: str, entity: Entity | None) -> tuple[Material, ...]:
        del entity  # texts have no candidates
        found = await self.retriever.search(query, self.top_k)
        return tuple(passage_material(passage.title, passage.text) for passage in found)


class WrittenPassages(TextEnvironment):
    """Passages written of triples, for demonstrations: a planner learns from them, and a worker,
    who would only see how such sentences look, does not.
    """


class WithGoldPassages:
    """A text environment for demonstrations: where a search names the title of a gold passage and
    does not find it, the passage takes the place of one that was found, in `share` of these
    searches. A gold passage is told from others of its title by its text.
    """

    kind: Literal["graph", "text"] = "text"

    def __init__(self, searched: Environment, question: Question, share: float) -> None:
        self._searched, self._question, self._share = searched, question, share

    @property
    def statistics(self) -> RetrievalStatistics:
        return self._searched.statistics

    async def search(self, query: str, entity: Entity | None) -> tuple[Material, ...]:
        found = list(await self._searched.search(query, entity))
        draw = random.Random(f"{self._question.id} {query}")
        missed = [
            passage
            for passage in self._question.gold_passages
            if passage.text and not any(material.shows(passage) for material in found)
        ]
        for passage in missed:
            if found and is_named_by(query, passage.title) and draw.random() < self._share:
                found[draw.randrange(len(found))] = passage_material(passage.title, passage.text)
        return tuple(found)


class WithAllGoldPassages:
    """A pool for the synthesis of trajectories: every gold passage of the question is among what a
    search shows. The best others that it found stay as distractors, so that there are as many as
    were found.

    `fit` says which of the first materials have room; those that the query names come first. The
    pool is shuffled.
    """

    kind: Literal["graph", "text"] = "text"

    def __init__(
        self,
        searched: Environment,
        question: Question,
        fit: Callable[[Sequence[Material]], Sequence[Material]],
    ) -> None:
        self._searched, self._question, self._fit = searched, question, fit

    @property
    def statistics(self) -> RetrievalStatistics:
        return self._searched.statistics

    async def search(self, query: str, entity: Entity | None) -> tuple[Material, ...]:
        found = list(await self._searched.search(query, entity))
        gold_passages = [passage for passage in self._question.gold_passages if passage.text]
        golds = [_found_or_made(passage, found) for passage in gold_passages]
        golds.sort(key=lambda gold: not is_named_by(query, gold.title))
        others = [
            material
            for material in found
            if not any(material.shows(passage) for passage in gold_passages)
        ]
        pool = list(self._fit([*golds, *others][: max(len(found), len(golds))]))
        random.Random(f"{self._question.id} {query}").shuffle(pool)
        return tuple(pool)


def is_named_by(query: str, title: str) -> bool:
    """Whether a query names a title, in capital or small letters and up to its parenthesis."""
    return title.partition(" (")[0].casefold() in query.casefold()


def passage_material(title: str, text: str) -> Material:
    """Return a passage as a search shows it."""
    return Material(text=f"{title}: {text}" if title.strip() else text, title=title)


def _found_or_made(passage: GoldPassage, found: Sequence[Material]) -> Material:
    """Return the passage as the search found it. If it did not, return it as it would have."""
    shown = next((material for material in found if material.shows(passage)), None)
    return passage_material(passage.title, passage.text) if shown is None else shown


def _material(entity: Entity, end: End) -> Material:
    triple = end.triple
    subject = Entity(id=end.subject_key, label=triple.subject) if end.as_object else entity
    if end.object_key is None:
        return Material(
            text=f"{subject.label}, {triple.relation}, {triple.object}", entities=(subject,)
        )
    found = entity if end.as_object else Entity(id=end.object_key, label=triple.object)
    return Material(
        text=f"{subject.label}, {triple.relation}, {found.label}", entities=(subject, found)
    )


def words(text: str) -> set[str]:
    return set(_words.findall(text.casefold()))
