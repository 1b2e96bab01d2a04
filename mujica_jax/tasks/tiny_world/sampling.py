"""Draw the questions of a part of the tiny world.

The kinds of questions have the same shares as in 2Wiki. No question is asked twice. Half of the
yes/no questions have the answer yes.
"""

import dataclasses
import random
from collections import defaultdict
from collections.abc import Sequence

from mujica_jax.config.schema import TinyWorldConfig
from mujica_jax.errors import UserError
from mujica_jax.tasks.tiny_world.facts import Value, WorldPart
from mujica_jax.tasks.tiny_world.questions import KIND_SHARES, TEMPLATES, Template

# Maximum number of draws until a question is accepted. For each question it is drawn beforehand
# whether it should be about common knowledge. In the first half of the draws it has to fit that.
ATTEMPTS = 500


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A question before its text is written."""

    template: Template
    # The numbers of the topic entities.
    topics: tuple[int, ...]
    # For each topic the values along the path of the template.
    chains: tuple[tuple[Value, ...], ...]
    # The position of the wording in the template.
    wording: int
    # Whether the pre-training text states every fact that leads to the answer.
    is_known: bool


def draw_plans(part: WorldPart, config: TinyWorldConfig, count: int) -> list[Plan]:
    """Return the first `count` questions of a part.

    With a larger `count` and the same part, the result begins with the same questions. Raises
    UserError if the part has too few questions of a kind.
    """
    # Each purpose has its own random generator, so that a change of one does not change the others.
    question_draw = random.Random(f"{config.seed} {part.part} questions")
    wording_draw = random.Random(f"{config.seed} {part.part} wordings")
    kind_draw = random.Random(f"{config.seed} {part.part} kinds")
    known_draw = random.Random(f"{config.seed} {part.part} known")

    pools: dict[str, list[_Pool]] = defaultdict(list)
    pool_sizes: dict[str, list[int]] = defaultdict(list)
    for pool in _pools(part, config.distractor_names):
        pools[pool.template.kind].append(pool)
        pool_sizes[pool.template.kind].append(len(pool.chains))

    kinds = kind_draw.choices([*KIND_SHARES], weights=[*KIND_SHARES.values()], k=count)
    # The template and the topics of each question.
    drawn_questions: set[tuple[str, frozenset[int]]] = set()
    plans = []
    for kind in kinds:
        should_be_known = known_draw.random() < config.common_knowledge
        for attempt in range(ATTEMPTS):
            pool = question_draw.choices(pools[kind], weights=pool_sizes[kind])[0]
            topics = pool.draw(question_draw)
            key = (pool.template.id, frozenset(topics))
            chains = tuple(pool.chains[topic] for topic in topics)
            is_known = part.knows(topics, chains)
            # If a kind has no more questions about common knowledge, accept other questions.
            is_fitting = is_known == should_be_known or attempt > ATTEMPTS // 2
            if topics and key not in drawn_questions and is_fitting:
                break
        else:
            raise UserError(
                f"the {part.part} part of the tiny world has too few {kind} questions: only "
                f"{len(plans)} of {count} questions can be made with task.facts_per_entity "
                f"{config.facts_per_entity}; ask for fewer questions, or raise "
                "task.facts_per_entity"
            )
        drawn_questions.add(key)
        plan = Plan(
            template=pool.template,
            topics=topics,
            chains=chains,
            wording=int(wording_draw.random() * config.paraphrases),
            is_known=is_known,
        )
        plans.append(plan)
    return plans


class _Pool:
    """The topics that fit a template, with their chains."""

    def __init__(
        self,
        part: WorldPart,
        template: Template,
        chains: dict[int, tuple[Value, ...]],
        name_sharing: float,
    ) -> None:
        """Take the topics of a template and their chains.

        `name_sharing` is the probability that two topics of a question share a word of their names.
        """
        self.template = template
        self.chains = chains
        self._topics = [*chains]
        self._name_sharing = name_sharing
        self._labels = part.labels
        self._topics_by_end: dict[Value, list[int]] = defaultdict(list)
        self._topics_by_word: dict[str, list[int]] = defaultdict(list)
        if template.topics == 2:
            for topic, chain in chains.items():
                self._topics_by_end[chain[-1]].append(topic)
                for word in _name_words(part.labels[topic]):
                    self._topics_by_word[word].append(topic)

    def draw(self, draw: random.Random) -> tuple[int, ...]:
        """Return the topics of one question, or an empty tuple if the two drawn topics do not fit."""
        first = draw.choice(self._topics)
        if self.template.topics == 1:
            return (first,)

        wants_equal_ends = self.template.rule == "same" and draw.random() < 0.5
        if wants_equal_ends:
            partners: Sequence[int] = self._topics_by_end[self.chains[first][-1]]
        elif draw.random() < self._name_sharing:
            shared_word = draw.choice(_name_words(self._labels[first]))
            partners = self._topics_by_word[shared_word]
        else:
            partners = self._topics
        second = draw.choice(partners)
        return (first, second) if self._is_pair(first, second, wants_equal_ends) else ()

    def _is_pair(self, first: int, second: int, wants_equal_ends: bool) -> bool:
        """Return whether two topics fit one question.

        They must be different topics with different bridge entities. The ends of their chains must
        be equal if `wants_equal_ends` is set, and different otherwise.
        """
        *first_bridges, first_end = self.chains[first]
        *second_bridges, second_end = self.chains[second]
        bridges = zip(first_bridges, second_bridges, strict=True)
        bridges_differ = all(
            first_bridge != second_bridge for first_bridge, second_bridge in bridges
        )
        ends_fit = (first_end == second_end) == wants_equal_ends
        return first != second and bridges_differ and ends_fit


def _pools(part: WorldPart, name_sharing: float) -> list[_Pool]:
    """Return a pool for each template that has at least one topic."""
    # The entities that have each relation.
    entities_with: dict[str, list[int]] = defaultdict(list)
    for number, facts in enumerate(part.facts):
        for relation in facts:
            entities_with[relation].append(number)

    pools = []
    for template in TEMPLATES:
        chains: dict[int, tuple[Value, ...]] = {}
        for topic in entities_with[template.path[0]]:
            chain = _follow(part, topic, template.path)
            if chain is not None:
                chains[topic] = chain
        if chains:
            pools.append(_Pool(part, template, chains, name_sharing))
    return pools


def _follow(part: WorldPart, topic: int, path: Sequence[str]) -> tuple[Value, ...] | None:
    """Return the values along a path of relations.

    The result is None if the part lacks a fact, or if a fact leads back to the topic.
    """
    values: list[Value] = []
    value: Value = topic
    for relation in path:
        # A literal has no facts.
        if not isinstance(value, int) or relation not in part.facts[value]:
            return None
        value = part.facts[value][relation]
        if value == topic:
            return None
        values.append(value)
    return tuple(values)


def _name_words(label: str) -> list[str]:
    """Return the words of a name that another name may share. The article of a title is left out."""
    return label.split()[-2:]
