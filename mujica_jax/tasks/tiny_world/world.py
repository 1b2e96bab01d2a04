"""The tiny world: a generated encyclopaedia with the question kinds of 2WikiMultihopQA, needing no
download.

It has four parts without a common entity (`facts.py`): train, demonstrations, dev and test. Their
names share words and no full name (`names.py`). Each question is a template (`questions.py`) filled
with entities whose facts reach the end of its path (`sampling.py`), so its answer can be computed
again from its evidences. A part is generated when it is first asked for.
"""

import itertools
import random
from collections.abc import Iterator, Sequence
from functools import cache
from typing import cast

from mujica_jax.config.schema import TinyWorldConfig
from mujica_jax.errors import UserError
from mujica_jax.metrics import Rule
from mujica_jax.records import KNOWN, UNKNOWN, Entity, Evidence, GoldPassage, Question
from mujica_jax.retrieval.retriever import IndexRetriever
from mujica_jax.retrieval.statistics import RetrievalStatistics
from mujica_jax.retrieval.text.bm25 import Bm25Index
from mujica_jax.retrieval.text.corpus import Passage
from mujica_jax.tasks.environment import TextEnvironment
from mujica_jax.tasks.pretraining_text import Vocabulary, documents
from mujica_jax.tasks.task import Environment, EnvironmentKind, Material, Split
from mujica_jax.tasks.tiny_world.facts import Value, WorldPart
from mujica_jax.tasks.tiny_world.names import Part
from mujica_jax.tasks.tiny_world.questions import MAX_PARAPHRASES
from mujica_jax.tasks.tiny_world.sampling import Plan, draw_plans

LIMITS = {  # inclusive bounds of the configuration
    "train_questions": (1, 100_000),
    "demonstrations": (1, 100_000),
    "dev_questions": (1, 100_000),
    "test_questions": (1, 100_000),
    "augmented_copies": (0, 100),
    "top_k": (1, 100),
    "facts_per_entity": (4, 13),  # a city has 4 facts, a person at most 13
    "distractor_names": (0.0, 1.0),
    "missing_facts": (0.0, 1.0),
    "common_knowledge": (0.0, 1.0),
    "paraphrases": (1, MAX_PARAPHRASES),
}
# Keys of entities look like Wikidata's: the first one of a part, and how many it may give away.
FIRST_KEY: dict[Part, int] = {
    "train": 1_000_000,
    "dev": 2_000_000,
    "test": 3_000_000,
    "demonstration": 4_000_000,
}
KEYS_PER_PART = (
    1_000_000  # a renamed copy of the demonstrations has those of the copy before, plus this
)
PRETRAINING_YEARS = (1850, 2015)  # the years that facts of the world lie in
YEARS = (1780, 2040)  # those and the moved ones of renamed copies
YEAR_REPEATS = 50  # how often they are shown to the tokenizer, so that each becomes one token
TOKENIZER_QUESTIONS = 1000  # of each training-side part
TOKENIZER_ENTITIES = 300  # with their triples; names are shown of all
NAMES_PER_LINE = 10
KNOWN_SHARE = 0.7  # of the pre-training documents, where facts are common knowledge
KNOWN_FACTS = 6  # most that such a document states


def build(config: TinyWorldConfig) -> "TinyWorld":
    """The world of a configuration. Raises UserError for a value outside LIMITS."""
    for field, (least, most) in LIMITS.items():
        value = getattr(config, field)
        if not least <= value <= most:
            raise UserError(
                f"the tiny world takes {field} from {least} to {most}, and the configuration says "
                f"{value}"
            )
    return TinyWorld(config)


class TinyGraph:
    """The encyclopaedia as a knowledge graph: the triples that name an entity, at most
    `facts_per_entity` of them."""

    kind: EnvironmentKind = "graph"

    def __init__(self, world: "TinyWorld") -> None:
        self._world = world
        self.statistics = RetrievalStatistics()

    async def search(self, query: str, entity: Entity | None) -> tuple[Material, ...]:
        """Triples in an order that the query does not change: choosing among them is the worker's
        part."""
        if entity is None:
            raise ValueError(
                "a graph search names the entity whose triples it wants, and this one names none"
            )
        self.statistics = self.statistics.with_more(queries=1)
        return self.materials(entity.id)

    def materials(self, key: str) -> tuple[Material, ...]:
        """An entity's triples and, as far as there is room, some that point at it, shuffled.
        Unknown keys have none."""
        found = self._world.locate(key)
        if found is None:
            return ()
        part, number = found
        draw = random.Random(f"{self._world.config.seed} {part.part} {part.copy} {number}")
        own = [(number, relation) for relation in part.facts[number]]
        inverse = part.inverse.get(number, [])
        room = min(len(inverse), self._world.config.facts_per_entity - len(own))
        triples = own + draw.sample(inverse, draw.randint(0, room))
        draw.shuffle(triples)
        return tuple(_material(part, *triple) for triple in triples if triple not in part.hidden)


