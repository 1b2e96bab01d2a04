"""A knowledge graph that answers SPARQL queries.

It finds entities by Q-id, label and alias, and the triples of an entity in both directions.
`GraphStore` answers from our own store and `endpoint.py` from another host. Both use the same
queries and read answers in the same way (`sparql.py`). A bounded number of triples is read in each
direction, because countries and professions have millions. The source chooses which ones these are;
their order is fixed.
"""

import abc
import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from pyoxigraph import NamedNode, Store

from mujica_jax.retrieval.errors import RetrieverTimeoutError, RetrieverUnavailableError
from mujica_jax.retrieval.graph import sparql
from mujica_jax.retrieval.graph.triples import End, Triple
from mujica_jax.retrieval.graph.values import readable_iri
from mujica_jax.retrieval.statistics import Counted

MAX_TRIPLES = 500  # of an entity, in each direction

Read = TypeVar("Read")


class KnowledgeGraph(Counted, abc.ABC):
    """A source of triples.

    An entity's key is its Q-id or IRI, or a name if it has neither.
    """

    def __init__(self, *, version: str, languages: tuple[str, ...]) -> None:
        super().__init__()
        self.version = version
        self.languages = languages

    def prefer_language(self, language: str) -> None:
        """Write labels in `language` where the graph has them.

        Otherwise they are in the other languages, in the order of `sparql.languages_for`.
        """
        self.languages = sparql.languages_for(language, self.languages)

    @abc.abstractmethod
    async def ask(self, query: str, read: Callable[[Iterable[sparql.Row]], Read]) -> Read:
        """Return what `read` makes of the rows of a SPARQL query. Raises RetrievalError."""

    async def triples_of(self, key: str, limit: int | None = None) -> tuple[Triple, ...]:
        """Return at most `limit` triples of an entity, no two alike, in a fixed order.

        Those with the entity as subject come first. An unknown entity has none. Raises
        RetrievalError.
        """
        return tuple(end.triple for end in await self.ends_of(key, limit))

    async def ends_of(self, key: str, limit: int | None = None) -> list[End]:
        """Return the triples of `triples_of` with whether the entity is the triple's object.

        The id of an entity that was merged into another one stands for that one. Raises
        RetrievalError.
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
        """Return the label of an entity, as triples of other entities show it.

        `key` is a Q-id or an IRI. None if the entity has no label in the graph's languages. The id
        of an entity that was merged into another one has the label of that one. Raises
        RetrievalError.
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

        A name is a label, or an alias if no label matches. In files that name entities without
        Q-ids, case, spacing and a closing parenthesis do not matter if nothing else matches. Raises
        RetrievalError.
        """
        entity = sparql.entity_iri(name)
        if entity is None:
            return await self._namesakes(name)
        is_known = await self.ask(sparql.exists_query(entity), _has_rows)
        return [name] if is_known else []

    async def _namesakes(self, name: str) -> list[str]:
        """Return the keys of the entities of this name, the likeliest first."""
        try:
            query = sparql.find_query(name, self.languages)
        except ValueError:
            # Half a character: nothing is called so.
            return []
        return await self.ask(query, sparql.read_namesakes)


def _has_rows(rows: Iterable[sparql.Row]) -> bool:
    return any(True for _ in rows)


class GraphStore(KnowledgeGraph):
    """A graph in pyoxigraph's store, on disk or in memory.

    A query takes a thread, so that a slow disk holds up no other episode.
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
        """Return what `read` makes of the rows of a SPARQL query. Raises RetrievalError."""
        loop = asyncio.get_running_loop()
        running = loop.run_in_executor(None, self._answer, query, read)
        # Not `asyncio.timeout`: where something else held up the event loop, an answer that came
        # meanwhile is not late.
        done, _ = await asyncio.wait({running}, timeout=self._deadline_seconds)
        if not done:
            running.cancel()
            raise RetrieverTimeoutError(
                f"the graph gave no answer within the deadline of {self._deadline_seconds:g} s"
            )
        return running.result()

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
        # Raised here, without the error's frames: rows that these hold must not be freed by another
        # thread.
        raise RetrieverUnavailableError(f"the graph failed ({reason})")
