"""Which questions a part of the tiny world asks: kinds in 2Wiki's shares, none twice, half of
yes/no are yes."""

import dataclasses
import random
from collections import defaultdict
from collections.abc import Sequence

from mujica_jax.config.schema import TinyWorldConfig
from mujica_jax.errors import UserError
from mujica_jax.tasks.tiny_world.facts import Value, WorldPart
from mujica_jax.tasks.tiny_world.questions import KIND_SHARES, TEMPLATES, Template

# draws in a row that were asked before, in the first half also known and not wanted or the reverse
ATTEMPTS = 500


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A question before it is written out. `chains` holds, for every topic, the values along the
    template's path."""

    template: Template
    topics: tuple[int, ...]
    chains: tuple[tuple[Value, ...], ...]
    wording: int
    known: bool  # every fact that leads to the answer stands in the pre-training text


def draw_plans(part: WorldPart, config: TinyWorldConfig, count: int) -> list[Plan]:
    """The first `count` questions of a part; fewer of them are always a beginning of more, as long
    as the part is the same.

    Raises UserError when the part holds fewer questions of some kind.
    """
    draw = random.Random(f"{config.seed} {part.part} questions")
    words = random.Random(f"{config.seed} {part.part} wordings")
    pools: dict[str, list[_Pool]] = defaultdict(list)
    for pool in _pools(part, config.distractor_names):
        pools[pool.template.kind].append(pool)
    weights = {kind: [len(pool.chains) for pool in members] for kind, members in pools.items()}
    drawn = random.Random(f"{config.seed} {part.part} kinds")
    kinds = drawn.choices([*KIND_SHARES], weights=[*KIND_SHARES.values()], k=count)
    coin = random.Random(f"{config.seed} {part.part} known")
    asked: set[tuple[str, frozenset[int]]] = set()
    plans = []
    for kind in kinds:
        wanted = coin.random() < config.common_knowledge
        for attempt in range(ATTEMPTS):
            pool = draw.choices(pools[kind], weights=weights[kind])[0]
            topics = pool.draw(draw)
            key = (pool.template.id, frozenset(topics))
            chains = tuple(pool.chains[topic] for topic in topics)
            known = part.knows(topics, chains)
            # Where a kind runs out of known questions, others take their place.
            if topics and key not in asked and (known == wanted or attempt > ATTEMPTS // 2):
                break
        else:
            raise UserError(
                f"the tiny world ran out of {kind} questions after {len(plans)} of {count} for its "
                f"{part.part} part at facts_per_entity={config.facts_per_entity}; ask for fewer "
                "questions or more facts"
            )
        asked.add(key)
        wording = int(words.random() * config.paraphrases)
        plans.append(
            Plan(template=pool.template, topics=topics, chains=chains, wording=wording, known=known)
        )
    return plans


class _Pool:
    """Topics that a template can be asked about."""

    def __init__(
        self,
        part: WorldPart,
        template: Template,
        chains: dict[int, tuple[Value, ...]],
        share: float,
    ) -> None:
        self.template = template
        self.chains = chains
        self._topics = [*chains]
        self._sharing = share
        self._labels = part.labels
        self._by_end: dict[Value, list[int]] = defaultdict(list)
        self._by_word: dict[str, list[int]] = defaultdict(list)
        if template.topics == 2:
            for topic, chain in chains.items():
                self._by_end[chain[-1]].append(topic)
                for word in _name_words(part.labels[topic]):
                    self._by_word[word].append(topic)

    def draw(self, draw: random.Random) -> tuple[int, ...]:
        """Topics for one question; empty when the first one found no partner."""
        first = draw.choice(self._topics)
        if self.template.topics == 1:
            return (first,)
        want_equal = self.template.rule == "same" and draw.random() < 0.5
        if want_equal:
            partners: Sequence[int] = self._by_end[self.chains[first][-1]]
        elif draw.random() < self._sharing:
            partners = self._by_word[draw.choice(_name_words(self._labels[first]))]
        else:
            partners = self._topics
        second = draw.choice(partners)
        return (first, second) if self._is_pair(first, second, want_equal) else ()

    def _is_pair(self, first: int, second: int, want_equal: bool) -> bool:
        """Two topics with two bridges, whose ends are equal only where the answer is to be yes."""
        one, other = self.chains[first], self.chains[second]
        bridges_differ = all(a != b for a, b in zip(one[:-1], other[:-1], strict=True))
        return first != second and bridges_differ and (one[-1] == other[-1]) == want_equal


def _pools(part: WorldPart, sharing: float) -> list[_Pool]:
    """One pool a template that has topics."""
    holders: dict[str, list[int]] = defaultdict(list)
    for number, facts in enumerate(part.facts):
        for relation in facts:
            holders[relation].append(number)
    pools = []
    for template in TEMPLATES:
        chains = {
            topic: chain
            for topic in holders[template.path[0]]
            if (chain := _follow(part, topic, template.path))
        }
        if chains:
            pools.append(_Pool(part, template, chains, sharing))
    return pools


def _follow(part: WorldPart, topic: int, path: Sequence[str]) -> tuple[Value, ...] | None:
    """The values along the path, or None where a fact is unknown or leads back to the topic."""
    values: list[Value] = []
    here: Value = topic
    for relation in path:
        here = part.facts[here].get(relation, topic) if isinstance(here, int) else topic
        if here == topic:
            return None
        values.append(here)
    return tuple(values)


def _name_words(label: str) -> list[str]:
    """The words of a name that another may share, without the article of a title."""
    return label.split()[-2:]