class TinyWorld:
    name = "tiny_world"
    rule: Rule = "two_wiki"

    def __init__(self, config: TinyWorldConfig) -> None:
        self.config = config
        self.environment_kind: EnvironmentKind = config.environment
        self.graph = TinyGraph(self)
        self._sizes: dict[Part, int] = {
            "train": config.train_questions,
            "demonstration": config.demonstrations,
            "dev": config.dev_questions,
            "test": config.test_questions,
        }
        self._part = cache(lambda part, copy=0: WorldPart(part, config, self._sizes[part], copy))
        self._plans = cache(lambda part: draw_plans(self._part(part), config, self._sizes[part]))
        self._list = cache(self._written_out)
        self._passages = cache(self._searched_passages)

    def questions(self, split: Split) -> list[Question]:
        return self._list(split)

    def environment(self, question: Question) -> Environment:
        """The one graph, or the passages of the question's part."""
        if self.config.environment == "graph":
            return self.graph
        part, _, rest = question.id.removeprefix("tiny-").partition("-")
        return self._passages(cast(Part, part), int(rest.partition("-")[2] or 0))

    def demonstrations(self) -> Iterator[tuple[Question, Environment]]:
        """The originals, then copy after copy."""
        for copy in range(1 + self.config.augmented_copies):
            yield from (
                (question, self.environment(question))
                for question in self._list("demonstration", copy)
            )

    def _searched_passages(self, part: Part, copy: int) -> Environment:
        owner = self._part(part, copy)
        passages = [
            Passage(id=_key(owner, number), title=label, text=_passage_text(owner, number))
            for number, label in enumerate(owner.labels)
        ]
        return TextEnvironment(
            IndexRetriever(Bm25Index(passages, "default"), inline=True), self.config.top_k
        )

    def _written_out(self, part: Part, copy: int = 0) -> list[Question]:
        owner = self._part(part, copy)
        return [_question(owner, place, plan) for place, plan in enumerate(self._plans(part))]

    def locate(self, key: str) -> tuple[WorldPart, int] | None:
        """Part and number of the entity with this key."""
        if not (key.startswith("Q") and key[1:].isdecimal()):
            return None
        place, number = divmod(int(key[1:]), KEYS_PER_PART)
        copies = self.config.augmented_copies
        if not 1 <= place <= len(FIRST_KEY) + copies:
            return None
        parts = tuple(FIRST_KEY)
        part = parts[min(place, len(parts)) - 1]
        owner = self._part(part, max(0, place - len(parts)))
        return (owner, number) if number < len(owner.labels) else None

    def tokenizer_text(self) -> Iterator[str]:
        """Questions, names and triples of the two training-side parts; of the test part nothing is
        even generated."""
        years = " and ".join(str(year) for year in range(YEARS[0], YEARS[1] + 1))
        yield from itertools.repeat(years, YEAR_REPEATS)
        for part in ("demonstration", "train"):
            yield from (question.text for question in self._list(part)[:TOKENIZER_QUESTIONS])
            owner = self._part(part)
            for start in range(0, len(owner.labels), NAMES_PER_LINE):
                yield ", ".join(owner.labels[start : start + NAMES_PER_LINE])
            for number in random.Random(part).sample(range(len(owner.labels)), TOKENIZER_ENTITIES):
                yield from (material.text for material in self.graph.materials(_key(owner, number)))

    def pretraining_documents(self, seed: int) -> Iterator[str]:
        """Facts combined from the labels and values of the train part, see `pretraining_text.py`,
        and what is common knowledge."""
        owner = self._part("train")
        labels: dict[str, list[str]] = {}
        values: dict[str, dict[str, list[str]]] = {}
        for kind, label, facts in zip(owner.kinds, owner.labels, owner.facts, strict=True):
            labels.setdefault(kind, []).append(label)
            for relation, value in facts.items():
                seen = values.setdefault(kind, {}).setdefault(relation, [])
                seen.append(value if isinstance(value, str) else owner.labels[value])
        most = self.config.facts_per_entity
        vocabulary = Vocabulary(
            labels=labels, values=values, years=PRETRAINING_YEARS, max_facts=most
        )
        read = documents(vocabulary, seed)
        return self._with_known_facts(read, seed) if self.config.common_knowledge else read

    def _with_known_facts(self, read: Iterator[str], seed: int) -> Iterator[str]:
        """Facts that questions of known kinds ask about, in all splits, between the other
        documents: all facts about known entities would be ten times as many, each read too seldom
        to be remembered. A fact often follows a question that it answers or helps to answer: what
        was only ever stated is not recalled in an episode. About half of the sentences say
        "unknown" of a recombined name; a model that never read that answers everything, or nothing.
        """
        draw = random.Random(f"known {seed}")
        asked = itertools.chain.from_iterable(map(self._list, FIRST_KEY))
        asked_for = dict.fromkeys(
            fact for question in asked if question.is_known for fact in question.evidences
        )
        subjects: dict[str, list[str]] = {}
        for fact in asked_for:
            subjects.setdefault(fact.relation, []).append(fact.subject)
        stated = {(fact.relation, fact.subject): fact.object for fact in asked_for}
        if not stated:
            raise UserError(
                f"common_knowledge is {self.config.common_knowledge} and no question is about "
                "known entities alone: raise it or ask more questions, or set it to 0"
            )
        while True:
            if draw.random() < KNOWN_SHARE:
                some = draw.sample([*stated], min(len(stated), draw.randint(1, KNOWN_FACTS)))
                mixed = [
                    one if draw.random() < 0.5 else _other_name(draw, *one, subjects[one[0]])
                    for one in some
                ]
                before = [
                    "",
                    "What is the {}? ",
                    f"What is the {draw.choice([*subjects])} of the {{}}? ",
                ]
                said = [(f"{one[0]} of {one[1]}", stated.get(one, UNKNOWN)) for one in mixed]
                yield " ".join(
                    f"{draw.choice(before).format(of)}The {of} is {what}." for of, what in said
                )
            else:
                yield next(read)


