"""How alike two texts are: the cosine of their embeddings, or of their word counts.

Called by the synthesis of trajectories (`agents/evidence.py`). `words` needs no embedder: worlds from scratch repeat
names and relations word by word. Any other name is an embedder's (`embedders.py`). A text is embedded once, and alone,
so that its numbers do not depend on what it is compared with.
"""

import collections
import functools
import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from mujica_jax.retrieval.text.embedders import find_embedder

if TYPE_CHECKING:
    from mujica_jax.models.embedder import Embedder

WORDS = "words"
KEPT_EMBEDDINGS = 100_000  # of texts; a vector of MiniLM takes 1.5 KB

Similarity = Callable[[str, str], float]  # -1 to 1

_word = re.compile(r"\w+")


def find_similarity(name: str) -> Similarity:
    """Raises UserError where there is no such embedder; its weights are read when it is first asked."""
    if name == WORDS:
        return word_cosine
    folder = find_embedder(name, prefixes="none")  # both texts are statements, no query and passage

    @functools.cache
    def embedder() -> "Embedder":
        return folder.load()

    @functools.lru_cache(KEPT_EMBEDDINGS)
    def vector(text: str) -> np.ndarray:
        found = embedder().embed([text], "query")[0]
        return found / max(float(np.linalg.norm(found)), 1e-12)

    return lambda one, other: float(vector(one) @ vector(other))


def word_cosine(one: str, other: str) -> float:
    """Of the two vectors of word counts, letter case folded; 0 where a text has no word."""
    first, second = (collections.Counter(_word.findall(text.casefold())) for text in (one, other))
    lengths = math.hypot(*first.values()) * math.hypot(*second.values())
    return sum(count * second[word] for word, count in first.items()) / lengths if lengths else 0.0
