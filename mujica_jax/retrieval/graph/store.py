"""A knowledge graph in pyoxigraph's store: on disk, as `graph_index.py` builds and opens it, or in memory."""

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from mujica_jax.retrieval.errors import RetrieverTimeout, RetrieverUnavailable
from mujica_jax.retrieval.graph import sparql
from mujica_jax.retrieval.graph.knowledge_graph import KnowledgeGraph, Read

if TYPE_CHECKING:
    from pyoxigraph import Store


class GraphStore(KnowledgeGraph):
    """A query takes a thread, so that a slow disk holds up no other episode."""

    def __init__(
        self, store: "Store", *, version: str, languages: tuple[str, ...], deadline_seconds: float = 60.0
    ) -> None:
        super().__init__(version=version, languages=languages)
        self.store, self._deadline_seconds = store, deadline_seconds

    async def ask(self, query: str, read: Callable[[Iterable[sparql.Row]], Read]) -> Read:
        running = asyncio.get_running_loop().run_in_executor(None, self._answer, query, read)
        # Not `asyncio.timeout`: where something else held up the event loop, an answer that came meanwhile is not late.
        done, _ = await asyncio.wait({running}, timeout=self._deadline_seconds)
        if not done:
            running.cancel()
            raise RetrieverTimeout(f"the graph gave no answer within the deadline of {self._deadline_seconds:g} s")
        return running.result()

    def _answer(self, query: str, read: Callable[[Iterable[sparql.Row]], Read]) -> Read:
        began = time.monotonic()
        try:
            rows: Any = self.store.query(query)
            return read(rows)
        except (OSError, RuntimeError) as error:
            reason = str(error)
            rows = None
        finally:
            self._count(batches=1, search_seconds=time.monotonic() - began)
        # Raised here, without the error's frames: rows that these hold must not be freed by another thread.
        raise RetrieverUnavailable(f"the graph failed ({reason})")
