"""Environments over the retrievers: the triples of an entity, or the passages that an index finds."""

import re
from collections.abc import Callable, Sequence
from typing import Literal

from mujica_jax.records import Entity
from mujica_jax.retrieval.errors import RetrievalError
from mujica_jax.retrieval.graph import Triple, TripleGraph
from mujica_jax.retrieval.retriever import Retriever
from mujica_jax.tasks.task import Material

_words = re.compile(r"\w+")


class GraphEnvironment:
    """Triples that name the searched entity, in either direction, at most `top_k`.

    An entity with more triples shows those that share most words with the query, or those that `ranked` puts first: (query, texts) to
    positions, best first. Without need, nothing is reordered. The searched entity is written as the caller calls it, so that materials,
    candidates and queries agree where the graph has several labels.
    """

    kind: Literal["graph", "text"] = "graph"

    def __init__(
        self,
        graph: TripleGraph,
        top_k: int,
        ranked: Callable[[str, Sequence[str]], Sequence[int]] | None = None,
    ) -> None:
        self.graph, self.top_k, self._ranked = graph, top_k, ranked

    async def search(self, query: str, entity: Entity | None) -> tuple[Material, ...]:
        if entity is None:
            raise RetrievalError("a graph is searched from an entity and the search names none", retryable=False)
        return self.materials(query, entity)

    def materials(self, query: str, entity: Entity) -> tuple[Material, ...]:
        """What a search returns, computed at once; an entity unknown to the graph has no materials."""
        by_text: dict[str, Material] = {}
        for triple, as_object in self.graph.ends_of(entity.id):
            material = self._material(triple, as_object, entity)
            by_text.setdefault(material.text, material)
        materials = list(by_text.values())
        if len(materials) > self.top_k and self._ranked is not None:
            return tuple(materials[place] for place in self._ranked(query, list(by_text))[: self.top_k])
        if len(materials) > self.top_k:
            asked = _content(query) - _content(entity.label)
            materials.sort(key=lambda material: -len(asked & (_content(material.text) - _content(entity.label))))
        return tuple(materials[: self.top_k])

    def _material(self, triple: Triple, as_object: bool, entity: Entity) -> Material:
        object_key = self.graph.object_key(triple)
        subject = Entity(id=self.graph.subject_key(triple), label=triple.subject) if as_object else entity
        if object_key is None:
            return Material(text=f"{subject.label}, {triple.relation}, {triple.object}", entities=(subject,))
        found = entity if as_object else Entity(id=object_key, label=triple.object)
        return Material(text=f"{subject.label}, {triple.relation}, {found.label}", entities=(subject, found))


class TextEnvironment:
    """The `top_k` best passages of a retriever."""

    kind: Literal["graph", "text"] = "text"

    def __init__(self, retriever: Retriever, top_k: int) -> None:
        self.retriever, self.top_k = retriever, top_k

    async def search(self, query: str, entity: Entity | None) -> tuple[Material, ...]:
        del entity  # texts have no candidates
        found = await self.retriever.search(query, self.top_k)
        return tuple(Material(text=f"{passage.title}: {passage.text}", title=passage.title) for passage in found)


def _content(text: str) -> set[str]:
    return set(_words.findall(text.casefold()))
