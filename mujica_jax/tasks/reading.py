"""Reading documents: what a from-scratch decoder is pre-trained on, in place of the web.

A language model that has read nothing copies no name and finds no line in a list; a demonstration shows it one look-up among a hundred
tokens. A document here lists what the graph says of one entity, as materials look, and then reads the facts off in another order, each
with the number of its line: six look-ups in the same space. Others list years in order, which is all a reader needs to know of dates.
No question, plan or answer stands in them: how to search is learnt from demonstrations and from MyGO alone.
"""

import random
from collections.abc import Iterator, Sequence

YEARS_SHARE = 0.12  # of the documents
ABSENT_SHARE = 0.3  # of the documents ask for a relation that is not there
FIRST_YEAR, LAST_YEAR = 1000, 2020


def documents(entries: Sequence[tuple[str, Sequence[str]]], relations: Sequence[str], years: tuple[int, int], seed: int) -> Iterator[str]:
    """Endless documents over (entity label, material lines) entries, drawn with replacement.

    `relations` are those an absent fact is drawn from; `years` bounds the lists of years, both inclusive.
    """
    draw = random.Random(f"reading {seed}")
    while True:
        if draw.random() < YEARS_SHARE:
            yield _years(draw, years)
        else:
            label, lines = draw.choice(entries)
            yield _materials(draw, label, lines, relations)


def _years(draw: random.Random, years: tuple[int, int]) -> str:
    chosen = sorted(draw.sample(range(years[0], years[1] + 1), draw.randint(4, 10)))
    return "Years: " + ", ".join(str(year) for year in chosen) + "."


def _materials(draw: random.Random, label: str, lines: Sequence[str], relations: Sequence[str]) -> str:
    lines = list(lines)
    draw.shuffle(lines)
    facts = []
    for index, line in enumerate(lines):
        if line.startswith(f"{label}, "):
            relation, _, value = line[len(label) + 2 :].partition(", ")
            facts.append((relation, value, f"[{index}]"))
    draw.shuffle(facts)
    known = {relation for relation, _, _ in facts}
    absent = [relation for relation in relations if relation not in known]
    if absent and draw.random() < ABSENT_SHARE:
        facts.insert(draw.randint(0, len(facts)), (draw.choice(absent), "none.", "[-1]"))
    numbered = [f"[{index}] {line}" for index, line in enumerate(lines)]
    read = [
        f"{relation} of {label}: {value} {index}" if draw.random() < 0.5 else f"{relation}: {value} {index}"
        for relation, value, index in facts
    ]
    return "\n".join(["Materials:", *numbered, *read])
