"""Environments: search the triples of an entity in a graph, or the passages of an index."""

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
    """An environment that searches a graph. A search returns at most `top_k` triples of an entity.

    The entity is the subject or the object of these triples. If it has at most `top_k` triples,
    they are returned in the order of the graph. Otherwise `ranked` orders them and the first
    `top_k` are returned. By default the triples that share the rarest words with the query come
    first (`ranking.py`). Where the graph has several labels for the entity, search results use the
    caller's label, so that they agree with candidates and queries.

    A graph on disk or behind an endpoint may not know the id of an entity: ids are merged and
    deleted, and a table may name an entity without its id. Then the entity is searched by its
    label, if exactly one entity has this label.
    """

    kind: Literal["graph", "text"] = "graph"

    def __init__(
        self, graph: TripleGraph | KnowledgeGraph, top_k: int, ranked: Ranking | None = None
    ) -> None:
        self.graph = graph
        self.top_k = top_k
        self.ranking: Ranking = ranked or WordRanking()

    @property
    def statistics(self) -> RetrievalStatistics:
        """Statistics of all searches so far."""
        return self.graph.statistics

    async def search(self, query: str, entity: Entity | None) -> tuple[Material, ...]:
        """Return at most `top_k` triples of the entity. Raises RetrievalError without an entity."""
        if entity is None:
            raise RetrievalError("the search names no entity, but a graph is searched by entity")
        ends = await self._ends_of(entity)

        # Two triples with the same text are one search result.
        materials_by_text: dict[str, Material] = {}
        for end in ends:
            material = _material(entity, end)
            materials_by_text.setdefault(material.text, material)

        materials = list(materials_by_text.values())
        if len(materials) <= self.top_k:
            return tuple(materials)
        positions = await self.ranking(query, list(materials_by_text))
        return tuple(materials[position] for position in positions[: self.top_k])

    async def _ends_of(self, entity: Entity) -> Sequence[End]:
        """Return the triples of an entity. They are looked up by its id, or else by its label."""
        if isinstance(self.graph, TripleGraph):
            self.graph.count(queries=1)
            return self.graph.ends_of(entity.id)

        ends = await self.graph.ends_of(entity.id)
        if ends:
            return ends
        namesakes = await self.graph.find(entity.label)
        if len(namesakes) != 1:
            return ends
        return await self.graph.ends_of(namesakes[0])


class TextEnvironment:
    """An environment that searches passages. A search returns the retriever's `top_k` best."""

    kind: Literal["graph", "text"] = "text"

    def __init__(self, retriever: Retriever, top_k: int) -> None:
        self.retriever = retriever
        self.top_k = top_k

    @property
    def statistics(self) -> RetrievalStatistics:
        """Statistics of all searches so far."""
        return self.retriever.statistics

    async def search(self, query: str, entity: Entity | None) -> tuple[Material, ...]:
        """Return the best passages for the query. `entity` is not used."""
        del entity
        passages = await self.retriever.search(query, self.top_k)
        return tuple(passage_material(passage.title, passage.text) for passage in passages)


class WrittenPassages(TextEnvironment):
    """An environment for demonstrations, whose passages are written from triples.

    Only the planner learns from such demonstrations. A worker would learn the style of these
    sentences instead of how to read real passages.
    """


class WithGoldPassages:
    """An environment for demonstrations, which adds gold passages to search results.

    A query may name the title of a gold passage that the search does not return. Then the gold
    passage replaces a random result with the probability `share`. Among passages with the same
    title, the text identifies the gold passage.
    """

    kind: Literal["graph", "text"] = "text"

    def __init__(self, searched: Environment, question: Question, share: float) -> None:
        self._searched = searched
        self._question = question
        self._share = share

    @property
    def statistics(self) -> RetrievalStatistics:
        """Statistics of all searches so far."""
        return self._searched.statistics

    async def search(self, query: str, entity: Entity | None) -> tuple[Material, ...]:
        """Return the search results of the environment, with gold passages added."""
        materials = list(await self._searched.search(query, entity))
        missed_passages = [
            passage
            for passage in self._question.gold_passages
            if passage.text and not any(material.shows(passage) for material in materials)
        ]
        if not materials:
            return ()

        draw = random.Random(f"{self._question.id} {query}")
        for passage in missed_passages:
            if is_named_by(query, passage.title) and draw.random() < self._share:
                position = draw.randrange(len(materials))
                materials[position] = passage_material(passage.title, passage.text)
        return tuple(materials)


class WithAllGoldPassages:
    """An environment for synthesised trajectories, which returns every gold passage of a question.

    The best other search results fill the remaining places as distractors. So a search returns as
    many results as without gold passages, or more if there are more gold passages. `fit` returns
    the leading results that have room in the observation; gold passages that the query names come
    first. The order of the results is then shuffled.
    """

    kind: Literal["graph", "text"] = "text"

    def __init__(
        self,
        searched: Environment,
        question: Question,
        fit: Callable[[Sequence[Material]], Sequence[Material]],
    ) -> None:
        self._searched = searched
        self._question = question
        self._fit = fit

    @property
    def statistics(self) -> RetrievalStatistics:
        """Statistics of all searches so far."""
        return self._searched.statistics

    async def search(self, query: str, entity: Entity | None) -> tuple[Material, ...]:
        """Return all gold passages and the best other results, as far as they have room."""
        materials = await self._searched.search(query, entity)
        gold_passages = [passage for passage in self._question.gold_passages if passage.text]
        gold_materials = [_gold_material(passage, materials) for passage in gold_passages]
        gold_materials.sort(key=lambda material: not is_named_by(query, material.title))
        distractors = [
            material
            for material in materials
            if not any(material.shows(passage) for passage in gold_passages)
        ]

        size = max(len(materials), len(gold_materials))
        shown_materials = list(self._fit([*gold_materials, *distractors][:size]))
        random.Random(f"{self._question.id} {query}").shuffle(shown_materials)
        return tuple(shown_materials)


def is_named_by(query: str, title: str) -> bool:
    """Return whether a query contains a title.

    Upper and lower case make no difference. A parenthesis at the end of the title is ignored.
    """
    return title.partition(" (")[0].casefold() in query.casefold()


def passage_material(title: str, text: str) -> Material:
    """Return a passage as a search result."""
    return Material(text=f"{title}: {text}" if title.strip() else text, title=title)


def _gold_material(passage: GoldPassage, materials: Sequence[Material]) -> Material:
    """Return the search result that shows the gold passage, or a new one if none does."""
    for material in materials:
        if material.shows(passage):
            return material
    return passage_material(passage.title, passage.text)


def _material(entity: Entity, end: End) -> Material:
    """Return a triple of the searched entity as a search result."""
    triple = end.triple
    if end.as_object:
        subject = Entity(id=end.subject_key, label=triple.subject)
    else:
        subject = entity

    # A literal object, such as a date, is no entity.
    if end.object_key is None:
        text = f"{subject.label}, {triple.relation}, {triple.object}"
        return Material(text=text, entities=(subject,))

    if end.as_object:
        triple_object = entity
    else:
        triple_object = Entity(id=end.object_key, label=triple.object)
    text = f"{subject.label}, {triple.relation}, {triple_object.label}"
    return Material(text=text, entities=(subject, triple_object))


def words(text: str) -> set[str]:
    """Return the set of words of a text, in lower case."""
    return set(_words.findall(text.casefold()))
