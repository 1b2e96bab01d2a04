"""Pre-training documents: what a from-scratch decoder learns to read on, in place of the web.

A language model that has read nothing cannot copy a name or find a line in a list. A demonstration
shows it one look-up among a hundred tokens, and a few hundred demonstrations are learnt by heart
before they are understood.

A document here lists some facts of one entity, as materials look, and reads them off again in
another order, each with the number of its line. The loss is on all of it, as in pre-training: a
label that every line repeats is a lesson in copying too. Facts are drawn again for every document,
any label of a kind with any value of a relation. So there is nothing to remember and all to look
up. Other documents put years in order, which is all that a reader needs to know about dates.

They have no question, plan or answer. How to search is learnt from demonstrations and from MyGO
alone.
"""

import dataclasses
import random
from collections.abc import Iterator, Mapping, Sequence

# The share of the documents that put years in order.
YEARS_SHARE = 0.15
# The share of the other documents that read a relation which they do not list.
ABSENT_SHARE = 0.3
# The share of the lines that name the entity as their object.
REVERSED_SHARE = 0.2
MAX_YEARS = 6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The material of documents, from the training side of a task."""

    # Labels of entities by kind.
    labels: Mapping[str, Sequence[str]]
    # Objects by kind of entity and relation.
    values: Mapping[str, Mapping[str, Sequence[str]]]
    # First and last year.
    years: tuple[int, int]
    # How many lines a document lists at most.
    max_facts: int


def documents(vocabulary: Vocabulary, seed: int) -> Iterator[str]:
    """Yield endless documents: a list, a line break, and what is read off the list."""
    draw = random.Random(f"reading {seed}")
    kinds = sorted(kind for kind, relations in vocabulary.values.items() if relations)
    # Kinds with many relations make long lists, and long lists are what there is to learn from.
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
    """Return a document that lists facts of an entity of this kind, and reads them off."""
    relations = sorted(vocabulary.values[kind])
    label = draw.choice(vocabulary.labels[kind])
    fact_count = min(len(relations), draw.randint(2, vocabulary.max_facts))
    listed_relations = draw.sample(relations, fact_count)

    # List the facts. In some lines the entity is the object, and such lines are not read off.
    facts: list[tuple[str, str, int]] = []  # relation, value and number of the line
    lines = []
    for number, relation in enumerate(listed_relations):
        value = draw.choice(vocabulary.values[kind][relation])
        if draw.random() < REVERSED_SHARE:
            subject = draw.choice(vocabulary.labels[kind])
            lines.append(f"[{number}] {subject}, {relation} [{number}] {label}")
        else:
            lines.append(f"[{number}] {label}, {relation} [{number}] {value}")
            facts.append((relation, value, number))

    # Read them off in another order, sometimes with a relation that no line has.
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

    # They stand on one line. So a word is the same token here and above, with a space before it.
    return "\n".join(["Materials:", *lines, f"Read: {'; '.join(readings)}"])
