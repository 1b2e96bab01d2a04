"""Rank the triples of an entity that has more than a search shows.

They are ranked by the words of the query, or by an embedder.
Both rankings return the positions of all texts, best first. Texts with equal scores keep their
order.
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

# How many embeddings of triples are cached: 256 MiB of bge-large's.
MAX_KEPT_ROWS = 65_536

# Question words that the lists of bm25s lack.
MORE_STOP_WORDS = {
    "en": "could many may might much would",
    "de": (
        "gibt wann warum welche welchem welchen welcher welches wem wen wer wessen wie wieso wo "
        "woher wurde wurden"
    ),
    "ru": "где какая какие какое какой каком кем ком сколько чего чем",
    "zh": "",
}

# Chinese and Japanese write no spaces, so each of their characters counts as a word.
_CHARACTERS = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_words = re.compile(rf"[{_CHARACTERS}]|[^\W{_CHARACTERS}]+")


class Ranking(Protocol):
    """Orders the triples of an entity."""

    async def __call__(self, query: str, texts: Sequence[str]) -> Sequence[int]:
        """Return the positions of `texts`, best first. Raises RetrievalError."""
        ...


class WordRanking:
    """Ranks texts by the words that they share with the query. Stop words do not count.

    A word weighs more if fewer texts have it, by BM25's formula over these texts alone:

        score(q, d) = sum over words w in both of  ln(1 + (N - n(w) + 1/2) / (n(w) + 1/2))

    So the searched entity's own label, which is in each of its triples, decides nothing. Words are
    compared as they are: "wife" does not find the relation "spouse". That takes an embedder.
    """

    def __init__(self, language: str = "en") -> None:
        """Rank queries in `language`. They may also be in English, as the prompts are."""
        self._language = language

    async def __call__(self, query: str, texts: Sequence[str]) -> list[int]:
        query_words = _words_of(query) - stop_words(self._language) - stop_words("en")
        shared_words = [query_words & _words_of(text) for text in texts]
        counts: Counter[str] = Counter()  # n(w) of the formula
        for words in shared_words:
            counts.update(words)
        weights: dict[str, float] = {}
        for word, count in counts.items():
            weights[word] = math.log1p((len(texts) - count + 0.5) / (count + 0.5))

        # Sum in a fixed order. Sets of strings have none, and equal scores must stay equal.
        scores = [sum(weights[word] for word in sorted(words)) for words in shared_words]
        return sorted(range(len(texts)), key=lambda position: -scores[position])


class DenseRanking:
    """Ranks texts by the inner product of their embeddings with the query's.

    The texts of an entity are embedded together in batches, and their embeddings are cached for its
    next search. They are cached by entity, so a search does not depend on the searches before it.
    Any thread may call it.
    """

    def __init__(self, embedder: "Embedder") -> None:
        self._embedder = embedder
        self._lock = threading.Lock()
        # By the texts of an entity. The entity that was searched last is at the end.
        self._cached_vectors: OrderedDict[tuple[str, ...], np.ndarray] = OrderedDict()
        self._cached_rows = 0

    async def __call__(self, query: str, texts: Sequence[str]) -> list[int]:
        try:
            check_text(query)
        except UserError as error:
            raise RetrieverRefusedError(str(error)) from error
        return await asyncio.to_thread(self._ranked, query, tuple(texts))

    def _ranked(self, query: str, texts: tuple[str, ...]) -> list[int]:
        try:
            with self._lock:
                return ranked(self._embedder, query, texts, self._vectors(texts))
        # Such as a device that ran out of memory.
        except (OSError, RuntimeError) as error:
            raise RetrieverUnavailableError(f"the embedder failed ({error})") from error

    def _vectors(self, texts: tuple[str, ...]) -> np.ndarray:
        """Return the embeddings of an entity's texts, from the cache if it has them."""
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
    """Return the words of a language that do not tell what is asked.

    They are the stop words of bm25s, and question words.
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
    return set(_words.findall(text.casefold()))
