"""The tiny world: a generated encyclopaedia with the question kinds of 2WikiMultihopQA.

It needs no download.

It has four parts without a common entity (`facts.py`): train, demonstrations, dev and test. Their
names share words and no full name (`names.py`). Each question is a template (`questions.py`) filled
with entities whose facts reach the end of its path (`sampling.py`), so its answer can be computed
again from its evidences. A part is generated when it is first asked for.
"""

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
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
# A renamed copy of the demonstrations has the keys of the copy before, plus this.
KEYS_PER_PART = 1_000_000
# The years in which facts of the world lie.
PRETRAINING_YEARS = (1850, 2015)
# These years, and the moved years of renamed copies.
YEARS = (1780, 2040)
# How often the tokenizer is shown all years, so that each becomes one token.
YEAR_REPEATS = 50
# How many questions of each training-side part the tokenizer is shown, and of how many entities the
# triples. It is shown the names of all entities.
TOKENIZER_QUESTIONS = 1000
TOKENIZER_ENTITIES = 300
NAMES_PER_LINE = 10
# The share of the pre-training documents that state common knowledge, where there is any.
KNOWN_SHARE = 0.7
# How many facts such a document states at most.
KNOWN_FACTS = 6


def build(config: TinyWorldConfig) -> "TinyWorld":
    """Return the world of a configuration. Raises UserError for a value outside LIMITS."""
    for field, (lower_limit, upper_limit) in LIMITS.items():
        value = getattr(config, field)
        if not lower_limit <= value <= upper_limit:
            raise UserError(
                f"the tiny world takes {field} from {lower_limit} to {upper_limit}, and the "
                f"configuration says {value}"
            )
    return TinyWorld(config)


class TinyGraph:
    """The encyclopaedia as a knowledge graph.

    A search returns the triples that name an entity, at most `facts_per_entity` of them.
    """

    kind: EnvironmentKind = "graph"

    def __init__(self, world: "TinyWorld") -> None:
        self._world = world
        self.statistics = RetrievalStatistics()

    async def search(self, query: str, entity: Entity | None) -> tuple[Material, ...]:
        """Return the triples of an entity, in an order that the query does not change.

        Choosing among them is the worker's part.
        """
        if entity is None:
            raise ValueError(
                "a graph search names the entity whose triples it wants, and this one names none"
            )
        self.statistics = self.statistics.with_more(queries=1)
        return self.materials(entity.id)

    def materials(self, key: str) -> tuple[Material, ...]:
        """Return an entity's triples and some that point at it, shuffled.

        There are at most `facts_per_entity` in all. An unknown key has none.
        """
        location = self._world.locate(key)
        if location is None:
            return ()
        part, number = location
        config = self._world.config
        draw = random.Random(f"{config.seed} {part.part} {part.copy} {number}")

        triples = [(number, relation) for relation in part.facts[number]]
        inverse_triples = part.inverse.get(number, [])
        max_inverse = min(len(inverse_triples), config.facts_per_entity - len(triples))
        inverse_count = draw.randint(0, max_inverse)
        triples += draw.sample(inverse_triples, inverse_count)
        draw.shuffle(triples)

        shown_triples = [triple for triple in triples if triple not in part.hidden]
        return tuple(_material(part, subject, relation) for subject, relation in shown_triples)


