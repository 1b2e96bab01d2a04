"""Rank the triples of an entity that has more triples than a search returns.

`WordRanking` compares words, `DenseRanking` compares embeddings. Both return the positions of all
texts, best first. Texts with equal scores keep their order.
"""

import asyncio
import functools
import math
import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from mujica_jax.errors import UserError
from mujica_jax.retrieval.errors import RetrieverRefusedError, RetrieverUnavailableError
from mujica_jax.retrieval.text.corpus_records import check_text
from mujica_jax.retrieval.text.dense import ranked

if TYPE_CHECKING:
    from mujica_jax.retrieval.embedding.embedder import Embedder

# Maximum number of cached embeddings. With bge-large they take 256 MiB.
MAX_KEPT_ROWS = 65_536

# Question words that are missing in the stop word lists of bm25s.
MORE_STOP_WORDS = {
    "en": "could many may might much would",
    "de": (
        "gibt wann warum welche welchem welchen welcher welches wem wen wer wessen wie wieso wo "
        "woher wurde wurden"
    ),
    "ru": "где какая какие какое какой каком кем ком сколько чего чем",
    "zh": "",
}

# Chinese and Japanese are written without spaces, so each of their characters counts as a word.
_CHARACTERS = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_words = re.compile(rf"[{_CHARACTERS}]|[^\W{_CHARACTERS}]+")


class Ranking(Protocol):
    """A function that orders the triples of an entity for a query."""

    async def __call__(self, query: str, texts: Sequence[str]) -> Sequence[int]:
        """Return the positions of `texts`, best first. Raises RetrievalError."""
        ...


class WordRanking:
    """A ranking by the words that a text shares with the query. Stop words do not count.

    A word has more weight if fewer of the texts contain it (the formula of BM25):

        score(q, d) = sum over words w in both of  ln(1 + (N - n(w) + 1/2) / (n(w) + 1/2))

    N is the number of texts, and n(w) the number of texts with the word w. The label of the
    searched entity is in each of its triples, so it does not change their order. Words must match
    exactly: "wife" does not find the relation "spouse". Only an embedder can do that.
    """

    def __init__(self, language: str = "en") -> None:
        """Rank for queries in `language` or in English, the language of the prompts."""
        self._language = language

    async def __call__(self, query: str, texts: Sequence[str]) -> list[int]:
        query_words = _words_of(query) - stop_words(self._language) - stop_words("en")
        shared_words = [query_words & _words_of(text) for text in texts]
        # The number of texts with each word, n(w) in the formula.
        counts: Counter[str] = Counter()
        for words in shared_words:
            counts.update(words)
        weights: dict[str, float] = {}
        for word, count in counts.items():
            weights[word] = math.log1p((len(texts) - count + 0.5) / (count + 0.5))

        # Add up the weights in sorted order. The order of a set varies, and with it the rounding of
        # the sum, but equal scores must stay equal.
        scores = [sum(weights[word] for word in sorted(words)) for words in shared_words]
        return sorted(range(len(texts)), key=lambda position: -scores[position])


class DenseRanking:
    """A ranking by the inner product of the embeddings of text and query.

    The texts of an entity are embedded together in batches. Their embeddings are cached for the
    next search of this entity. They are cached as a whole, so the result of a search does not
    depend on earlier searches. The methods are thread-safe.
    """

    def __init__(self, embedder: "Embedder") -> None:
        self._embedder = embedder
        self._lock = threading.Lock()
        # The embeddings [texts, width] of each entity, by its texts. The entity that was searched
        # last is at the end.
        self._cached_vectors: OrderedDict[tuple[str, ...], np.ndarray] = OrderedDict()
        # The number of embeddings in the cache.
        self._cached_rows = 0

    async def __call__(self, query: str, texts: Sequence[str]) -> list[int]:
        try:
            check_text(query)
        except UserError as error:
            raise RetrieverRefusedError(str(error)) from error
        return await asyncio.to_thread(self._ranked, query, tuple(texts))

    def _ranked(self, query: str, texts: tuple[str, ...]) -> list[int]:
        """Return the positions of the texts, best first. It waits for the device."""
        try:
            with self._lock:
                return ranked(self._embedder, query, texts, self._vectors(texts))
        # For example, the device ran out of memory.
        except (OSError, RuntimeError) as error:
            raise RetrieverUnavailableError(f"the embedder failed ({error})") from error

    def _vectors(self, texts: tuple[str, ...]) -> np.ndarray:
        """Return the embeddings [texts, width] of an entity, from the cache if they are there."""
        vectors = self._cached_vectors.pop(texts, None)
        if vectors is None:
            vectors = self._embedder.embed(texts, "passage")
            self._cached_rows += len(texts)
        self._cached_vectors[texts] = vectors
        while self._cached_rows > MAX_KEPT_ROWS and len(self._cached_vectors) > 1:
            dropped_texts, _ = self._cached_vectors.popitem(last=False)
            self._cached_rows -= len(dropped_texts)
        return vectors


@functools.cache
def stop_words(language: str) -> frozenset[str]:
    """Return the words of a language that say nothing about the topic of a question.

    These are the stop words of bm25s and question words.
    """
    from bm25s import stopwords

    lists = {
        "en": stopwords.STOPWORDS_EN_PLUS,
        "de": stopwords.STOPWORDS_GERMAN,
        "ru": stopwords.STOPWORDS_RUSSIAN,
        "zh": stopwords.STOPWORDS_CHINESE,
    }
    return frozenset((*lists[language], *MORE_STOP_WORDS[language].split()))


def _words_of(text: str) -> set[str]:
    """Return the set of words of a text, in lower case."""
    return set(_words.findall(text.casefold()))
