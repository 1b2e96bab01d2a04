"""Rerank the passages that a search finds: score each with a cross-encoder, and keep the best.

    first stage: k = max(top_k, candidates) passages by words or embeddings
    second stage: the top_k of these with the largest scores; equal scores keep the first order

`Reranker` serves the concurrent searches of one or more retrievers. Searches that arrive together
are scored together, the queue is bounded, and scores are stored on disk if there is a cache.
`RerankedIndex` does the same for a command that searches an index without an event loop.
"""

import asyncio
import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from mujica_jax.config.cache_folders import cache_folder
from mujica_jax.errors import UserError
from mujica_jax.retrieval.batching import Batcher
from mujica_jax.retrieval.embedding.find_cross_encoder import find_cross_encoder
from mujica_jax.retrieval.errors import RetrieverUnavailableError
from mujica_jax.retrieval.search_cache import SearchCache
from mujica_jax.retrieval.statistics import Counted
from mujica_jax.retrieval.text.corpus import Hits, Index, Passage

if TYPE_CHECKING:
    import numpy as np

# The largest number of searches whose passages are scored at once.
MAX_BATCH_SEARCHES = 16
# The pair that the health check scores.
HEALTH_PAIR = ("health", "health")


class PairScores(Protocol):
    """A model that scores pairs of a query and a passage, such as `CrossEncoder`."""

    def scores(self, pairs: Sequence[tuple[str, str]]) -> "np.ndarray":
        """Return the score of each pair, higher for a better passage."""
        ...


@dataclasses.dataclass(frozen=True)
class _Search:
    """A query and the texts of its passages."""

    query: str
    texts: tuple[str, ...]

    @property
    def key(self) -> str:
        """A hash under which the scores are stored."""
        text = json.dumps([self.query, *self.texts])
        return hashlib.sha256(text.encode()).hexdigest()


@dataclasses.dataclass
class _Scored:
    """The scores of the passages of one search."""

    scores: list[float]
    # This search's share of the time of its batch.
    seconds: float
    # Whether a retriever has counted these scores. Equal searches share them.
    is_counted: bool = False