class TinyWorld:
    """Implements `Task` and `FromScratchTask`. A part is generated on first use."""

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
        # Each is generated once, on first use.
        self._part = cache(self._generate_part)
        self._plans = cache(self._draw_plans)
        self._part_questions = cache(self._write_questions)
        self._passages = cache(self._open_passages)

    def questions(self, split: Split) -> list[Question]:
        """Return the questions of a split."""
        return self._part_questions(split, 0)

    def environment(self, question: Question) -> Environment:
        """Return the one graph, or the passages of the question's part."""
        if self.config.environment == "graph":
            return self.graph
        # An id is "tiny-PART-NUMBER", and of a renamed copy "tiny-PART-NUMBER-COPY".
        part, _, number_and_copy = question.id.removeprefix("tiny-").partition("-")
        _, _, copy = number_and_copy.partition("-")
        return self._passages(cast(Part, part), int(copy or 0))

    def demonstrations(self) -> Iterator[tuple[Question, Environment]]:
        """Yield the original demonstrations, then copy after copy, each with its environment."""
        for copy in range(1 + self.config.augmented_copies):
            for question in self._part_questions("demonstration", copy):
                yield question, self.environment(question)

    def _generate_part(self, part: Part, copy: int) -> WorldPart:
        return WorldPart(part, self.config, questions=self._sizes[part], copy=copy)

    def _draw_plans(self, part: Part) -> list[Plan]:
        return draw_plans(self._part(part, 0), self.config, count=self._sizes[part])

    def _write_questions(self, part: Part, copy: int) -> list[Question]:
        world_part = self._part(part, copy)
        plans = self._plans(part)
        return [_question(world_part, number, plan) for number, plan in enumerate(plans)]

    def _open_passages(self, part: Part, copy: int) -> Environment:
        world_part = self._part(part, copy)
        passages = [
            Passage(
                id=_key(world_part, number), title=label, text=_passage_text(world_part, number)
            )
            for number, label in enumerate(world_part.labels)
        ]
        retriever = IndexRetriever(Bm25Index(passages, "default"), inline=True)
        return TextEnvironment(retriever, self.config.top_k)

    def locate(self, key: str) -> tuple[WorldPart, int] | None:
        """Return part and number of the entity with this key. None: there is no such entity."""
        if not (key.startswith("Q") and key[1:].isdecimal()):
            return None

        # Blocks of keys are counted from 1: one for each part, then one for each renamed copy of
        # the last part, the demonstrations.
        block, number = divmod(int(key[1:]), KEYS_PER_PART)
        parts = tuple(FIRST_KEY)
        if not 1 <= block <= len(parts) + self.config.augmented_copies:
            return None
        if block <= len(parts):
            world_part = self._part(parts[block - 1], 0)
        else:
            world_part = self._part(parts[-1], block - len(parts))
        return (world_part, number) if number < len(world_part.labels) else None

    def tokenizer_text(self) -> Iterator[str]:
        """Yield questions, names and triples of the two training-side parts.

        The test part is not even generated.
        """
        years = " and ".join(str(year) for year in range(YEARS[0], YEARS[1] + 1))
        yield from itertools.repeat(years, YEAR_REPEATS)
        for part in ("demonstration", "train"):
            for question in self._part_questions(part, 0)[:TOKENIZER_QUESTIONS]:
                yield question.text
            world_part = self._part(part, 0)
            labels = world_part.labels
            for start in range(0, len(labels), NAMES_PER_LINE):
                yield ", ".join(labels[start : start + NAMES_PER_LINE])
            draw = random.Random(part)
            for number in draw.sample(range(len(labels)), TOKENIZER_ENTITIES):
                for material in self.graph.materials(_key(world_part, number)):
                    yield material.text

    def pretraining_documents(self, seed: int) -> Iterator[str]:
        """Return endless documents, made of the labels and values of the train part.

        `pretraining_text.py` says how. Where the configuration asks for common knowledge, other
        documents between them state it.
        """
        world_part = self._part("train", 0)
        labels: dict[str, list[str]] = {}
        values: dict[str, dict[str, list[str]]] = {}
        entities = zip(world_part.kinds, world_part.labels, world_part.facts, strict=True)
        for kind, label, facts in entities:
            labels.setdefault(kind, []).append(label)
            for relation, value in facts.items():
                relation_values = values.setdefault(kind, {}).setdefault(relation, [])
                relation_values.append(_label(world_part, value))
        vocabulary = Vocabulary(
            labels=labels,
            values=values,
            years=PRETRAINING_YEARS,
            max_facts=self.config.facts_per_entity,
        )
        other_documents = documents(vocabulary, seed)
        if not self.config.common_knowledge:
            return other_documents
        return self._with_known_facts(other_documents, seed)

    def _with_known_facts(self, other_documents: Iterator[str], seed: int) -> Iterator[str]:
        """Yield documents that state common knowledge, between the other documents.

        They state the facts that questions of known kinds ask about, in all splits. All facts about
        known entities would be ten times as many, each read too seldom to be remembered.

        A fact often follows a question that it answers or helps to answer, because a fact that was
        only ever stated is not recalled in an episode. About half of the sentences say "unknown" of
        a recombined name. A model that never read that answers everything, or nothing.
        """
        facts: dict[Evidence, None] = {}
        for part in FIRST_KEY:
            for question in self._part_questions(part, 0):
                if question.is_known:
                    facts |= dict.fromkeys(question.evidences)
        objects: dict[tuple[str, str], str] = {}  # (relation, subject) -> object
        subjects: dict[str, list[str]] = {}  # relation -> subjects
        for fact in facts:
            objects[fact.relation, fact.subject] = fact.object
            subjects.setdefault(fact.relation, []).append(fact.subject)
        if not objects:
            raise UserError(
                f"common_knowledge is {self.config.common_knowledge} and no question is about "
                "known entities alone: raise it or ask more questions, or set it to 0"
            )

        draw = random.Random(f"known {seed}")
        while True:
            if draw.random() < KNOWN_SHARE:
                yield _known_facts_document(draw, objects, subjects)
            else:
                yield next(other_documents)


