"""Make renamed copies of questions with complete gold chains, for scripted demonstrations.

Each copy has its own small graph. A copy is determined by the question's id and the copy's number.
It is made when it is needed, in about a third of a millisecond, and never stored. `augmentation.py`
describes how names change.
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

# Maximum number of triples of the real graph that a copy keeps for each entity of the chain.
NEIGHBOURS = 12
# The number of distractors that a copy adds to an entity is drawn from this tuple.
EXTRA_FACTS = (0,) * 4 + (1,) * 3 + (2,) * 2 + (3, 4)
# The probability that another work points at a person of the chain.
EXTRA_REFERENCE = 0.3
# For each end of a life: the other end, and the sign of the time from there to this end.
LIFE_ENDS = {"date of birth": ("date of death", -1), "date of death": ("date of birth", 1)}
# Shortest and longest life in years.
LIFE_YEARS = (20, 90)
# Maximum number of times that dates are drawn until a comparison is decided.
DATE_DRAWS = 20
# Films, songs and albums do not move before this year. Other dates stay on their side of the year
# 1000.
FIRST_YEAR: dict[Sort, int] = {"work": 1895}


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A triple with keys in place of labels.

    `object` is the key of an entity. For other kinds it is the text of a country, a closed label or
    a date.
    """

    subject: str
    relation: str
    object: str
    object_kind: Literal["entity", "country", "closed", "date"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CopyPlan:
    """The plan that all copies of a question share."""

    question: Question
    # Where the text names each candidate.
    places: tuple[Mention, ...]
    # The evidences.
    chain: tuple[Row, ...]
    # Further triples of the entities in the chain.
    around: tuple[Row, ...]
    # The original name of each entity, by key.
    labels: dict[str, str]
    # The sort of each entity, by key.
    sorts: dict[str, Sort]


def copy_plan(question: Question, graph: TripleGraph) -> CopyPlan | None:
    """Return the plan for copies of a question.

    The result is None if the names of the candidates cannot be found in the question's text.
    """
    bridges = {evidence.object for evidence in question.evidences}
    titles = [passage.title for passage in question.gold_passages if passage.title not in bridges]
    candidate_labels = [candidate.label for candidate in question.candidates]
    places = mentions(question.text, candidate_labels, titles)
    if places is None:
        return None

    labels: dict[str, str] = {}
    chain: list[Row] = []
    for evidence in question.evidences:
        object_key = evidence.object_id or evidence.object
        chain.append(_row(evidence, evidence.subject_id, object_key, labels))

    # Used as an ordered set.
    around: dict[Row, None] = {}
    for key in dict.fromkeys(row.subject for row in chain):
        for end in graph.ends_of(key, NEIGHBOURS):
            triple = end.triple
            if end.as_object:
                subject_key = graph.subject_key(triple)
                object_key = key
            else:
                subject_key = key
                object_key = graph.object_key(triple) or triple.object
            around[_row(triple, subject_key, object_key, labels)] = None

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
    """Return the copy of a question with this number, and the environment to answer it in."""
    identifier = f"{plan.question.id}-renamed-{number}"
    draw = random.Random(identifier)
    renamer = Renamer(parts, draw)

    # Rename the entities, and their names in the question's text.
    labels = {key: renamer.label(label, plan.sorts[key]) for key, label in plan.labels.items()}
    text = _renamed_text(plan, renamer)
    candidates = [
        Entity(id=_key(entity.id), label=labels[entity.id]) for entity in plan.question.candidates
    ]
    question = dataclasses.replace(
        plan.question, id=identifier, text=text, candidates=tuple(candidates), gold_passages=()
    )

    # Draw dates until the question has an answer.
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
    question = dataclasses.replace(question, answers=(answer,))

    triples += _distractors(plan, parts, renamer, triples)
    draw.shuffle(triples)
    return question, GraphEnvironment(TripleGraph(triples), top_k)


def _row(triple: Evidence, subject_key: str, object_key: str, labels: dict[str, str]) -> Row:
    """Return the triple with the keys of its ends. Add the names of new entities to `labels`."""
    labels.setdefault(subject_key, triple.subject)
    if triple.relation in LITERAL_RELATIONS:
        return Row(subject_key, triple.relation, triple.object, "date")
    sort = SORT_OF_OBJECT.get(triple.relation)
    if sort == "country" or sort == "closed":
        return Row(subject_key, triple.relation, triple.object, sort)
    labels.setdefault(object_key, triple.object)
    return Row(subject_key, triple.relation, object_key, "entity")


def _sort(key: str, rows: Sequence[Row]) -> Sort:
    """Return the sort of an entity, by its relations.

    Relations of which it is the subject are looked at first, because they are more certain.
    """
    for row in rows:
        if row.subject == key and row.relation in SORT_OF_SUBJECT:
            return SORT_OF_SUBJECT[row.relation]
    for row in rows:
        if row.object == key and row.relation in SORT_OF_OBJECT:
            return SORT_OF_OBJECT[row.relation]
    return "other"


def _renamed_text(plan: CopyPlan, renamer: Renamer) -> str:
    """Return the question's text with the new names.

    A new name is written In Title Case if the old name was.
    """
    text = plan.question.text
    named_candidates = list(zip(plan.places, plan.question.candidates, strict=True))

    # Replace the last name first, so that the places of the other names stay valid.
    named_candidates.sort(key=lambda pair: -pair[0].start)
    for place, candidate in named_candidates:
        new_name = renamer.label(place.name, plan.sorts[candidate.id])
        old_name = text[place.start : place.end]
        if old_name != place.name:
            new_name = new_name.title()
        text = text[: place.start] + new_name + text[place.end :]
    return text


def _renamed_triples(plan: CopyPlan, renamer: Renamer, labels: dict[str, str]) -> list[Triple]:
    """Return the triples of the chain and around it, renamed, in the order of the plan.

    The dates are drawn anew at each call.
    """
    dates = _renamed_dates(plan, renamer)
    triples = []
    for row in (*plan.chain, *plan.around):
        if row.object_kind == "entity":
            object_label = labels[row.object]
            object_key = _key(row.object)
        elif row.object_kind == "date":
            object_label = dates[row.subject, row.object]
            object_key = ""
        else:
            object_label = renamer.label(row.object, row.object_kind, row.relation)
            object_key = _key(object_label)
        triple = Triple(
            subject=labels[row.subject],
            relation=row.relation,
            object=object_label,
            subject_id=_key(row.subject),
            object_id=object_key,
        )
        triples.append(triple)
    return triples


def _renamed_dates(plan: CopyPlan, renamer: Renamer) -> dict[tuple[str, str], str]:
    """Return the new date for each (entity key, old date).

    All dates of one entity move by the same number of years.
    """
    new_dates: dict[tuple[str, str], str] = {}
    years_of_subject: dict[str, list[int]] = {}
    for row in (*plan.chain, *plan.around):
        if row.object_kind != "date" or (row.subject, row.object) in new_dates:
            continue
        new_dates[row.subject, row.object] = row.object
        date = parse_date(row.object)
        if date is not None:
            years_of_subject.setdefault(row.subject, []).append(date[0])

    for subject, years in years_of_subject.items():
        first_year = FIRST_YEAR.get(plan.sorts[subject], _first_year_of_era(min(years)))
        shift = renamer.year_shift(years, first_year)
        # Two dates within the same year keep their days, so that their order stays the same.
        has_different_years = len(set(years)) == len(years)
        for other_subject, old_date in new_dates:
            if other_subject == subject:
                new_dates[subject, old_date] = renamer.date(
                    old_date, shift, move_day=has_different_years
                )
    return new_dates


def _distractors(
    plan: CopyPlan, parts: NameParts, renamer: Renamer, triples: Sequence[Triple]
) -> list[Triple]:
    """Return distractor triples about the entities of the chain.

    They are facts with relations that an entity does not have, and works that point at a person.
    """
    draw = renamer.random
    # The last triple of each subject. `triples` begins with the triples of the chain.
    last_triples: dict[str, Triple] = {}
    for row, triple in zip(plan.chain, triples, strict=False):
        last_triples[row.subject] = triple

    distractors: list[Triple] = []
    for original_key, triple in last_triples.items():
        label = triple.subject
        key = triple.subject_id
        sort = plan.sorts[original_key]
        objects = {other.relation: other.object for other in triples if other.subject_id == key}

        facts = parts.facts.get(sort, ())
        fact_count = draw.choice(EXTRA_FACTS) if facts else 0
        for _ in range(fact_count):
            fact = draw.choice(facts)
            if fact.relation in objects:
                continue
            new_object = _new_object(fact, renamer, objects)
            objects[fact.relation] = new_object
            distractor = Triple(
                subject=label,
                relation=fact.relation,
                object=new_object,
                subject_id=key,
                object_id="" if fact.object_is_literal else _key(new_object),
            )
            distractors.append(distractor)

        if sort == "person" and parts.references and draw.random() < EXTRA_REFERENCE:
            reference = draw.choice(parts.references)
            work = renamer.label(reference.subject, "work")
            distractor = Triple(
                subject=work,
                relation=reference.relation,
                object=label,
                subject_id=_key(work),
                object_id=key,
            )
            distractors.append(distractor)
    return distractors


def _new_object(fact: Triple, renamer: Renamer, objects: dict[str, str]) -> str:
    """Return the object of another entity's fact, renamed.

    `objects` holds the objects of the entity by relation. A date of birth or death is chosen so
    that the length of the life is possible.
    """
    if not fact.object_is_literal:
        sort = SORT_OF_OBJECT.get(fact.relation, "other")
        return renamer.label(fact.object, sort, fact.relation)
    date = parse_date(fact.object)
    if date is None:
        return fact.object

    year = date[0]
    other_end, direction = LIFE_ENDS.get(fact.relation, ("", 1))
    other_date = parse_date(objects.get(other_end, ""))
    if other_date is None:
        shift = renamer.year_shift([year], _first_year_of_era(year))
    else:
        new_year = other_date[0] + direction * renamer.random.randint(*LIFE_YEARS)
        shift = new_year - year
    return renamer.date(fact.object, shift, move_day=True)


def _first_year_of_era(year: int) -> int:
    """Return the earliest year that a date of this year may move to."""
    return 1000 if year >= 1000 else 1


def _key(key: str) -> str:
    """Return the key in a copy for a key of the real graph. The two never coincide."""
    return f"copy:{key}"
