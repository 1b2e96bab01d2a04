"""Counts of what a retriever or a graph has done since it was made.

`metrics.jsonl` and the end of a run show them.
"""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator

from mujica_jax.retrieval.errors import RetrievalError


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetrievalStatistics:
    queries: int = 0  # searches of agents
    cached: int = 0  # answered from the disk
    shared: int = 0  # answered together with the same query of another agent
    batches: int = 0  # what the index, the store or the endpoint was asked for them
    failed: int = 0
    retries: int = 0
    encode_seconds: float = 0.0
    search_seconds: float = 0.0
    waiting_seconds: float = 0.0  # of all queries, from their arrival to their answer

    def with_more(self, **amounts: float) -> "RetrievalStatistics":
        """Return the statistics with these amounts added."""
        sums = {name: getattr(self, name) + amount for name, amount in amounts.items()}
        return dataclasses.replace(self, **sums)

    def sentence(self) -> str:
        """Return the statistics as the end of a run shows them."""
        return (
            f"{self.queries:,} searches ({self.cached:,} cached, {self.shared:,} shared, "
            f"{self.failed:,} failed) in {self.batches:,} batches: {self.encode_seconds:.1f} s "
            f"encoding, {self.search_seconds:.1f} s searching"
        )


class Counted:
    """Statistics that any thread may add to."""

    def __init__(self) -> None:
        self._statistics = RetrievalStatistics()
        self._statistics_lock = threading.Lock()

    @property
    def statistics(self) -> RetrievalStatistics:
        return self._statistics

    def count(self, **amounts: float) -> None:
        """Add some amounts, from any thread."""
        with self._statistics_lock:
            self._statistics = self._statistics.with_more(**amounts)

    @contextlib.contextmanager
    def counted_search(self) -> Iterator[None]:
        """Count a search, its failure, and the time until its answer."""
        start_time = time.monotonic()
        self.count(queries=1)
        try:
            yield
        except RetrievalError:
            self.count(failed=1)
            raise
        finally:
            self.count(waiting_seconds=time.monotonic() - start_time)
