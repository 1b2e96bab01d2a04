"""Passages by their embeddings: queries are embedded and searched by inner product.

They are searched among the embeddings of a corpus or of a few texts.

Two engines have one interface, `search(queries, k) -> scores, positions`: every embedding looked at
on the devices of JAX (`exact.py`), and ScaNN (`scann.py`).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from mujica_jax.errors import UserError
from mujica_jax.retrieval.text.corpus import Hits, Index, Passage

if TYPE_CHECKING:
    from mujica_jax.retrieval.embedding.embedder import Embedder


class VectorSearch(Protocol):
    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the scores and positions of the k best rows of each query, both [queries, k].

        `queries` are float32 [queries, dimension]. The best row comes first; the position is -1
        where there is no further one.
        """
        ...


class DenseIndex(Index):
    """A corpus that is searched by its embeddings."""

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
    """Return the results of one query without the padding, whose positions are -1."""
    return [
        (int(position), float(score))
        for position, score in zip(positions, scores, strict=True)
        if position >= 0
    ]


def check_k(k: int, passages: Sequence[Passage]) -> None:
    """Check that an index has k passages. Raises UserError."""
    if not 1 <= k <= len(passages):
        raise UserError(
            f"k is {k} and the index holds {len(passages):,} passages: give 1 to {len(passages)}"
        )


def ranked(
    embedder: "Embedder", query: str, texts: Sequence[str], vectors: np.ndarray | None = None
) -> list[int]:
    """Return the positions of a few texts (an entity's triples), best first.

    `vectors` are the embeddings of the texts; without them they are embedded on the spot.
    """
    if vectors is None:
        vectors = embedder.embed(texts, "passage")
    query_vectors = embedder.embed([query], "query")
    _, positions = best_rows(query_vectors, vectors, len(texts))
    return positions[0].tolist()


def best_rows(queries: np.ndarray, vectors: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the scores and positions of the k largest inner products, each [queries, k].

    Equal scores are in the order of the rows. This is exact search in numpy.
    """
    scores = queries @ vectors.T
    positions = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(scores, positions, axis=1), positions
