"""The interface of a knowledge graph that answers SPARQL queries, and the graph in a local store.

A knowledge graph finds entities by Q-id, label and alias, and the triples of an entity in both
directions. `GraphStore` searches a local store, and `endpoint.py` asks another host. Both use the
queries of `sparql.py` and read results in the same way.

At most MAX_TRIPLES triples are read in each direction, because countries and professions have
millions of them. The store or the endpoint chooses which ones. They are returned in a fixed order.
"""

import abc
import asyncio
import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from pyoxigraph import NamedNode, Store

from mujica_jax.retrieval.errors import RetrieverTimeoutError, RetrieverUnavailableError
from mujica_jax.retrieval.graph import sparql
from mujica_jax.retrieval.graph.triples import End, Triple
from mujica_jax.retrieval.graph.values import readable_iri
from mujica_jax.retrieval.statistics import Counted

# The largest number of triples of an entity that are read in each direction.
MAX_TRIPLES = 500
# The largest number of labels that a search for a word in labels returns.
MAX_LABELS = 1000

Read = TypeVar("Read")


class KnowledgeGraph(Counted, abc.ABC):
    """A source of triples.

    The key of an entity is its Q-id, its IRI, or a name.
    """

    def __init__(self, *, version: str, languages: tuple[str, ...]) -> None:
        """Set the version of the graph's content, and the languages of labels by preference."""
        super().__init__()
        self.version = version
        self.languages = languages

    def prefer_language(self, language: str) -> None:
        """Prefer labels in `language`.

        If a label does not exist in it, others are used in the order of `sparql.languages_for`.
        """
        self.languages = sparql.languages_for(language, self.languages)

    @abc.abstractmethod
    async def ask(self, query: str, read: Callable[[Iterable[sparql.Row]], Read]) -> Read:
        """Run a SPARQL query, and return the result of `read(rows)`. Raises RetrievalError."""

    async def triples_of(self, key: str, limit: int | None = None) -> tuple[Triple, ...]:
        """Return at most `limit` triples of an entity, without duplicates and in a fixed order.

        Triples with the entity as subject come first. An unknown entity has no triples. Raises
        RetrievalError.
        """
        return tuple(end.triple for end in await self.ends_of(key, limit))

    async def ends_of(self, key: str, limit: int | None = None) -> list[End]:
        """Return the triples of `triples_of`, each with the direction and the keys of its ends.

        For the id of an entity that was merged into another one, return the triples of the other
        one. Raises RetrievalError.
        """
        with self.counted_search():
            entity = sparql.entity_iri(key)
            if entity is None:
                # The key is a name.
                keys = await self._namesakes(key)
                if keys:
                    entity = sparql.entity_iri(keys[0])
            if entity is None:
                return []

            ends, successor = await self._ends(entity)
            if not ends and successor is not None:
                ends, _ = await self._ends(sparql.entity_iri(successor) or entity)
            return ends[:limit]

    async def label_of(self, key: str) -> str | None:
        """Return the label of an entity, as it is written in the triples of other entities.

        `key` is a Q-id or an IRI. Return None if the entity has no label in the graph's languages.
        For the id of an entity that was merged into another one, return the label of the other one.
        Raises RetrievalError.
        """
        entity = sparql.entity_iri(key)
        if entity is None:
            return None
        with self.counted_search():
            label, successor = await self._label(entity)
            if label is None and successor is not None:
                label, _ = await self._label(sparql.entity_iri(successor) or entity)
        return label or readable_iri(entity.value) or None

    async def _label(self, entity: NamedNode) -> tuple[str | None, str | None]:
        """Return an entity's label, and the key of the entity that it was merged into."""

        def read(rows: Iterable[sparql.Row]) -> tuple[str | None, str | None]:
            rows = list(rows)
            return sparql.read_label(rows, self.languages), sparql.read_redirect(rows)

        return await self.ask(sparql.label_query(entity, self.languages), read)

    async def _ends(self, entity: NamedNode) -> tuple[list[End], str | None]:
        """Return an entity's triples, and the key of the entity that it was merged into."""

        def read(rows: Iterable[sparql.Row]) -> tuple[list[End], str | None]:
            rows = list(rows)
            return sparql.read_ends(rows, entity, self.languages), sparql.read_redirect(rows)

        return await self.ask(sparql.triples_query(entity, self.languages, MAX_TRIPLES), read)

    async def find(self, name: str) -> list[str]:
        """Return the keys of the entities with this Q-id, IRI or name, the likeliest first.

        A name is compared with labels, and if none matches with aliases. In graphs loaded from
        tables, a name that matches nothing is also compared without case, spacing and a closing
        parenthesis. Raises RetrievalError.
        """
        entity = sparql.entity_iri(name)
        if entity is None:
            return await self._namesakes(name)
        is_known = await self.ask(sparql.exists_query(entity), _has_rows)
        return [name] if is_known else []

    async def find_all(self, names: Sequence[str]) -> dict[str, list[str]]:
        """Return the keys of the entities with each of these names, the likeliest first.

        Names are compared as in `find`, except for the closing parenthesis. A name that is a Q-id
        or an IRI is its own key. Names without an entity are left out. All names are looked up in
        one query. Raises RetrievalError.
        """
        keys: dict[str, list[str]] = {}
        labels: list[str] = []
        for name in names:
            if sparql.entity_iri(name) is None:
                labels.append(name)
            elif await self.find(name):
                keys[name] = [name]
        labels = [label for label in labels if _is_whole(label)]
        if labels:
            query = sparql.find_all_query(labels, self.languages)
            keys |= await self.ask(query, functools.partial(sparql.read_all_namesakes, labels))
        return keys

    async def _namesakes(self, name: str) -> list[str]:
        """Return the keys of the entities with this name, the likeliest first."""
        try:
            query = sparql.find_query(name, self.languages)
        except ValueError:
            # The name holds half a character (a lone surrogate), so no entity has it.
            return []
        return await self.ask(query, sparql.read_namesakes)