class Reranker(Counted):
    """A reranker for concurrent searches. Use it from one event loop at a time."""

    def __init__(
        self,
        cross_encoder: PairScores,
        *,
        version: str,
        candidates: int,
        cache: SearchCache | None = None,
        deadline_seconds: float = 60.0,
        max_waiting: int = 4096,
    ) -> None:
        """Score with `cross_encoder`, whose hash is `version`.

        `candidates` is the number of passages that the first stage should find. At most
        `max_waiting` searches wait; further ones are refused. A search that is not scored within
        `deadline_seconds` fails.
        """
        super().__init__()
        self.version = f"{version}-{candidates}"
        self._cross_encoder = cross_encoder
        self._candidates = candidates
        self._cache = cache
        self._batcher = Batcher[_Search, _Scored](
            self._score_batch,
            self,
            max_queries=MAX_BATCH_SEARCHES,
            max_waiting=max_waiting,
            deadline_seconds=deadline_seconds,
            late=f"the reranker gave no scores within the deadline of {deadline_seconds:g} s",
        )

    def candidates_for(self, k: int) -> int:
        """Return how many passages the first stage should find for k results."""
        return max(k, self._candidates)

    async def best(
        self, query: str, passages: Sequence[Passage], k: int, counted: Counted
    ) -> list[tuple[int, float]]:
        """Return the places and scores of the k best passages, best first.

        The scored passages and their time are counted in `counted`. Raises RetrievalError.
        """
        if not passages:
            return []
        search = _Search(encodable(query), tuple(encodable(p.contents) for p in passages))
        cached_scores = self._read_cache(search)
        if cached_scores is not None:
            return best_places(cached_scores, k)

        scored = await self._batcher.ask(search, 0)
        if not scored.is_counted:
            scored.is_counted = True
            counted.count(reranked=len(passages), rerank_seconds=scored.seconds)
        return best_places(scored.scores, k)

    async def check(self) -> None:
        """Score one pair, without the cache. Raises RetrieverUnavailableError."""
        await asyncio.to_thread(self._scores, [HEALTH_PAIR])

    async def _score_batch(self, searches: list[_Search], k: int) -> list[_Scored]:
        """Score the passages of some searches in a thread, and store the scores."""
        del k
        start_time = time.monotonic()
        pairs = [(search.query, text) for search in searches for text in search.texts]
        scores = await asyncio.to_thread(self._scores, pairs)
        seconds_per_pair = (time.monotonic() - start_time) / len(pairs)
        self.count(batches=1)

        results: list[_Scored] = []
        start = 0
        for search in searches:
            stop = start + len(search.texts)
            results.append(_Scored(scores[start:stop], seconds_per_pair * len(search.texts)))
            start = stop
        if self._cache is not None:
            rows = [
                (search.key, len(search.texts), json.dumps(result.scores))
                for search, result in zip(searches, results, strict=True)
            ]
            self._cache.write(rows)
        return results

    def _scores(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """Return the scores of pairs. Raises RetrieverUnavailableError if the model fails."""
        try:
            scores = self._cross_encoder.scores(pairs).tolist()
        # For example, the device ran out of memory.
        except (OSError, RuntimeError) as error:
            raise RetrieverUnavailableError(f"the reranker failed ({error})") from error
        if not all(map(math.isfinite, scores)):
            raise RetrieverUnavailableError("the reranker gave a score that is not finite")
        return scores

    def _read_cache(self, search: _Search) -> list[float] | None:
        """Return the stored scores of a search, or None if there are none or they are damaged."""
        text = None
        if self._cache is not None:
            text = self._cache.read(search.key, len(search.texts))
        if text is None:
            return None
        try:
            scores = [float(score) for score in json.loads(text)]
        except (TypeError, ValueError, OverflowError, RecursionError):
            return None
        is_valid = len(scores) == len(search.texts) and all(map(math.isfinite, scores))
        return scores if is_valid else None


class RerankedIndex(Index):
    """An index whose results are reranked."""

    def __init__(self, index: Index, cross_encoder: PairScores, *, candidates: int) -> None:
        self.passages = index.passages
        self.version = index.version
        self._index = index
        self._cross_encoder = cross_encoder
        self._candidates = candidates

    def encode(self, queries: Sequence[str]) -> tuple[Sequence[str], Any]:
        """Return the queries, and their form for the index."""
        return queries, self._index.encode(queries)

    def search_encoded(self, queries: tuple[Sequence[str], Any], k: int) -> list[Hits]:
        """Return the positions and scores of the k best passages of each query, best first."""
        texts, encoded = queries
        candidates = min(max(k, self._candidates), len(self.passages))
        results: list[Hits] = []
        for query, hits in zip(texts, self._index.search_encoded(encoded, candidates), strict=True):
            pairs = [
                (encodable(query), encodable(self.passages[position].contents))
                for position, _ in hits
            ]
            best = best_places(self._cross_encoder.scores(pairs).tolist(), k)
            results.append([(hits[place][0], score) for place, score in best])
        return results


def best_places(scores: Sequence[float], k: int) -> list[tuple[int, float]]:
    """Return the places and values of the k largest scores. Equal scores keep their order."""
    places = sorted(range(len(scores)), key=lambda place: -scores[place])
    return [(place, scores[place]) for place in places[:k]]


def encodable(text: str) -> str:
    """Return a text without halves of surrogate pairs, which no tokenizer accepts."""
    return text.encode(errors="replace").decode()


def open_reranker(
    name: str, candidates: int, *, deadline_seconds: float = 60.0, max_waiting: int = 4096
) -> Reranker:
    """Load the cross-encoder of this name, and return a reranker with a cache on disk.

    Raises UserError if it is not found or is not supported, or if `candidates` is below 1.
    """
    check_candidates(candidates)
    folder = find_cross_encoder(name)
    return Reranker(
        folder.load(),
        version=folder.version,
        candidates=candidates,
        cache=SearchCache(cache_folder("reranked"), folder.version),
        deadline_seconds=deadline_seconds,
        max_waiting=max_waiting,
    )


def check_candidates(candidates: int) -> None:
    """Raise UserError unless there is at least one candidate."""
    if candidates < 1:
        raise UserError(f"rerank_candidates is {candidates}: give at least 1")
