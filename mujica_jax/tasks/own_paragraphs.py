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
    """An `Environment` in which every search shows the question's own paragraphs.

    They are shuffled anew for each query.

    `fit` says which of the first materials have room. Gold paragraphs come first, those that the
    query names before the others. A paragraph is gold by its title and text, or by its title alone
    where no paragraph has the text of the gold passage.
    """

    kind: Literal["graph", "text"] = "text"

    def __init__(self, question: Question, paragraphs: Sequence[GoldPassage], fit: Fit) -> None:
        self._question = question
        self._fit = fit
        distinct_paragraphs = list(dict.fromkeys(paragraphs))
        gold: dict[GoldPassage, None] = {}  # an ordered set
        for passage in question.gold_passages:
            same_title = [
                paragraph for paragraph in distinct_paragraphs if paragraph.title == passage.title
            ]
            if passage in distinct_paragraphs:
                gold[passage] = None
            elif same_title:
                gold |= dict.fromkeys(same_title)
            elif passage.text:
                gold[passage] = None
        self._gold = list(gold)
        self._others = [paragraph for paragraph in distinct_paragraphs if paragraph not in gold]
        # Nothing is searched, so this stays empty.
        self.statistics = RetrievalStatistics()

    async def search(self, query: str, entity: Entity | None) -> tuple[Material, ...]:
        """Return the question's paragraphs. Texts have no candidates, so `entity` is not read."""
        del entity
        gold = sorted(self._gold, key=lambda paragraph: not is_named_by(query, paragraph.title))
        materials = [
            passage_material(paragraph.title, paragraph.text)
            for paragraph in [*gold, *self._others]
        ]
        shown_materials = list(self._fit(materials))
        random.Random(f"{self._question.id} {query}").shuffle(shown_materials)
        return tuple(shown_materials)
