"""Renamed copies of questions with usable gold chains, each with a small graph of its own, for
scripted demonstrations.

A copy is made when it is read, from the question's id and the copy's number alone, in about a third
of a millisecond; nothing is stored. `augmentation.py` says how names change.
"""

import dataclasses
import random
from collections.abc import Sequence
from typing import Literal

from mujica_jax.records import Entity, Evidence, Question
from mujica_jax.retrieval.graph.triples import LITERAL_RELATIONS, Triple, TripleGraph
from mujica_jax.tasks.environment import GraphEnvironment
from mujica_jax.tasks.two_wiki.augmentation import (
    SORT_OF_OBJECT,
    SORT_OF_SUBJECT,
    NameParts,
    Renamer,
    Sort,
)
from mujica_jax.tasks.two_wiki.chains import answer_from_evidence, parse_date
from mujica_jax.tasks.two_wiki.records import Mention, mentions

NEIGHBOURS = 12  # triples of the real graph that a copy takes over for each entity of the chain
EXTRA_FACTS = (
    0,
    0,
    0,
    0,
    1,
    1,
    1,
    2,
    2,
    3,
    4,
)  # distractors that a copy adds to an entity, drawn from here
EXTRA_REFERENCE = 0.3  # probability that one more work points at a person of the chain
LIFE_ENDS = {"date of birth": ("date of death", -1), "date of death": ("date of birth", 1)}
LIFE_YEARS = (20, 90)
DATE_DRAWS = 20  # dates are drawn again while they leave a comparison undecided
# No film, song or album is older; other dates keep to their side of the year 1000.
FIRST_YEAR: dict[Sort, int] = {"work": 1895}


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A triple by keys: `object` is a key for entities, else the text of a country, a closed label
    or a date."""

    subject: str
    relation: str
    object: str
    object_kind: Literal["entity", "country", "closed", "date"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CopyPlan:
    """What all copies of a question share. `labels` and `sorts`: each entity's original name, and
    what it is."""

    question: Question
    places: tuple[Mention, ...]  # where the text names each candidate
    chain: tuple[Row, ...]  # the evidences
    around: tuple[Row, ...]  # further triples of the chain's entities
    labels: dict[str, str]
    sorts: dict[str, Sort]


def copy_plan(question: Question, graph: TripleGraph) -> CopyPlan | None:
    """None where the text does not name the candidates in a way that can be found and replaced."""
    bridges = {evidence.object for evidence in question.evidences}
    titles = [passage.title for passage in question.gold_passages if passage.title not in bridges]
    places = mentions(question.text, [candidate.label for candidate in question.candidates], titles)
    if places is None:
        return None
    labels: dict[str, str] = {}
    chain = [
        _row(one, one.subject_id, one.object_id or one.object, labels) for one in question.evidences
    ]
    around: dict[Row, None] = {}
    for key in dict.fromkeys(row.subject for row in chain):
        for triple, as_object, *_ in graph.ends_of(key, NEIGHBOURS):
            subject = graph.subject_key(triple) if as_object else key
            found = key if as_object else graph.object_key(triple) or triple.object
            around[_row(triple, subject, found, labels)] = None
    rows = [*chain, *around]
    return CopyPlan(
        question=question,
        places=tuple(places),
        chain=tuple(chain),
        around=tuple(row for row in around if row not in chain),
        labels=labels,
        sorts={key: _sort(key, rows) for key in labels},
    )


def renamed_copy(
    plan: CopyPlan, parts: NameParts, number: int, top_k: int
) -> tuple[Question, GraphEnvironment]:
    """The question's copy with this number, and the environment in which it is answered."""
    identifier = f"{plan.question.id}-renamed-{number}"
    draw = random.Random(identifier)
    renamer = Renamer(parts, draw)
    labels = {key: renamer.label(label, plan.sorts[key]) for key, label in plan.labels.items()}
    question = dataclasses.replace(
        plan.question,
        id=identifier,
        text=_renamed_text(plan, renamer),
        candidates=tuple(
            Entity(id=_key(entity.id), label=labels[entity.id])
            for entity in plan.question.candidates
        ),
        gold_passages=(),
    )
    for _ in range(DATE_DRAWS):
        triples = _renamed_triples(plan, renamer, labels)
        question = dataclasses.replace(question, evidences=tuple(triples[: len(plan.chain)]))
        answer = answer_from_evidence(question)
        if answer is not None:
            break
    else:
        raise AssertionError(
            f"the evidence of {identifier} gives no answer after {DATE_DRAWS} draws of its dates"
        )
    triples += _distractors(plan, parts, renamer, triples)
    draw.shuffle(triples)
    return dataclasses.replace(question, answers=(answer,)), GraphEnvironment(
        TripleGraph(triples), top_k
    )


def _row(triple: Evidence, subject: str, found: str, labels: dict[str, str]) -> Row:
    """The triple by the keys of its ends; names of entities that are new are added to `labels`."""
    labels.setdefault(subject, triple.subject)
    if triple.relation in LITERAL_RELATIONS:
        return Row(subject, triple.relation, triple.object, "date")
    sort = SORT_OF_OBJECT.get(triple.relation)
    if sort == "country" or sort == "closed":
        return Row(subject, triple.relation, triple.object, sort)
    labels.setdefault(found, triple.object)
    return Row(subject, triple.relation, found, "entity")


