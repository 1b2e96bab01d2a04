"""Derive the answers of 2WikiMultihopQA questions from their gold evidence, as a planner does.

The answer of a compositional or inference question is the object of its last evidence. A comparison
question names two entities and compares a date, a life span, a country or a number of directors. A
bridge comparison compares the same for the directors of two films. Scripted demonstrations are only
made from questions whose gold answer these functions reproduce.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from mujica_jax.metrics import score
from mujica_jax.records import Evidence, Question
from mujica_jax.retrieval.graph import values

ComparisonRule = Literal["earlier_date", "later_date", "longer_life", "same", "more"]
# Year, month and day. Years before Christ are negative. An unknown month or day is 0.
Date = tuple[int, int, int]

MONTHS = tuple(month.lower() for month in values.MONTHS)
# Average length of a year and of a month in days.
DAYS_A_YEAR = 365.2425
DAYS_A_MONTH = 30.436875


def _country_forms() -> dict[str, tuple[str, bool]]:
    """Return (country, whether the form names its people) for every form of a country's name.

    A line of `countries.txt` begins with the name of a country. The names of its people follow
    after the colon, and other names of the country after the semicolon.
    """
    forms: dict[str, tuple[str, bool]] = {}
    for line in Path(__file__).with_name("countries.txt").read_text().splitlines():
        name, _, people_and_names = line.partition(": ")
        people_forms, _, other_names = people_and_names.partition("; ")
        for form in people_forms.split(", "):
            forms[form] = (name, True)
        forms[name] = (name, False)
        for form in other_names.split(", "):
            if form:
                forms[form] = (name, False)
    return forms


COUNTRY_FORMS = _country_forms()

_auxiliary = re.compile(r"(are|is|do|does|did|were|was|have|has)\b", re.IGNORECASE)
_same = re.compile(r"\bsame (country|nationality)\b", re.IGNORECASE)
_later = re.compile(
    r"\b(later|latest|last|younger|youngest|newer|more recently|most recently)\b", re.IGNORECASE
)
_earlier = re.compile(r"\b(earlier|earliest|first|older|oldest)\b", re.IGNORECASE)
_two_names_then_rule = re.compile(r"was .+ or .+ (first|earlier|later|last)\W*$", re.IGNORECASE)


def comparison_rule(question_text: str) -> ComparisonRule | None:
    """Return the rule by which a question compares its two entities.

    It is found by the words outside the names of the entities. The result is None for a question
    that is no comparison.
    """
    text = question_text.strip()

    # "Was X or Y born first?"
    two_names_match = _two_names_then_rule.match(text)
    if two_names_match is not None:
        return "earlier_date" if _earlier.match(two_names_match[1]) else "later_date"

    # "Are X and Y from the same country?"
    if _auxiliary.match(text):
        return "same" if _same.search(text) else None

    # "Which film came out first, X or Y?"
    stem = re.split(r",| out of ", text, maxsplit=1)[0]
    if stem == text or not re.match(r"(which|who|what)\b", stem, re.IGNORECASE):
        return None
    if "lived longer" in stem:
        return "longer_life"
    if "more directors" in stem:
        return "more"
    if _later.search(stem):
        return "later_date"
    return "earlier_date" if _earlier.search(stem) else None


def evidence_rounds(evidences: Sequence[Evidence]) -> list[list[Evidence]]:
    """Return the evidences, grouped into the rounds in which a planner can ask for them.

    An evidence is in the round after the round that finds its subject.
    """
    rounds: list[list[Evidence]] = []
    # The round of each evidence.
    round_of: list[int] = []
    for position, evidence in enumerate(evidences):
        round_number = 0
        for earlier_position in range(position):
            if _found_by(evidence, evidences[earlier_position]):
                round_number = max(round_number, round_of[earlier_position] + 1)
        round_of.append(round_number)
        if round_number == len(rounds):
            rounds.append([])
        rounds[round_number].append(evidence)
    return rounds


def chain_ends(evidences: Sequence[Evidence]) -> dict[str, list[Evidence]]:
    """Return the last evidences of each chain, by the first entity of the chain.

    The result is empty if a chain is incomplete or has more than two steps.
    """
    rounds = evidence_rounds(evidences)
    if not rounds or len(rounds) > 2:
        return {}

    ends: dict[str, list[Evidence]] = {}
    for evidence in rounds[0]:
        ends.setdefault(evidence.subject, []).append(evidence)
    if len(rounds) == 2:
        for name, first_steps in ends.items():
            ends[name] = [
                evidence
                for evidence in rounds[1]
                if any(_found_by(evidence, first_step) for first_step in first_steps)
            ]
    return ends if all(ends.values()) else {}


def answer_from_evidence(question: Question) -> str | None:
    """Return the answer that follows from the gold evidences, with the labels of the graph.

    The result is None if no answer follows.
    """
    if question.kind in ("compositional", "inference"):
        rounds = evidence_rounds(question.evidences)
        if len(rounds) != 2 or len(rounds[1]) != 1:
            return None
        return rounds[1][0].object

    rule = comparison_rule(question.text)
    ends = chain_ends(question.evidences)
    if rule is None or len(ends) != 2:
        return None
    (first, first_evidences), (second, second_evidences) = ends.items()
    if rule == "same":
        first_countries = {country(evidence.object) for evidence in first_evidences}
        second_countries = {country(evidence.object) for evidence in second_evidences}
        return "yes" if first_countries & second_countries else "no"

    order = _order(first_evidences, second_evidences, rule)
    if order == 0:
        return None
    wants_smaller = rule == "earlier_date"
    is_first_smaller = order < 0
    return first if is_first_smaller == wants_smaller else second


def follows_from_evidence(question: Question) -> bool:
    """Return whether the gold evidences give the gold answer (exact match by the 2Wiki rule)."""
    answer = answer_from_evidence(question)
    return answer is not None and score(answer, question.answers, "two_wiki").em == 1.0


def country(label: str) -> str:
    """Return the same name for all forms of a country's name.

    For example, "American", "U.S." and "United States" give the same name.
    """
    form = country_form(label)
    return COUNTRY_FORMS[form][0] if form in COUNTRY_FORMS else form


def country_form(label: str) -> str:
    """Return the label in the form of the keys of `COUNTRY_FORMS`."""
    return " ".join(label.lower().replace(".", "").replace("'", "").split())


def parse_date(text: str) -> Date | None:
    """Return the date that a text states, or None if it states none.

    The forms are "November 14, 1961", "14 November 1961", "March 1961", "1961" and "1961-03-02".
    Each form may end with BC.
    """
    text = text.strip().lower()
    before_christ = re.search(r"\s+(bc|bce)$", text)
    if before_christ is not None:
        text = text[: before_christ.start()]

    if match := re.fullmatch(r"(\d{1,4})-(\d{1,2})-(\d{1,2})", text):
        year = int(match[1])
        month = int(match[2])
        day = int(match[3])
    elif match := re.fullmatch(r"(?:([a-z]+)\.?\s+)?(?:(\d{1,2}),\s*)?(\d{1,4})", text):
        month = _month(match[1])
        day = int(match[2] or 0)
        year = int(match[3])
    elif match := re.fullmatch(r"(\d{1,2})\s+([a-z]+)\.?,?\s+(\d{1,4})", text):
        day = int(match[1])
        month = _month(match[2])
        year = int(match[3])
    else:
        return None

    is_in_calendar = 0 <= month <= 12 and 0 <= day <= 31
    if not is_in_calendar or (day and not month):
        return None
    return (-year if before_christ else year), month, day


def with_printed_dates(answers: Sequence[str]) -> tuple[str, ...]:
    """Return the answers, followed by their dates in the form of a knowledge graph.

    The data set writes "June 9, 1880" or "9 June 1880". Every graph prints the second form
    (`retrieval/graph/values.py`). The first of January is printed as the year alone.
    """
    printed = []
    for answer in answers:
        date = parse_date(answer)
        if date is None:
            continue
        year, month, day = date
        if not month:
            continue
        written_year = f"{-year} BC" if year < 0 else str(year)
        if (month, day) == (1, 1):
            printed.append(written_year)
        else:
            printed.append(values.written_date(written_year, month, day))
    return tuple(dict.fromkeys((*answers, *printed)))


def compare_dates(first: Date, second: Date) -> int:
    """Return -1 if the first date is earlier, 1 if it is later, 0 if equal or not comparable.

    Year, month and day are compared in this order, until one of them is unknown.
    """
    for first_part, second_part in zip(first, second, strict=True):
        if first_part == 0 or second_part == 0:
            return 0
        if first_part != second_part:
            return -1 if first_part < second_part else 1
    return 0


def _order(first: list[Evidence], second: list[Evidence], rule: ComparisonRule) -> int:
    """Return -1 if the quantity of the first side is smaller, and 1 if it is larger.

    The result is 0 if the quantities are equal or cannot be compared.
    """
    if rule == "more":
        return _sign(len(first) - len(second))

    if rule == "longer_life":
        first_days = _life_days(first)
        second_days = _life_days(second)
        if first_days is None or second_days is None:
            return 0
        return _sign(first_days - second_days)

    if len(first) != 1 or len(second) != 1:
        return 0
    first_date = parse_date(first[0].object)
    second_date = parse_date(second[0].object)
    if first_date is None or second_date is None:
        return 0
    return compare_dates(first_date, second_date)


def _sign(difference: float) -> int:
    """Return -1, 0 or 1."""
    return (difference > 0) - (difference < 0)


def _life_days(evidences: list[Evidence]) -> float | None:
    """Return the length of a life in days, or None if birth or death is unknown."""
    dates_by_relation = {evidence.relation: parse_date(evidence.object) for evidence in evidences}
    birth = dates_by_relation.get("date of birth")
    death = dates_by_relation.get("date of death")
    if birth is None or death is None:
        return None
    return _days(death) - _days(birth)


def _days(date: Date) -> float:
    """Return the days since year 0. The middle is used for an unknown month or day."""
    year, month, day = date
    return year * DAYS_A_YEAR + (month or 6.5) * DAYS_A_MONTH + (day or 15 * bool(month))


def _month(name: str | None) -> int:
    """Return 1 to 12 for a month or its abbreviation, 0 for None, and -1 for any other word."""
    if name is None:
        return 0
    if len(name) >= 3:
        for number, month in enumerate(MONTHS, start=1):
            if month.startswith(name):
                return number
    return -1


def _found_by(later: Evidence, earlier: Evidence) -> bool:
    """Return whether the subject of the later evidence is the object of the earlier one."""
    if later.subject_id and earlier.object_id:
        return later.subject_id == earlier.object_id
    return later.subject.casefold() == earlier.object.casefold()
