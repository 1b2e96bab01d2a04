"""A knowledge graph that is asked in SPARQL: entities by Q-id, label and alias, and the triples of an entity in both directions.

`graph_store.py` answers from our own store and `sparql_endpoint.py` from another host; what is asked and how answers are read is one and
the same (`sparql.py`). A bounded number of triples is looked at in each direction: countries and professions have millions. Which ones
these are is the source's choice; their order is fixed.
"""

import abc
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

from mujica_jax.retrieval.errors import RetrievalError
from mujica_jax.retrieval.graph import sparql
from mujica_jax.retrieval.graph.triples import Triple
from mujica_jax.retrieval.retriever import RetrievalStatistics

if TYPE_CHECKING:
    import pyoxigraph

MOST_TRIPLES = 500  # of an entity, in each direction

Read = TypeVar("Read")


class KnowledgeGraph(abc.ABC):
    """Where triples come from. An entity's key is its Q-id or IRI, or a name where it has neither."""

    def __init__(self, *, version: str, languages: tuple[str, ...]) -> None:
        self.version, self.languages = version, languages
        self._statistics, self._counting = RetrievalStatistics(), threading.Lock()

    @property
    def statistics(self) -> RetrievalStatistics:
        """`queries` are searches of agents; `batches` what was asked of the store or the endpoint for them."""
        return self._statistics

    @abc.abstractmethod
    async def ask(self, query: str, read: Callable[[Iterable[sparql.Row]], Read]) -> Read:
        """What `read` makes of the rows of a SPARQL query. Raises RetrievalError."""

    async def triples_of(self, key: str, limit: int | None = None) -> tuple[Triple, ...]:
        """As subject before as object, no two alike, in a fixed order; at most `limit`. An unknown entity has none."""
        return tuple(end.triple for end in await self.ends_of(key, limit))

    async def ends_of(self, key: str, limit: int | None = None) -> list[sparql.End]:
        """`triples_of` with whether the entity is the triple's object. The id of an entity that was merged into another one stands for
        that one. Raises RetrievalError."""
        began = time.monotonic()
        self._count(queries=1)
        try:
            found = sparql.entity_iri(key)
            if found is None and (names := await self._namesakes(key)):
                found = sparql.entity_iri(names[0])
            if found is None:
                return []
            ends, taken_over = await self._ends(found)
            if not ends and taken_over is not None:
                ends, _ = await self._ends(sparql.entity_iri(taken_over) or found)
            return ends[:limit]
        except RetrievalError:
            self._count(failed=1)
            raise
        finally:
            self._count(waiting_seconds=time.monotonic() - began)

    async def _ends(self, entity: "pyoxigraph.NamedNode") -> tuple[list[sparql.End], str | None]:
        def read(rows: Iterable[sparql.Row]) -> tuple[list[sparql.End], str | None]:
            rows = list(rows)
            return sparql.read_ends(rows, entity, self.languages), sparql.read_redirect(rows)

        return await self.ask(sparql.triples_query(entity, self.languages, MOST_TRIPLES), read)

    async def find(self, name: str) -> list[str]:
        """Keys of the entities with this Q-id or IRI, or else called so: by label, then alias. The first is the likeliest.

        Files that name entities without Q-ids are searched up to case, spacing and a closing parenthesis too. Raises RetrievalError.
        """
        entity = sparql.entity_iri(name)
        if entity is None:
            return await self._namesakes(name)
        known = await self.ask(sparql.exists_query(entity), lambda rows: any(True for _ in rows))
        return [name] if known else []

    async def _namesakes(self, name: str) -> list[str]:
        try:
            query = sparql.find_query(name, self.languages)
        except ValueError:  # half a character: nothing is called so
            return []
        return await self.ask(query, sparql.read_namesakes)

    def _count(self, **amounts: float) -> None:
        with self._counting:  # a store's searches count from their thread
            self._statistics = self._statistics.with_more(**amounts)
