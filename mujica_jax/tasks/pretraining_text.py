"""Generate pre-training documents, from which a decoder from scratch learns to read lists.

A language model without pre-training cannot copy a name or find a line in a list. Demonstrations
alone do not teach it: each shows one look-up among a hundred tokens, and a few hundred
demonstrations are memorised before they are understood.

There are two kinds of documents:

- Most documents list facts of one entity in the form of search results. Then they repeat the facts
  in another order, each with the number of its line. The loss is on every token, so the label that
  each line repeats teaches copying too. Facts are drawn anew for every document: any label of a
  kind with any value of a relation. So there is nothing to memorise, and every fact must be looked
  up.
- The other documents put years in order. Readers need to know no more about dates.

The documents contain no question, plan or answer. How to search is only learnt from demonstrations
and from MyGO.
"""

import dataclasses
import random
from collections.abc import Iterator, Mapping, Sequence

# The share of documents that put years in order.
YEARS_SHARE = 0.15
# The share of the other documents that also repeat a relation that they do not list.
ABSENT_SHARE = 0.3
# The share of lines in which the entity is the object.
REVERSED_SHARE = 0.2
# The maximum number of years in one document.
MAX_YEARS = 6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The names and values from which documents are made. None comes from dev or test."""

    # Labels of entities, by kind of entity.
    labels: Mapping[str, Sequence[str]]
    # Values of relations, by kind of entity and relation.
    values: Mapping[str, Mapping[str, Sequence[str]]]
    # The first and the last year that may occur.
    years: tuple[int, int]
    # The maximum number of facts that a document lists.
    max_facts: int


def documents(vocabulary: Vocabulary, seed: int) -> Iterator[str]:
    """Yield documents without end. A document is a list, a line break, and readings of it."""
    draw = random.Random(f"reading {seed}")
    kinds = sorted(kind for kind, relations in vocabulary.values.items() if relations)
    # Kinds with many relations give long lists, and long lists teach more.
    weights = [len(vocabulary.values[kind]) ** 2 for kind in kinds]
    while True:
        if draw.random() < YEARS_SHARE:
            yield _years(draw, vocabulary.years)
        else:
            kind = draw.choices(kinds, weights)[0]
            yield _materials(draw, kind, vocabulary)


def _years(draw: random.Random, years: tuple[int, int]) -> str:
    """Return a document that puts years in order."""
    first_year, last_year = years
    year_count = draw.randint(2, MAX_YEARS)
    drawn_years = draw.sample(range(first_year, last_year + 1), year_count)
    drawn_text = " and ".join(str(year) for year in drawn_years)
    ordered_text = " and ".join(str(year) for year in sorted(drawn_years))
    return f"Years: {drawn_text}\nin order: {ordered_text}."


def _materials(draw: random.Random, kind: str, vocabulary: Vocabulary) -> str:
    """Return a document that lists facts of an entity of this kind, and repeats them."""
    relations = sorted(vocabulary.values[kind])
    label = draw.choice(vocabulary.labels[kind])
    fact_count = min(len(relations), draw.randint(2, vocabulary.max_facts))
    listed_relations = draw.sample(relations, fact_count)

    # List the facts. In some lines the entity is the object. These lines are not repeated.
    # Each entry of `facts` is (relation, value, number of the line).
    facts: list[tuple[str, str, int]] = []
    lines = []
    for number, relation in enumerate(listed_relations):
        value = draw.choice(vocabulary.values[kind][relation])
        if draw.random() < REVERSED_SHARE:
            subject = draw.choice(vocabulary.labels[kind])
            lines.append(f"[{number}] {subject}, {relation} [{number}] {label}")
        else:
            lines.append(f"[{number}] {label}, {relation} [{number}] {value}")
            facts.append((relation, value, number))

    # Repeat the facts in another order, sometimes with a relation that no line has.
    draw.shuffle(facts)
    relations_of_facts = {relation for relation, _, _ in facts}
    absent_relations = [relation for relation in relations if relation not in relations_of_facts]
    if absent_relations and draw.random() < ABSENT_SHARE:
        position = draw.randint(0, len(facts))
        facts.insert(position, (draw.choice(absent_relations), "none", -1))
    readings = []
    for relation, value, number in facts:
        reading = f"{relation} [{number}] {value}"
        if draw.random() < 0.5:
            reading += f" The {relation} of {label} is {value}."
        readings.append(reading)

    # All facts are on one line. So each word has a space before it and is the same token as above.
    return "\n".join(["Materials:", *lines, f"Read: {'; '.join(readings)}"])
