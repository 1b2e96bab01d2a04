"""Similarity of two texts: the cosine of their embeddings, or of their word counts.

The synthesis of trajectories uses it (`methods/evipath/evidence.py`). The similarity `words`
compares word counts and needs no embedder. It suits synthetic worlds, which repeat names and
relations word by word. Any other name is that of an embedder (`find.py`). Texts are embedded as
queries. The embedding of a query does not depend on the other texts in its batch, not even in the
last bit.
"""

import collections
import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mujica_jax.retrieval.embedding.find import EmbedderFolder, find_embedder

if TYPE_CHECKING:
    from mujica_jax.retrieval.embedding.embedder import Embedder

WORDS = "words"
# Number of groups of texts whose embeddings are cached. The evidence of a question is one group.
CACHED_GROUPS = 4096

# A function of a text and other texts. It returns the similarity to each of the others, -1 to 1.
Similarity = Callable[[str, Sequence[str]], list[float]]

_word = re.compile(r"\w+")


def find_similarity(name: str) -> Similarity:
    """Return the similarity of this name. Raises UserError if there is no such embedder.

    The weights of an embedder are loaded at its first use.
    """
    if name == WORDS:
        return word_cosines
    # Use no prefixes, because both texts are statements, and neither is a query or a passage.
    return EmbeddingSimilarity(find_embedder(name, prefixes="none"))


class EmbeddingSimilarity:
    """A similarity: the cosines between the embedding of a text and those of other texts."""

    def __init__(self, folder: EmbedderFolder) -> None:
        self._folder = folder
        self._embedder: Embedder | None = None
        self._cached_vectors = functools.lru_cache(CACHED_GROUPS)(self._vectors)

    def __call__(self, text: str, others: Sequence[str]) -> list[float]:
        other_vectors = self._cached_vectors(tuple(others))
        text_vector = self._cached_vectors((text,))[0]
        return (other_vectors @ text_vector).tolist()

    def _vectors(self, texts: tuple[str, ...]) -> np.ndarray:
        """Return the embeddings of some texts, [texts, dimension], each of length 1."""
        if self._embedder is None:
            self._embedder = self._folder.load()
        vectors = self._embedder.embed(texts, "query")
        return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


def word_cosines(text: str, others: Sequence[str]) -> list[float]:
    """Return the cosine of word counts between a text and each of the others."""
    return [word_cosine(text, other) for other in others]


def word_cosine(first_text: str, second_text: str) -> float:
    """Return the cosine of the word counts of two texts. Letter case does not matter.

    Return 0 if a text has no word.
    """
    first = collections.Counter(_word.findall(first_text.casefold()))
    second = collections.Counter(_word.findall(second_text.casefold()))
    lengths = math.hypot(*first.values()) * math.hypot(*second.values())
    if not lengths:
        return 0.0
    return sum(count * second[word] for word, count in first.items()) / lengths
