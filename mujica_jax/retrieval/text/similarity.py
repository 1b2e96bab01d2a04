"""How alike two texts are: the cosine of their embeddings, or of their word counts.

Called by the synthesis of trajectories (`agents/evidence.py`). `words` needs no embedder: worlds
from scratch repeat names and relations word by word. Any other name is an embedder's
(`embedders.py`). Texts are embedded as queries are, whose numbers are the same to the bit whatever
they come with.
"""

import collections
import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mujica_jax.retrieval.text.embedders import find_embedder

if TYPE_CHECKING:
    from mujica_jax.models.embedder import Embedder

WORDS = "words"
KEPT_GROUPS = 4096  # of texts that were compared together, the evidence of a question among them

Similarity = Callable[[str, Sequence[str]], list[float]]  # of a text to each of the others: -1 to 1

_word = re.compile(r"\w+")


def find_similarity(name: str) -> Similarity:
    """Raises UserError where there is no such embedder; its weights are read when it is first
    asked."""
    if name == WORDS:
        return word_cosines
    folder = find_embedder(name, prefixes="none")  # both texts are statements, no query and passage

    @functools.cache
    def embedder() -> "Embedder":
        return folder.load()

    @functools.lru_cache(KEPT_GROUPS)
    def vectors(texts: tuple[str, ...]) -> np.ndarray:
        found = embedder().embed(texts, "query")
        return found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12)

    return lambda text, others: (vectors(tuple(others)) @ vectors((text,))[0]).tolist()


def word_cosines(text: str, others: Sequence[str]) -> list[float]:
    return [word_cosine(text, other) for other in others]


def word_cosine(one: str, other: str) -> float:
    """Of the two vectors of word counts, letter case folded; 0 where a text has no word."""
    first, second = (collections.Counter(_word.findall(text.casefold())) for text in (one, other))
    lengths = math.hypot(*first.values()) * math.hypot(*second.values())
    return sum(count * second[word] for word, count in first.items()) / lengths if lengths else 0.0
