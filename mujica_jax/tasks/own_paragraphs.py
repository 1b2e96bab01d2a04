"""The paragraphs that a data set gives with each question, as a pool of evidence.

HotpotQA and 2WikiMultihopQA give ten with a question, MuSiQue twenty: the gold ones and
distractors. EviPath's synthesis answers every sub-question from all of them, and searches nothing
("From Evidence to Trajectory", section 4.2).
"""

import random
from collections.abc import Callable, Sequence
from typing import Literal

from mujica_jax.records import Entity, GoldPassage, Question
from mujica_jax.retrieval.statistics import RetrievalStatistics
from mujica_jax.tasks.environment import is_named_by, passage_material
from mujica_jax.tasks.task import Material

Fit = Callable[[Sequence[Material]], Sequence[Material]]


class OwnParagraphs:
    """Implements `Environment`: every search shows the question's own paragraphs, shuffled anew for
    each query.

    `fit` says which of the first materials have room. Gold paragraphs come first, those that the
    query names before the others. A paragraph is gold by its title and text; where no paragraph has
    a gold passage's text, by its title."""

    kind: Literal["graph", "text"] = "text"

    def __init__(self, question: Question, paragraphs: Sequence[GoldPassage], fit: Fit) -> None:
        self._question = question
        self._fit = fit
        distinct = list(dict.fromkeys(paragraphs))
        gold: dict[GoldPassage, None] = {}
        for passage in question.gold_passages:
            same_title = [paragraph for paragraph in distinct if paragraph.title == passage.title]
            if passage in distinct:
                gold[passage] = None
            elif same_title:
                gold |= dict.fromkeys(same_title)
            elif passage.text:
                gold[passage] = None
        self._gold = list(gold)
        self._others = [paragraph for paragraph in distinct if paragraph not in gold]
        self.statistics = RetrievalStatistics()  # nothing is searched

    async def search(self, query: str, entity: Entity | None) -> tuple[Material, ...]:
        del entity  # texts have no candidates
        gold = sorted(self._gold, key=lambda paragraph: not is_named_by(query, paragraph.title))
        ordered = [
            passage_material(paragraph.title, paragraph.text)
            for paragraph in [*gold, *self._others]
        ]
        pool = list(self._fit(ordered))
        random.Random(f"{self._question.id} {query}").shuffle(pool)
        return tuple(pool)
