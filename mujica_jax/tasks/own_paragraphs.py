"""The paragraphs that a data set gives with each question, as a pool of evidence.

HotpotQA and 2WikiMultihopQA give ten with a question, MuSiQue twenty: the gold ones and distractors. EviPath's
synthesis answers every sub-question from all of them, and searches nothing ("From Evidence to Trajectory", section
4.2).
"""

import random
from collections.abc import Callable, Sequence
from typing import Literal

from mujica_jax.records import Entity, GoldPassage, Question
from mujica_jax.retrieval.statistics import RetrievalStatistics
from mujica_jax.tasks.task import Material

Fit = Callable[[Sequence[Material]], Sequence[Material]]


class OwnParagraphs:
    """Implements `Environment`: every search shows the question's own paragraphs, shuffled anew for each query.

    `fit` says which of the first materials have room. Gold paragraphs come first, those that the query names before the
    others. A paragraph is gold by its title and text; where no paragraph has a gold passage's text, by its title."""

    kind: Literal["graph", "text"] = "text"

    def __init__(self, question: Question, paragraphs: Sequence[GoldPassage], fit: Fit) -> None:
        self._question, self._fit = question, fit
        given = list(dict.fromkeys(paragraphs))
        self._gold: list[GoldPassage] = []
        for passage in question.gold_passages:
            same = [of for of in given if of == passage] or [of for of in given if of.title == passage.title]
            if not same and passage.text:
                same = [passage]
            self._gold += [of for of in same if of not in self._gold]
        self._others = [of for of in given if of not in self._gold]
        self.statistics = RetrievalStatistics()  # nothing is searched

    async def search(self, query: str, entity: Entity | None) -> tuple[Material, ...]:
        del entity  # texts have no candidates
        asked = query.casefold()
        named = [of for of in self._gold if of.title.partition(" (")[0].casefold() in asked]
        unnamed = [of for of in self._gold if of not in named]
        ordered = [Material(text=f"{of.title}: {of.text}", title=of.title) for of in [*named, *unnamed, *self._others]]
        pool = list(self._fit(ordered))
        random.Random(f"{self._question.id} {query}").shuffle(pool)
        return tuple(pool)
