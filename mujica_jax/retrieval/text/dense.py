"""Dense search: embed queries, and find the passages with the largest inner products.

`VectorSearch` is the interface of a search over the embeddings of a corpus. There are two: `exact.py`
scores every embedding on JAX devices, and `scann.py` searches approximately on the CPU. `ranked`
and `best_rows` search among a few texts in numpy.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from mujica_jax.errors import UserError
from mujica_jax.retrieval.text.corpus import Hits, Index, Passage

if TYPE_CHECKING:
    from mujica_jax.retrieval.embedding.embedder import Embedder


class VectorSearch(Protocol):
    """A search over the embeddings of a corpus."""

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the scores and positions of the k best rows of each query, both [queries, k].

        `queries` are [queries, dimension], float32. The best row comes first. If fewer than k rows
        are found, the remaining positions are -1.
        """
        ...


class DenseIndex(Index):
    """An index that searches a corpus by embeddings."""

    def __init__(
        self,
        passages: Sequence[Passage],
        embedder: "Embedder",
        vectors: VectorSearch,
        *,
        version: str,
    ) -> None:
        self.passages = passages
        self.version = version
        self._embedder = embedder
        self._vectors = vectors

    def encode(self, queries: Sequence[str]) -> np.ndarray:
        """Return the embeddings of the queries, [queries, dimension]."""
        return self._embedder.embed(queries, "query")

    def search_encoded(self, queries: np.ndarray, k: int) -> list[Hits]:
        """Return the positions and scores of the k best passages of each query, best first."""
        scores, positions = self._vectors.search(queries, k)
        return [
            _hits(query_positions, query_scores)
            for query_positions, query_scores in zip(positions, scores, strict=True)
        ]


def _hits(positions: np.ndarray, scores: np.ndarray) -> Hits:
    """Return the results of one query. Padding, with the position -1, is left out."""
    return [
        (int(position), float(score))
        for position, score in zip(positions, scores, strict=True)
        if position >= 0
    ]


def check_k(k: int, passages: Sequence[Passage]) -> None:
    """Raise UserError unless k is between 1 and the number of passages."""
    if not 1 <= k <= len(passages):
        raise UserError(
            f"k is {k}, but the index holds {len(passages):,} passages: give 1 to {len(passages)}"
        )


def ranked(
    embedder: "Embedder", query: str, texts: Sequence[str], vectors: np.ndarray | None = None
) -> list[int]:
    """Rank a few texts, such as the triples of an entity. Return their positions, best first.

    `vectors` are the embeddings of the texts, [texts, dimension]. Without them, the texts are
    embedded in this call.
    """
    if vectors is None:
        vectors = embedder.embed(texts, "passage")
    query_vectors = embedder.embed([query], "query")
    _, positions = best_rows(query_vectors, vectors, len(texts))
    return positions[0].tolist()


def best_rows(queries: np.ndarray, vectors: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the scores and positions of the k largest inner products, both [queries, k].

    `queries` are [queries, dimension] and `vectors` are [rows, dimension]. Equal scores are in the
    order of the rows. This is exact search in numpy.
    """
    scores = queries @ vectors.T
    positions = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(scores, positions, axis=1), positions
