"""An environment of the paragraphs that a data set gives with each question.

HotpotQA and 2WikiMultihopQA give ten paragraphs with a question, MuSiQue twenty. They are the gold
paragraphs and distractors. EviPath's synthesis answers every sub-question from all of them without
a search ("From Evidence to Trajectory", section 4.2).
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
    """An `Environment` in which every search returns the question's own paragraphs.

    `fit` returns the leading paragraphs that have room in the observation. Before it is called,
    gold paragraphs that the query names come first, then the other gold paragraphs, then the
    distractors. The result is shuffled, in a new order for each query.

    A paragraph is gold if a gold passage has its title and text. If no paragraph has the text of a
    gold passage, then every paragraph with its title is gold.
    """

    kind: Literal["graph", "text"] = "text"

    def __init__(self, question: Question, paragraphs: Sequence[GoldPassage], fit: Fit) -> None:
        self._question = question
        self._fit = fit
        distinct_paragraphs = list(dict.fromkeys(paragraphs))
        # Used as an ordered set.
        gold: dict[GoldPassage, None] = {}
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
        # Nothing is searched, so the statistics stay empty.
        self.statistics = RetrievalStatistics()

    async def search(self, query: str, entity: Entity | None) -> tuple[Material, ...]:
        """Return the question's paragraphs. `entity` is not used."""
        del entity
        gold = sorted(self._gold, key=lambda paragraph: not is_named_by(query, paragraph.title))
        materials = [
            passage_material(paragraph.title, paragraph.text)
            for paragraph in [*gold, *self._others]
        ]
        shown_materials = list(self._fit(materials))
        random.Random(f"{self._question.id} {query}").shuffle(shown_materials)
        return tuple(shown_materials)