def _other_name(
    draw: random.Random, relation: str, name: str, others: Sequence[str]
) -> tuple[str, str]:
    """The same relation of a name with another subject's last word. It may be one that is
    stated."""
    return relation, " ".join([*name.split()[:-1], draw.choice(others).split()[-1]])


def _question(part: WorldPart, place: int, plan: Plan) -> Question:
    template = plan.template
    evidences = _evidences(part, plan)
    topics = [part.labels[topic] for topic in plan.topics]
    wording = template.wordings[plan.wording]
    return Question(
        id=f"tiny-{part.part}-{place:06d}" + (f"-{part.copy}" if part.copy else ""),
        text=wording.format(**dict(zip("ab", topics, strict=False))),
        answers=(template.answer(topics, [_label(part, chain[-1]) for chain in plan.chains]),),
        candidates=tuple(_entity(part, topic) for topic in plan.topics),  # read by graphs alone
        gold_passages=_gold_passages(part, evidences),
        evidences=evidences,
        kind=template.kind + (KNOWN if plan.known and not part.copy else ""),
    )


def _gold_passages(part: WorldPart, evidences: Sequence[Evidence]) -> tuple[GoldPassage, ...]:
    """Of the subjects, in the order of the chain."""
    first = FIRST_KEY[part.part] + part.copy * KEYS_PER_PART
    numbers = {evidence.subject: int(evidence.subject_id[1:]) - first for evidence in evidences}
    return tuple(
        GoldPassage(title=title, text=_passage_text(part, number))
        for title, number in numbers.items()
    )


def _passage_text(part: WorldPart, number: int) -> str:
    """What the graph says of an entity, a sentence a fact."""
    sentences = [
        f"The {relation} of {part.labels[number]} is {_label(part, value)}."
        for relation, value in part.facts[number].items()
        if (number, relation) not in part.hidden
    ]
    return " ".join([f"{part.labels[number]} is a {part.kinds[number]}.", *sentences])


def _evidences(part: WorldPart, plan: Plan) -> tuple[Evidence, ...]:
    """Step after step, and within a step topic after topic."""
    paths = zip(plan.topics, plan.chains, strict=True)
    steps = zip(*(itertools.pairwise((topic, *chain)) for topic, chain in paths), strict=True)
    return tuple(
        Evidence(
            subject=_label(part, subject),
            relation=relation,
            object=_label(part, found),
            subject_id=_key(part, subject),
            object_id=_key(part, found),
        )
        for relation, pairs in zip(plan.template.path, steps, strict=True)
        for subject, found in pairs
    )


def _material(part: WorldPart, number: int, relation: str) -> Material:
    value = part.facts[number][relation]
    ends = (number, value) if isinstance(value, int) else (number,)
    return Material(
        text=f"{part.labels[number]}, {relation}, {_label(part, value)}",
        entities=tuple(_entity(part, end) for end in ends),
    )


def _entity(part: WorldPart, number: int) -> Entity:
    return Entity(id=_key(part, number), label=part.labels[number])


def _label(part: WorldPart, value: Value) -> str:
    return part.labels[value] if isinstance(value, int) else value


def _key(part: WorldPart, value: Value) -> str:
    """Empty for a literal."""
    return (
        f"Q{FIRST_KEY[part.part] + part.copy * KEYS_PER_PART + value}"
        if isinstance(value, int)
        else ""
    )