def _known_facts_document(
    draw: random.Random,
    objects: Mapping[tuple[str, str], str],
    subjects: Mapping[str, Sequence[str]],
) -> str:
    """Return a document of some facts, as `TinyWorld._with_known_facts` describes it."""
    fact_count = min(len(objects), draw.randint(1, KNOWN_FACTS))
    stated_facts: list[tuple[str, str]] = []  # (relation, subject)
    for relation, subject in draw.sample([*objects], fact_count):
        if draw.random() < 0.5:
            stated_facts.append((relation, subject))
        else:
            recombined_name = _recombined_name(draw, subject, subjects[relation])
            stated_facts.append((relation, recombined_name))

    questions_before = [
        "",
        "What is the {}? ",
        f"What is the {draw.choice([*subjects])} of the {{}}? ",
    ]
    sentences = []
    for relation, subject in stated_facts:
        phrase = f"{relation} of {subject}"
        question = draw.choice(questions_before).format(phrase)
        sentences.append(f"{question}The {phrase} is {objects.get((relation, subject), UNKNOWN)}.")
    return " ".join(sentences)


def _recombined_name(draw: random.Random, name: str, other_names: Sequence[str]) -> str:
    """Return the name with the last word of another one. A subject may have this name."""
    *first_words, _ = name.split()
    last_word = draw.choice(other_names).split()[-1]
    return " ".join([*first_words, last_word])


def _question(part: WorldPart, number: int, plan: Plan) -> Question:
    """Write a question out."""
    template = plan.template
    id = f"tiny-{part.part}-{number:06d}"
    if part.copy:
        id += f"-{part.copy}"
    kind = template.kind
    if plan.is_known and not part.copy:
        kind += KNOWN

    topics = [part.labels[topic] for topic in plan.topics]
    ends = [_label(part, chain[-1]) for chain in plan.chains]
    topic_of_letter = dict(zip("ab", topics, strict=False))
    evidences = _evidences(part, plan)
    return Question(
        id=id,
        text=template.wordings[plan.wording].format_map(topic_of_letter),
        answers=(template.answer(topics, ends),),
        # Only graphs read the candidates.
        candidates=tuple(_entity(part, topic) for topic in plan.topics),
        gold_passages=_gold_passages(part, evidences),
        evidences=evidences,
        kind=kind,
    )


def _gold_passages(part: WorldPart, evidences: Sequence[Evidence]) -> tuple[GoldPassage, ...]:
    """Return the passages of the evidences' subjects, in the order of the chain."""
    first_key = FIRST_KEY[part.part] + part.copy * KEYS_PER_PART
    numbers = {evidence.subject: int(evidence.subject_id[1:]) - first_key for evidence in evidences}
    return tuple(
        GoldPassage(title=title, text=_passage_text(part, number))
        for title, number in numbers.items()
    )


def _passage_text(part: WorldPart, number: int) -> str:
    """Return what the graph says of an entity, one sentence a fact."""
    sentences = [f"{part.labels[number]} is a {part.kinds[number]}."]
    for relation, value in part.facts[number].items():
        if (number, relation) not in part.hidden:
            sentences.append(f"The {relation} of {part.labels[number]} is {_label(part, value)}.")
    return " ".join(sentences)


def _evidences(part: WorldPart, plan: Plan) -> tuple[Evidence, ...]:
    """Return the evidences step by step, and within a step topic by topic."""
    evidences = []
    for step, relation in enumerate(plan.template.path):
        for topic, chain in zip(plan.topics, plan.chains, strict=True):
            subject = topic if step == 0 else chain[step - 1]
            value = chain[step]
            evidence = Evidence(
                subject=_label(part, subject),
                relation=relation,
                object=_label(part, value),
                subject_id=_key(part, subject),
                object_id=_key(part, value),
            )
            evidences.append(evidence)
    return tuple(evidences)


def _material(part: WorldPart, number: int, relation: str) -> Material:
    """Return a triple as a search shows it."""
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
    """Return the key of an entity. A literal has an empty one."""
    if not isinstance(value, int):
        return ""
    return f"Q{FIRST_KEY[part.part] + part.copy * KEYS_PER_PART + value}"
