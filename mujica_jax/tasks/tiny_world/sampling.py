"""Draw the questions that a part of the tiny world asks.

Their kinds have the shares of 2Wiki, and no question is asked twice. Half of the answers to yes/no
questions are yes.
"""

import dataclasses
import random
from collections import defaultdict
from collections.abc import Sequence

from mujica_jax.config.schema import TinyWorldConfig
from mujica_jax.errors import UserError
from mujica_jax.tasks.tiny_world.facts import Value, WorldPart
from mujica_jax.tasks.tiny_world.questions import KIND_SHARES, TEMPLATES, Template

# How often a question is drawn until one is accepted. In the first half of the attempts it must
# also be about known entities, or about others, as was drawn before.
ATTEMPTS = 500


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A question before it is written out.

    `chains` has the values along the template's path, for each topic. `is_known` says that every
    fact that leads to the answer stands in the pre-training text.
    """

    template: Template
    topics: tuple[int, ...]
    chains: tuple[tuple[Value, ...], ...]
    wording: int
    is_known: bool


def draw_plans(part: WorldPart, config: TinyWorldConfig, count: int) -> list[Plan]:
    """Return the first `count` questions of a part.

    Fewer of them are always a beginning of more, as long as the part is the same. Raises UserError
    when the part holds fewer questions of some kind.
    """
    # Each purpose draws from a stream of its own, so that a change of one leaves the others alone.
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
    drawn_questions: set[tuple[str, frozenset[int]]] = set()  # template and topics
    plans = []
    for kind in kinds:
        should_be_known = known_draw.random() < config.common_knowledge
        for attempt in range(ATTEMPTS):
            pool = question_draw.choices(pools[kind], weights=pool_sizes[kind])[0]
            topics = pool.draw(question_draw)
            key = (pool.template.id, frozenset(topics))
            chains = tuple(pool.chains[topic] for topic in topics)
            is_known = part.knows(topics, chains)
            # Where a kind runs out of known questions, others take their place.
            is_fitting = is_known == should_be_known or attempt > ATTEMPTS // 2
            if topics and key not in drawn_questions and is_fitting:
                break
        else:
            raise UserError(
                f"the tiny world ran out of {kind} questions after {len(plans)} of {count} for its "
                f"{part.part} part at facts_per_entity={config.facts_per_entity}; ask for fewer "
                "questions or more facts"
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
    """The topics that a template can be asked about, with their chains."""

    def __init__(
        self,
        part: WorldPart,
        template: Template,
        chains: dict[int, tuple[Value, ...]],
        name_sharing: float,
    ) -> None:
        """`name_sharing` is how often two topics of a question share a word of their names."""
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
        """Return the topics of one question, or none where the two that were drawn do not fit."""
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
        """Return whether these are two topics with different bridges.

        Their ends must be equal where the answer is to be yes, and different everywhere else.
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
    """Return one pool for each template that has topics."""
    entities_with: dict[str, list[int]] = defaultdict(list)  # by relation
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
    """Return the values along the path.

    The result is None where the part lacks a fact, or a fact leads back to the topic.
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
    """Return the words of a name that another may share, without the article of a title."""
    return label.split()[-2:]