def _sort(key: str, rows: Sequence[Row]) -> Sort:
    """What an entity is, by the relations it stands in; a subject tells more than an object."""
    for row in rows:
        if row.subject == key and row.relation in SORT_OF_SUBJECT:
            return SORT_OF_SUBJECT[row.relation]
    for row in rows:
        if row.object == key and row.relation in SORT_OF_OBJECT:
            return SORT_OF_OBJECT[row.relation]
    return "other"


def _renamed_text(plan: CopyPlan, renamer: Renamer) -> str:
    """The question's wording around the new names, which are written In Title Case where the old
    ones were."""
    text = plan.question.text
    by_place = sorted(
        zip(plan.places, plan.question.candidates, strict=True), key=lambda pair: -pair[0].start
    )
    for place, candidate in by_place:
        new = renamer.label(place.name, plan.sorts[candidate.id])
        written = text[place.start : place.end]
        text = (
            text[: place.start]
            + (new if written == place.name else new.title())
            + text[place.end :]
        )
    return text


def _renamed_triples(plan: CopyPlan, renamer: Renamer, labels: dict[str, str]) -> list[Triple]:
    """The chain and what is around it, in the plan's order, with newly drawn dates."""
    dates = _renamed_dates(plan, renamer)
    triples = []
    for row in (*plan.chain, *plan.around):
        if row.object_kind == "entity":
            label, key = labels[row.object], _key(row.object)
        elif row.object_kind == "date":
            label, key = dates[row.subject, row.object], ""
        else:
            label = renamer.label(row.object, row.object_kind, row.relation)
            key = _key(label)
        triples.append(
            _triple((labels[row.subject], _key(row.subject)), row.relation, (label, key))
        )
    return triples


def _renamed_dates(plan: CopyPlan, renamer: Renamer) -> dict[tuple[str, str], str]:
    """The new date for every entity and date: all dates of one entity move by the same number of
    years."""
    dates = {
        (row.subject, row.object): row.object
        for row in (*plan.chain, *plan.around)
        if row.object_kind == "date"
    }
    years: dict[str, list[int]] = {}
    for subject, text in dates:
        if date := parse_date(text):
            years.setdefault(subject, []).append(date[0])
    for subject, found in years.items():
        shift = renamer.year_shift(
            found, FIRST_YEAR.get(plan.sorts[subject], 1000 if min(found) >= 1000 else 1)
        )
        move_day = len(set(found)) == len(
            found
        )  # within one year, months keep the order of the dates
        for key in dates:
            if key[0] == subject:
                dates[key] = renamer.date(key[1], shift, move_day=move_day)
    return dates


def _distractors(
    plan: CopyPlan, parts: NameParts, renamer: Renamer, triples: Sequence[Triple]
) -> list[Triple]:
    """Facts of relations that an entity of the chain does not have, and works that point at a
    person of the chain."""
    draw, added = renamer.random, []
    for row, triple in {
        row.subject: (row, triple) for row, triple in zip(plan.chain, triples, strict=False)
    }.values():
        subject, key, sort = triple.subject, triple.subject_id, plan.sorts[row.subject]
        objects = {other.relation: other.object for other in triples if other.subject_id == key}
        facts = parts.facts.get(sort, ())
        for _ in range(draw.choice(EXTRA_FACTS) if facts else 0):
            fact = draw.choice(facts)
            if fact.relation not in objects:
                found = objects[fact.relation] = _new_object(fact, renamer, objects)
                found_key = "" if fact.object_is_literal else _key(found)
                added.append(_triple((subject, key), fact.relation, (found, found_key)))
        if sort == "person" and parts.references and draw.random() < EXTRA_REFERENCE:
            reference = draw.choice(parts.references)
            work = renamer.label(reference.subject, "work")
            added.append(_triple((work, _key(work)), reference.relation, (subject, key)))
    return added


def _new_object(fact: Triple, renamer: Renamer, objects: dict[str, str]) -> str:
    """The object of another entity's fact under a new name; a date that fits to the dates in
    `objects`."""
    if not fact.object_is_literal:
        return renamer.label(fact.object, SORT_OF_OBJECT.get(fact.relation, "other"), fact.relation)
    date = parse_date(fact.object)
    if date is None:
        return fact.object
    other, life = LIFE_ENDS.get(fact.relation, ("", 1))
    if known := parse_date(objects.get(other, "")):
        shift = known[0] + life * renamer.random.randint(*LIFE_YEARS) - date[0]
    else:
        shift = renamer.year_shift([date[0]], 1000 if date[0] >= 1000 else 1)
    return renamer.date(fact.object, shift, move_day=True)


def _key(key: str) -> str:
    """Keys of a copy are no keys of the real graph."""
    return f"copy:{key}"


def _triple(subject: tuple[str, str], relation: str, found: tuple[str, str]) -> Triple:
    """Of two ends, each a label and a key."""
    return Triple(
        subject=subject[0],
        relation=relation,
        object=found[0],
        subject_id=subject[1],
        object_id=found[1],
    )
