"""From gold evidence to an answer: what a planner must conclude in 2WikiMultihopQA, as plain
functions.

Compositional and inference questions end at the object of the last evidence. Comparison questions
name two entities and compare a date, a life span, a country or a number of directors; bridge
comparisons compare the same of the two films' directors. Scripted demonstrations are made only of
questions whose gold answer these functions reproduce.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from mujica_jax import dates
from mujica_jax.metrics import score
from mujica_jax.records import Evidence, Question

ComparisonRule = Literal["earlier_date", "later_date", "longer_life", "same", "more"]
Date = tuple[int, int, int]  # year (negative before Christ), month and day; 0 where unknown

MONTHS = tuple(month.lower() for month in dates.MONTHS)
DAYS_A_YEAR, DAYS_A_MONTH = 365.2425, 30.436875


def _country_forms() -> dict[str, tuple[str, bool]]:
    """The country of every form, and whether the form names its people. How the data writes a
    country: its name, its people after the colon, other names after the semicolon."""
    forms = {}
    for line in Path(__file__).with_name("countries.txt").read_text().splitlines():
        name, _, rest = line.partition(": ")
        people, _, names = rest.partition("; ")
        forms |= {form: (name, True) for form in people.split(", ")}
        forms |= {form: (name, False) for form in (name, *filter(None, names.split(", ")))}
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
    """What a comparison asks of its two entities, by the words outside their names. None if it is
    no comparison."""
    text = question_text.strip()
    if ends := _two_names_then_rule.match(text):  # "Was X or Y born first?"
        return "earlier_date" if _earlier.match(ends[1]) else "later_date"
    if _auxiliary.match(text):
        return "same" if _same.search(text) else None
    stem = re.split(r",| out of ", text, maxsplit=1)[0]  # "Which film came out first, X or Y?"
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
    """Evidences in the rounds in which a planner can ask them: after the one that finds their
    subject."""
    depths: list[int] = []
    for position, evidence in enumerate(evidences):
        before = [depths[i] for i in range(position) if _found_by(evidence, evidences[i])]
        depths.append(max(before, default=-1) + 1)
    return [
        [evidence for evidence, depth in zip(evidences, depths, strict=True) if depth == wanted]
        for wanted in range(max(depths, default=-1) + 1)
    ]


def chain_ends(evidences: Sequence[Evidence]) -> dict[str, list[Evidence]]:
    """First entity of each chain -> what was asked last of it. Empty if a chain breaks off or has
    over two steps."""
    rounds = evidence_rounds(evidences)
    groups: dict[str, list[Evidence]] = {}
    for evidence in rounds[0] if rounds else ():
        groups.setdefault(evidence.subject, []).append(evidence)
    if len(rounds) == 2:
        groups = {
            name: [
                later for later in rounds[1] if any(_found_by(later, earlier) for earlier in group)
            ]
            for name, group in groups.items()
        }
    return groups if len(rounds) <= 2 and all(groups.values()) else {}


def answer_from_evidence(question: Question) -> str | None:
    """The answer that follows from the gold evidences, in the graph's own labels; None where it
    does not follow."""
    rounds = evidence_rounds(question.evidences)
    if question.kind in ("compositional", "inference"):
        return rounds[-1][0].object if len(rounds) == 2 and len(rounds[-1]) == 1 else None
    rule = comparison_rule(question.text)
    groups = chain_ends(question.evidences)
    if rule is None or len(groups) != 2:
        return None
    (first, first_group), (second, second_group) = groups.items()
    if rule == "same":
        shared = {country(e.object) for e in first_group} & {
            country(e.object) for e in second_group
        }
        return "yes" if shared else "no"
    order = _order(first_group, second_group, rule)
    if order == 0:
        return None
    return first if (order < 0) == (rule == "earlier_date") else second


def follows_from_evidence(question: Question) -> bool:
    """Whether the gold answer is reproduced (exact match under the 2Wiki rule)."""
    answer = answer_from_evidence(question)
    return answer is not None and score(answer, question.answers, "two_wiki").em == 1.0


def country(label: str) -> str:
    """One name for a country however the data writes it: "American", "U.S." and "United States" are
    the same."""
    form = country_form(label)
    return COUNTRY_FORMS[form][0] if form in COUNTRY_FORMS else form


def country_form(label: str) -> str:
    """The label as `COUNTRY_FORMS` writes it."""
    return " ".join(label.lower().replace(".", "").replace("'", "").split())


def parse_date(text: str) -> Date | None:
    """Parses "November 14, 1961", "14 November 1961", "March 1961", "1961" or "1961-03-02", also
    with BC; else None."""
    text = text.strip().lower()
    before_christ = re.search(r"\s+(bc|bce)$", text)
    if before_christ:
        text = text[: before_christ.start()]
    if match := re.fullmatch(r"(\d{1,4})-(\d{1,2})-(\d{1,2})", text):
        year, month, day = int(match[1]), int(match[2]), int(match[3])
    elif match := re.fullmatch(r"(?:([a-z]+)\.?\s+)?(?:(\d{1,2}),\s*)?(\d{1,4})", text):
        year, month, day = int(match[3]), _month(match[1]), int(match[2] or 0)
    elif match := re.fullmatch(r"(\d{1,2})\s+([a-z]+)\.?,?\s+(\d{1,4})", text):
        year, month, day = int(match[3]), _month(match[2]), int(match[1])
    else:
        return None
    if not (0 <= month <= 12 and 0 <= day <= 31) or (day and not month):
        return None
    return (-year if before_christ else year), month, day


def with_printed_dates(answers: Sequence[str]) -> tuple[str, ...]:
    """Return the answers, followed by the dates among them as a knowledge graph prints them.

    The data write "June 9, 1880" or "9 June 1880", and every graph prints the second
    (`retrieval/graph/values.py`). It prints the first of January as its year.
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
            printed.append(dates.written_date(written_year, month, day))
    return tuple(dict.fromkeys((*answers, *printed)))


