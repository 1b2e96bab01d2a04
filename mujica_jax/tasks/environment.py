"""Environments over the retrievers: triples of an entity, or passages of an index."""

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
    """Searches a graph: a search returns at most `top_k` triples that name the entity.

    The entity is subject or object of the triples. An entity with more triples shows those that
    `ranked` puts first. By default those are the triples that share the rarest words with the query
    (`ranking.py`). An entity with few triples shows them in the graph's order. The searched entity
    is written as the caller calls it, so that materials, candidates and queries agree where the
    graph has several labels.

    On disk or behind an endpoint, the graph may not know the id of an entity, because ids are
    merged and deleted, and a table may name an entity without its id. Then the entity is searched
    by its label, if exactly one entity has this label.
    """

    kind: Literal["graph", "text"] = "graph"

    def __init__(
        self, graph: TripleGraph | KnowledgeGraph, top_k: int, ranked: Ranking | None = None
    ) -> None:
        self.graph = graph
        self.top_k = top_k
        self._ranking: Ranking = ranked or WordRanking()

    @property
    def statistics(self) -> RetrievalStatistics:
        return self.graph.statistics

    async def search(self, query: str, entity: Entity | None) -> tuple[Material, ...]:
        """Return the entity's triples, at most `top_k` of them."""
        if entity is None:
            raise RetrievalError("a graph is searched from an entity and the search names none")
        ends = await self._ends_of(entity)

        # Two triples that read the same are one material.
        materials_by_text: dict[str, Material] = {}
        for end in ends:
            material = _material(entity, end)
            materials_by_text.setdefault(material.text, material)

        materials = list(materials_by_text.values())
        if len(materials) <= self.top_k:
            return tuple(materials)
        positions = await self._ranking(query, list(materials_by_text))
        return tuple(materials[position] for position in positions[: self.top_k])

    async def _ends_of(self, entity: Entity) -> Sequence[End]:
        """Return the triples of an entity, by its id or else by its label."""
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
    """Searches passages: a search returns the `top_k` best passages of a retriever."""

    kind: Literal["graph", "text"] = "text"

    def __init__(self, retriever: Retriever, top_k: int) -> None:
        self.retriever = retriever
        self.top_k = top_k

    @property
    def statistics(self) -> RetrievalStatistics:
        return self.retriever.statistics

    async def search(self, query: str, entity: Entity | None) -> tuple[Material, ...]:
        """Return the best passages. Texts have no candidates, so `entity` is not read."""
        del entity
        passages = await self.retriever.search(query, self.top_k)
        return tuple(passage_material(passage.title, passage.text) for passage in passages)


class WrittenPassages(TextEnvironment):
    """Searches passages that are written of triples, for demonstrations.

    A planner learns from them. A worker does not, because it would only learn how such sentences
    look.
    """


class WithGoldPassages:
    """Adds gold passages to what a text environment returns, for demonstrations.

    Where a search names the title of a gold passage and does not return it, the passage takes the
    place of another one, in `share` of these searches. A gold passage is told from others of its
    title by its text.
    """

    kind: Literal["graph", "text"] = "text"

    def __init__(self, searched: Environment, question: Question, share: float) -> None:
        self._searched = searched
        self._question = question
        self._share = share

    @property
    def statistics(self) -> RetrievalStatistics:
        return self._searched.statistics

    async def search(self, query: str, entity: Entity | None) -> tuple[Material, ...]:
        """Return what the environment finds, with gold passages added."""
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
    """Adds every gold passage of a question to what a search shows, for synthesised trajectories.

    The best other materials that the search found stay as distractors, so that there are as many
    materials as the search found. `fit` says which of the first materials have room. Those that the
    query names come first. The result is shuffled.
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
        return self._searched.statistics

    async def search(self, query: str, entity: Entity | None) -> tuple[Material, ...]:
        """Return all gold passages and the best other materials, as many as have room."""
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
    """Return whether a query names a title.

    Capital and small letters and the title's parenthesis do not matter.
    """
    return title.partition(" (")[0].casefold() in query.casefold()


def passage_material(title: str, text: str) -> Material:
    """Return a passage as a search shows it."""
    return Material(text=f"{title}: {text}" if title.strip() else text, title=title)


def _gold_material(passage: GoldPassage, materials: Sequence[Material]) -> Material:
    """Return the material that shows the passage, or a new one if there is none."""
    for material in materials:
        if material.shows(passage):
            return material
    return passage_material(passage.title, passage.text)


def _material(entity: Entity, end: End) -> Material:
    """Return a triple of the searched entity as a search shows it."""
    triple = end.triple
    if end.as_object:
        subject = Entity(id=end.subject_key, label=triple.subject)
    else:
        subject = entity

    # A literal is no entity.
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
    """Return the different words of a text, in small letters."""
    return set(_words.findall(text.casefold()))