def _is_whole(name: str) -> bool:
    """Return whether a name has no half character (a lone surrogate). No entity has such a name."""
    return name.encode(errors="ignore").decode() == name


def _has_rows(rows: Iterable[sparql.Row]) -> bool:
    return any(True for _ in rows)


class GraphStore(KnowledgeGraph):
    """A graph in a store of pyoxigraph, on disk or in memory.

    Each query runs in a thread, so that a slow disk does not block other episodes.
    """

    def __init__(
        self,
        store: Store,
        *,
        version: str,
        languages: tuple[str, ...],
        deadline_seconds: float = 60.0,
    ) -> None:
        super().__init__(version=version, languages=languages)
        self.store = store
        self._deadline_seconds = deadline_seconds

    async def ask(self, query: str, read: Callable[[Iterable[sparql.Row]], Read]) -> Read:
        """Run a SPARQL query, and return the result of `read(rows)`. Raises RetrievalError."""
        loop = asyncio.get_running_loop()
        running = loop.run_in_executor(None, self._answer, query, read)
        # `asyncio.timeout` would also reject an answer that came in time while something else
        # blocked the event loop. `asyncio.wait` accepts it.
        done, _ = await asyncio.wait({running}, timeout=self._deadline_seconds)
        if not done:
            running.cancel()
            raise RetrieverTimeoutError(
                f"the graph gave no answer within the deadline of {self._deadline_seconds:g} s"
            )
        return running.result()

    async def labels_with(self, word: str) -> list[str]:
        """Return at most MAX_LABELS labels that contain a word. Case makes no difference.

        This reads all labels of the graph. Raises RetrievalError.
        """
        if not _is_whole(word):
            return []
        query = sparql.labels_query(word, self.languages, MAX_LABELS)
        return await self.ask(query, sparql.read_labels)

    def _answer(self, query: str, read: Callable[[Iterable[sparql.Row]], Read]) -> Read:
        """Run a query in the calling thread. Raises RetrieverUnavailableError."""
        start_time = time.monotonic()
        try:
            rows: Any = self.store.query(query)
            return read(rows)
        except (OSError, RuntimeError) as error:
            reason = str(error)
            rows = None
        finally:
            self.count(batches=1, search_seconds=time.monotonic() - start_time)
        # Raise outside of `except`, so that the exception holds no frames of the error. They hold
        # rows, which must not be freed by another thread.
        raise RetrieverUnavailableError(f"the graph failed ({reason})")