def compare_dates(first: Date, second: Date) -> int:
    """-1 if the first is earlier, 1 if later, 0 if equal or not comparable. Parts that one side
    lacks do not count."""
    for one, other in zip(first, second, strict=True):
        if one == 0 or other == 0:
            return 0
        if one != other:
            return -1 if one < other else 1
    return 0


def _order(first: list[Evidence], second: list[Evidence], rule: ComparisonRule) -> int:
    """-1 where the first side's quantity is the smaller one, 1 where it is the larger, 0 where that
    cannot be told."""
    if rule == "more":
        return (len(first) > len(second)) - (len(first) < len(second))
    if rule == "longer_life":
        one, other = _life_days(first), _life_days(second)
        return 0 if one is None or other is None else (one > other) - (one < other)
    dates = [parse_date(group[0].object) for group in (first, second) if len(group) == 1]
    if len(dates) != 2 or dates[0] is None or dates[1] is None:
        return 0
    return compare_dates(dates[0], dates[1])


def _life_days(group: list[Evidence]) -> float | None:
    dates = {evidence.relation: parse_date(evidence.object) for evidence in group}
    born, died = dates.get("date of birth"), dates.get("date of death")
    return None if born is None or died is None else _days(died) - _days(born)


def _days(date: Date) -> float:
    """Days since year 0; an unknown month or day counts as the middle."""
    year, month, day = date
    return year * DAYS_A_YEAR + (month or 6.5) * DAYS_A_MONTH + (day or 15 * bool(month))


def _month(name: str | None) -> int:
    """1 to 12 for a month or its abbreviation, 0 for none, -1 for a word that is no month."""
    if name is None:
        return 0
    found = [
        number
        for number, month in enumerate(MONTHS, start=1)
        if len(name) >= 3 and month.startswith(name)
    ]
    return found[0] if found else -1


def _found_by(later: Evidence, earlier: Evidence) -> bool:
    if later.subject_id and earlier.object_id:
        return later.subject_id == earlier.object_id
    return later.subject.casefold() == earlier.object.casefold()
