"""Environments over the retrievers: the triples of an entity, or the passages that an index finds."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from mujica_jax.records import Entity
from mujica_jax.retrieval.errors import RetrievalError
from mujica_jax.retrieval.graph.knowledge_graph import KnowledgeGraph
from mujica_jax.retrieval.graph.triples import Triple, TripleGraph
from mujica_jax.retrieval.retriever import RetrievalStatistics, Retriever
from mujica_jax.tasks.task import Material

_words = re.compile(r"\w+")


Ranking = Callable[[str, Sequence[str]], Sequence[int]]  # (query, texts) to positions, best first


class GraphEnvironment:
    """Triples of a graph in memory that name the searched entity, in either direction, at most `top_k`.

    An entity with more triples shows those that share most words with the query, or those that `ranked` puts first. Without need,
    nothing is reordered. The searched entity is written as the caller calls it, so that materials, candidates and queries agree where
    the graph has several labels.
    """

    kind: Literal["graph", "text"] = "graph"

    def __init__(
        self,
        graph: TripleGraph,
        top_k: int,
        ranked: Ranking | None = None,
    ) -> None:
        self.graph, self.top_k, self._ranked = graph, top_k, ranked

    async def search(self, query: str, entity: Entity | None) -> tuple[Material, ...]:
        return self.materials(query, _required(entity))

    def materials(self, query: str, entity: Entity) -> tuple[Material, ...]:
        """What a search returns, computed at once; an entity unknown to the graph has no materials."""
        ends = [
            (triple, as_object, self.graph.subject_key(triple), self.graph.object_key(triple))
            for triple, as_object in self.graph.ends_of(entity.id)
        ]
        return _shown(query, entity, ends, self.top_k, self._ranked)


class KnowledgeGraphEnvironment:
    """As `GraphEnvironment`, of a graph on disk or behind a SPARQL endpoint.

    An entity whose id the graph does not know is searched by its label, where exactly one entity is called so: ids are merged and
    deleted, and a table may name an entity without its id.
    """

    kind: Literal["graph", "text"] = "graph"

    def __init__(self, graph: KnowledgeGraph, top_k: int, ranked: Ranking | None = None) -> None:
        self.graph, self.top_k, self._ranked = graph, top_k, ranked

    @property
    def statistics(self) -> RetrievalStatistics:
        return self.graph.statistics

    async def search(self, query: str, entity: Entity | None) -> tuple[Material, ...]:
        entity = _required(entity)
        found = await self.graph.ends_of(entity.id)
        if not found and len(namesakes := await self.graph.find(entity.label)) == 1:
            found = await self.graph.ends_of(namesakes[0])
        ends = [
            (
                triple,
                as_object,
                triple.subject_id or triple.subject,
                None if triple.object_is_literal else triple.object_id or triple.object,
            )
            for triple, as_object in found
        ]
        return _shown(query, entity, ends, self.top_k, self._ranked)


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
        return tuple(Material(text=f"{passage.title}: {passage.text}", title=passage.title) for passage in found)


def _required(entity: Entity | None) -> Entity:
    if entity is None:
        raise RetrievalError("a graph is searched from an entity and the search names none", retryable=False)
    return entity


def _shown(
    query: str,
    entity: Entity,
    ends: Iterable[tuple[Triple, bool, str, str | None]],
    top_k: int,
    ranked: Ranking | None,
) -> tuple[Material, ...]:
    """`ends`: a triple, whether the entity is its object, and the keys of both (None for a literal)."""
    by_text: dict[str, Material] = {}
    for triple, as_object, subject_key, object_key in ends:
        material = _material(entity, triple, as_object, subject_key, object_key)
        by_text.setdefault(material.text, material)
    materials = list(by_text.values())
    if len(materials) > top_k and ranked is not None:
        return tuple(materials[place] for place in ranked(query, list(by_text))[:top_k])
    if len(materials) > top_k:
        asked = _content(query) - _content(entity.label)
        materials.sort(key=lambda material: -len(asked & (_content(material.text) - _content(entity.label))))
    return tuple(materials[:top_k])


def _material(entity: Entity, triple: Triple, as_object: bool, subject_key: str, object_key: str | None) -> Material:
    subject = Entity(id=subject_key, label=triple.subject) if as_object else entity
    if object_key is None:
        return Material(text=f"{subject.label}, {triple.relation}, {triple.object}", entities=(subject,))
    found = entity if as_object else Entity(id=object_key, label=triple.object)
    return Material(text=f"{subject.label}, {triple.relation}, {found.label}", entities=(subject, found))


def _content(text: str) -> set[str]:
    return set(_words.findall(text.casefold()))
