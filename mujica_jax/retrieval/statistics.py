"""Counters of the work of a retriever or a knowledge graph since it was created.

They are logged in `metrics.jsonl` and printed at the end of a run.
"""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator

from mujica_jax.retrieval.errors import RetrievalError


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetrievalStatistics:
    """Counters and summed times of all searches so far."""

    # Searches that agents asked for.
    queries: int = 0
    # Searches answered from the cache on disk.
    cached: int = 0
    # Searches answered together with the same query of another agent.
    shared: int = 0
    # Calls of the index, the graph store or the remote service. One call answers many searches.
    batches: int = 0
    # Searches that ended in an error.
    failed: int = 0
    # Requests that were sent again after a transient error.
    retries: int = 0
    # Time that the index spent on encoding queries.
    encode_seconds: float = 0.0
    # Time that the index or the remote service spent on searching.
    search_seconds: float = 0.0
    # Passages that a reranker scored, without those whose scores were cached.
    reranked: int = 0
    # Time that the reranker spent on scoring them.
    rerank_seconds: float = 0.0
    # Time from the arrival of a query to its answer, summed over all queries.
    waiting_seconds: float = 0.0

    def with_more(self, **amounts: float) -> "RetrievalStatistics":
        """Return a copy in which these amounts are added to the fields of the same names."""
        sums = {name: getattr(self, name) + amount for name, amount in amounts.items()}
        return dataclasses.replace(self, **sums)

    def sentence(self) -> str:
        """Return the statistics in one sentence, which is printed at the end of a run."""
        sentence = (
            f"{self.queries:,} searches ({self.cached:,} cached, {self.shared:,} shared, "
            f"{self.failed:,} failed) in {self.batches:,} batches: {self.encode_seconds:.1f} s "
            f"encoding, {self.search_seconds:.1f} s searching"
        )
        if self.reranked:
            sentence += f", {self.rerank_seconds:.1f} s reranking {self.reranked:,} passages"
        return sentence


class Counted:
    """Base class that keeps RetrievalStatistics. Any thread may add to them."""

    def __init__(self) -> None:
        self._statistics = RetrievalStatistics()
        self._statistics_lock = threading.Lock()

    @property
    def statistics(self) -> RetrievalStatistics:
        """The counters so far."""
        return self._statistics

    def count(self, **amounts: float) -> None:
        """Add amounts to the statistics; safe to call from any thread."""
        with self._statistics_lock:
            self._statistics = self._statistics.with_more(**amounts)

    @contextlib.contextmanager
    def counted_search(self) -> Iterator[None]:
        """Count one search: the body runs it. A failure and the waiting time are counted too."""
        start_time = time.monotonic()
        self.count(queries=1)
        try:
            yield
        except RetrievalError:
            self.count(failed=1)
            raise
        finally:
            self.count(waiting_seconds=time.monotonic() - start_time)
