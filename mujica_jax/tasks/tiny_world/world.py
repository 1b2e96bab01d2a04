"""The tiny world: a generated encyclopaedia with the question kinds of 2WikiMultihopQA.

It needs no download.

The world has four parts: train, demonstrations, dev and test. No entity is in two parts
(`facts.py`). Names of different parts have words in common, but no full name is in two parts
(`names.py`). A question is a template (`questions.py`) whose topics have all facts along its path
(`sampling.py`). So its answer can be computed from its evidences. A part is generated on first use.
"""

import dataclasses
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property
from typing import cast

from mujica_jax.config.schema import TinyWorldConfig
from mujica_jax.errors import UserError
from mujica_jax.metrics import Rule
from mujica_jax.records import KNOWN, UNKNOWN, Entity, Evidence, GoldPassage, Question
from mujica_jax.retrieval.reranker import Reranker
from mujica_jax.retrieval.retriever import IndexRetriever
from mujica_jax.retrieval.statistics import RetrievalStatistics
from mujica_jax.retrieval.text.bm25 import Bm25Index
from mujica_jax.retrieval.text.corpus import Passage
from mujica_jax.tasks.asked import AskedQuestion, GraphSearch, over_graph
from mujica_jax.tasks.environment import TextEnvironment
from mujica_jax.tasks.named_entities import NameTable
from mujica_jax.tasks.passages import reranker_of
from mujica_jax.tasks.pretraining_text import Vocabulary, documents
from mujica_jax.tasks.task import Environment, EnvironmentKind, Material, Split
from mujica_jax.tasks.tiny_world.facts import Value, WorldPart
from mujica_jax.tasks.tiny_world.names import Part
from mujica_jax.tasks.tiny_world.questions import MAX_PARAPHRASES
from mujica_jax.tasks.tiny_world.sampling import Plan, draw_plans

# The lowest and the highest allowed value of each field. For `facts_per_entity` they are 4 and 13,
# because a city has 4 facts and a person has at most 13.
LIMITS = {
    "train_questions": (1, 100_000),
    "demonstrations": (1, 100_000),
    "dev_questions": (1, 100_000),
    "test_questions": (1, 100_000),
    "augmented_copies": (0, 100),
    "top_k": (1, 100),
    "facts_per_entity": (4, 13),
    "distractor_names": (0.0, 1.0),
    "missing_facts": (0.0, 1.0),
    "common_knowledge": (0.0, 1.0),
    "paraphrases": (1, MAX_PARAPHRASES),
}
# Keys of entities look like Q-ids of Wikidata. This is the number in the first key of each part.
FIRST_KEY: dict[Part, int] = {
    "train": 1_000_000,
    "dev": 2_000_000,
    "test": 3_000_000,
    "demonstration": 4_000_000,
}
# The number of keys of a part. A renamed copy has the keys of the copy before plus this number.
KEYS_PER_PART = 1_000_000
# First and last year in pre-training documents.
PRETRAINING_YEARS = (1850, 2015)
# First and last year of all facts, including the moved years of renamed copies.
YEARS = (1780, 2040)
# The tokenizer text has all years this many times, so that each year becomes one token.
YEAR_REPEATS = 50
# The tokenizer text has this many questions of each training-side part, and the triples of this
# many entities. It has the names of all entities.
TOKENIZER_QUESTIONS = 1000
TOKENIZER_ENTITIES = 300
NAMES_PER_LINE = 10
# The share of pre-training documents that state common knowledge, if questions ask for it.
KNOWN_SHARE = 0.7
# The maximum number of facts that such a document states.
KNOWN_FACTS = 6


def build(config: TinyWorldConfig) -> "TinyWorld":
    """Return the world of a configuration. Raises UserError for a value outside LIMITS."""
    for field, (lower_limit, upper_limit) in LIMITS.items():
        value = getattr(config, field)
        if not lower_limit <= value <= upper_limit:
            raise UserError(
                f"task.{field} is {value} and must be from {lower_limit} to {upper_limit} for the "
                "tiny world"
            )
    return TinyWorld(config)


