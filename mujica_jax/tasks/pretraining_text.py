"""Pre-training documents: what a from-scratch decoder learns to read on, in place of the web.

A language model that has read nothing copies no name and finds no line in a list; a demonstration
shows it one look-up among a hundred tokens, and a few hundred demonstrations are learnt by heart
before they are understood. A document here lists some facts of one entity, as materials look, and
reads them off again in another order, each with the number of its line. All of it is trained, as a
text is in pre-training: a label that every line repeats is a lesson in copying too. Facts are drawn
again for every document (any label of a kind with any value of a relation), so that there is
nothing to remember and all to look up. Other documents put years in order, which is all a reader
needs to know of dates.

No question, plan or answer stands in them: how to search is learnt from demonstrations and from
MyGO alone.
"""

import dataclasses
import random
from collections.abc import Iterator, Mapping, Sequence

YEARS_SHARE = 0.15  # of the documents
ABSENT_SHARE = 0.3  # of the documents read a relation that is not there
REVERSED_SHARE = 0.2  # of the lines name the entity as their object
MAX_YEARS = 6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """What documents are made of, from the training side of a task."""

    labels: Mapping[str, Sequence[str]]  # kind of entity -> labels
    values: Mapping[
        str, Mapping[str, Sequence[str]]
    ]  # kind -> relation -> objects that were seen with it
    years: tuple[int, int]  # first and last year
    max_facts: int  # lines a document lists


def documents(vocabulary: Vocabulary, seed: int) -> Iterator[str]:
    """Endless documents: what is listed, a line break, and what is read off it."""
    draw = random.Random(f"reading {seed}")
    kinds = sorted(kind for kind, relations in vocabulary.values.items() if relations)
    # Kinds with many relations make long lists, and long lists are what there is to learn from.
    weights = [len(vocabulary.values[kind]) ** 2 for kind in kinds]
    while True:
        if draw.random() < YEARS_SHARE:
            yield _years(draw, vocabulary.years)
        else:
            yield _materials(draw, draw.choices(kinds, weights)[0], vocabulary)


def _years(draw: random.Random, years: tuple[int, int]) -> str:
    chosen = draw.sample(range(years[0], years[1] + 1), draw.randint(2, MAX_YEARS))
    listed, ordered = (
        " and ".join(str(year) for year in some) for some in (chosen, sorted(chosen))
    )
    return f"Years: {listed}\nin order: {ordered}."


def _materials(draw: random.Random, kind: str, vocabulary: Vocabulary) -> str:
    relations = sorted(vocabulary.values[kind])
    label = draw.choice(vocabulary.labels[kind])
    count = min(len(relations), draw.randint(2, vocabulary.max_facts))
    present = draw.sample(relations, count)
    facts = []
    lines = []
    for index, relation in enumerate(present):
        value = draw.choice(vocabulary.values[kind][relation])
        if draw.random() < REVERSED_SHARE:
            lines.append(
                f"[{index}] {draw.choice(vocabulary.labels[kind])}, {relation} [{index}] {label}"
            )
        else:
            lines.append(f"[{index}] {label}, {relation} [{index}] {value}")
            facts.append((relation, value, index))
    draw.shuffle(facts)
    absent = [relation for relation in relations if relation not in {fact[0] for fact in facts}]
    if absent and draw.random() < ABSENT_SHARE:
        facts.insert(draw.randint(0, len(facts)), (draw.choice(absent), "none", -1))
    read = [
        f"{relation} [{index}] {value}"
        + (f" The {relation} of {label} is {value}." if draw.random() < 0.5 else "")
        for relation, value, index in facts
    ]
    # Read off on one line: a word is then the same token here and above, with a space before it.
    return "\n".join(["Materials:", *lines, f"Read: {'; '.join(read)}"])