class TinyGraph:
    """An environment that searches the encyclopaedia as a knowledge graph.

    A search returns at most `facts_per_entity` triples of an entity.
    """

    kind: EnvironmentKind = "graph"

    def __init__(self, world: "TinyWorld") -> None:
        self._world = world
        self.statistics = RetrievalStatistics()

    async def search(self, query: str, entity: Entity | None) -> tuple[Material, ...]:
        """Return the triples of an entity. The query has no influence on them or their order.

        The worker has to choose among the triples. Raises ValueError without an entity.
        """
        if entity is None:
            raise ValueError("the search names no entity, but a graph is searched by entity")
        self.statistics = self.statistics.with_more(queries=1)
        return self.materials(entity.id)

    def materials(self, key: str) -> tuple[Material, ...]:
        """Return the triples of an entity and some triples that point at it, shuffled.

        There are at most `facts_per_entity` triples. The result is empty for an unknown key.
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
    """The task of the tiny world. It implements `Task` and `FromScratchTask`.

    A part is generated on first use.
    """

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
        # Each result is computed once, on first use.
        self._part = cache(self._generate_part)
        self._plans = cache(self._draw_plans)
        self._part_questions = cache(self._write_questions)
        self._passages = cache(self._open_passages)
        self._names = cache(self._collect_names)

    def questions(self, split: Split) -> list[Question]:
        """Return the questions of a split."""
        return self._part_questions(split, 0)

    def environment(self, question: Question) -> Environment:
        """Return the environment of this question: the graph, or the passages of its part."""
        if self.config.environment == "graph":
            return self.graph
        # The id of a question is "tiny-PART-NUMBER". In a renamed copy it is
        # "tiny-PART-NUMBER-COPY".
        part, _, number_and_copy = question.id.removeprefix("tiny-").partition("-")
        _, _, copy = number_and_copy.partition("-")
        return self._passages((cast(Part, part),), int(copy or 0))

    async def asked(self, text: str) -> AskedQuestion:
        """Return a user's question as a question of this world.

        Over passages, the passages of the parts are searched whose entities the question names.
        Raises UserError if it names no entity.
        """
        search = GraphSearch(environment=self.graph, names=self._names())
        asked = await over_graph(text, search)
        if self.config.environment == "graph":
            return asked
        parts = tuple(dict.fromkeys(self._part_of(entity) for entity in asked.question.candidates))
        return dataclasses.replace(asked, environment=self._passages(parts, 0))

    def demonstrations(self) -> Iterator[tuple[Question, Environment]]:
        """Yield the original demonstrations, then each copy of them, with their environments."""
        for copy in range(1 + self.config.augmented_copies):
            for question in self._part_questions("demonstration", copy):
                yield question, self.environment(question)

    def _generate_part(self, part: Part, copy: int) -> WorldPart:
        """Generate a part of the world, or a renamed copy of it."""
        return WorldPart(part, self.config, questions=self._sizes[part], copy=copy)

    def _draw_plans(self, part: Part) -> list[Plan]:
        """Draw the questions of a part."""
        return draw_plans(self._part(part, 0), self.config, count=self._sizes[part])

    def _write_questions(self, part: Part, copy: int) -> list[Question]:
        """Return the questions of a part, or of a renamed copy of it."""
        world_part = self._part(part, copy)
        plans = self._plans(part)
        return [_question(world_part, number, plan) for number, plan in enumerate(plans)]

    def _open_passages(self, parts: tuple[Part, ...], copy: int) -> Environment:
        """Return an environment that searches the passages of parts, one for each entity."""
        passages: list[Passage] = []
        for part in parts:
            world_part = self._part(part, copy)
            for number, label in enumerate(world_part.labels):
                text = _passage_text(world_part, number)
                passages.append(Passage(id=_key(world_part, number), title=label, text=text))
        retriever = IndexRetriever(
            Bm25Index(passages, "default"), inline=True, reranker=self._reranker
        )
        return TextEnvironment(retriever, self.config.top_k)

    @cached_property
    def _reranker(self) -> Reranker | None:
        """The reranker of all parts."""
        return reranker_of(self.config)

    def _collect_names(self) -> NameTable:
        """Return the names of all entities, without those of renamed copies."""
        names = NameTable()
        for part in FIRST_KEY:
            world_part = self._part(part, 0)
            for number, label in enumerate(world_part.labels):
                entity = _entity(world_part, number)
                names.add(label, entity)
                # A question may also name an entity by its key.
                names.add(entity.id, entity)
        return names

    def _part_of(self, entity: Entity) -> Part:
        """Return the part of the world that an entity is in."""
        location = self.locate(entity.id)
        assert location is not None, "the entity comes from a part of this world"
        return location[0].part

    def locate(self, key: str) -> tuple[WorldPart, int] | None:
        """Return the part and the number of the entity with this key, or None for other keys."""
        if not (key.startswith("Q") and key[1:].isdecimal()):
            return None

        # Keys are in blocks that are numbered from 1. There is one block for each part, then one
        # for each renamed copy of the last part, the demonstrations.
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
        """Yield questions, names and triples of the parts `demonstration` and `train`.

        Dev and test are not even generated for it.
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
        """Return documents from the labels and values of the train part, without end.

        `pretraining_text.py` describes them. If `common_knowledge` is above 0, further documents
        between them state common knowledge.
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
        """Yield documents that state common knowledge, mixed with the other documents.

        They state the facts that questions about common knowledge ask for, in all splits. All facts
        about known entities would be ten times as many. Then a model would read each fact too
        rarely to remember it.

        A fact often follows a question that it answers or helps to answer. A fact that is only
        stated is not recalled in an episode. About half of the sentences are about a recombined
        name and say "unknown". Without them a model learns to answer everything, or nothing.
        """
        facts: dict[Evidence, None] = {}
        for part in FIRST_KEY:
            for question in self._part_questions(part, 0):
                if question.is_known:
                    facts |= dict.fromkeys(question.evidences)
        # The object of each (relation, subject), and the subjects of each relation.
        objects: dict[tuple[str, str], str] = {}
        subjects: dict[str, list[str]] = {}
        for fact in facts:
            objects[fact.relation, fact.subject] = fact.object
            subjects.setdefault(fact.relation, []).append(fact.subject)
        if not objects:
            raise UserError(
                f"task.common_knowledge is {self.config.common_knowledge}, but no question is "
                "about common knowledge alone: raise task.common_knowledge or the numbers of "
                "questions, or set task.common_knowledge to 0"
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
    """Return a document that states some facts, as `TinyWorld._with_known_facts` describes.

    `objects` holds the object of each (relation, subject), and `subjects` the subjects of each
    relation.
    """
    fact_count = min(len(objects), draw.randint(1, KNOWN_FACTS))
    # Each entry is (relation, subject).
    stated_facts: list[tuple[str, str]] = []
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
    """Return a name whose last word is replaced by the last word of another name.

    It can happen to be the name of a subject.
    """
    *first_words, _ = name.split()
    last_word = draw.choice(other_names).split()[-1]
    return " ".join([*first_words, last_word])


def _question(part: WorldPart, number: int, plan: Plan) -> Question:
    """Return the question of a plan."""
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
        # The candidates are only used with graphs.
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
    """Return the passage about an entity, with one sentence for each fact in the graph."""
    sentences = [f"{part.labels[number]} is a {part.kinds[number]}."]
    for relation, value in part.facts[number].items():
        if (number, relation) not in part.hidden:
            sentences.append(f"The {relation} of {part.labels[number]} is {_label(part, value)}.")
    return " ".join(sentences)


def _evidences(part: WorldPart, plan: Plan) -> tuple[Evidence, ...]:
    """Return the evidences of a plan: step by step, and within a step topic by topic."""
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
    """Return a triple as a search result."""
    value = part.facts[number][relation]
    ends = (number, value) if isinstance(value, int) else (number,)
    return Material(
        text=f"{part.labels[number]}, {relation}, {_label(part, value)}",
        entities=tuple(_entity(part, end) for end in ends),
    )


def _entity(part: WorldPart, number: int) -> Entity:
    """Return an entity of a part with its key and label."""
    return Entity(id=_key(part, number), label=part.labels[number])


def _label(part: WorldPart, value: Value) -> str:
    """Return the label of an entity. A literal is its own label."""
    return part.labels[value] if isinstance(value, int) else value


def _key(part: WorldPart, value: Value) -> str:
    """Return the key of an entity. The key of a literal is empty."""
    if not isinstance(value, int):
        return ""
    return f"Q{FIRST_KEY[part.part] + part.copy * KEYS_PER_PART + value}"
