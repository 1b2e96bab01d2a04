"""What the scripted demonstrator writes over passages: a question for each gold triple whose subject is known, and from
the passages that a search really found the words that state its object.

The worker names the passage and repeats the object as it stands there, a date in the passage's own order of day and
month. Where no passage states it, it says so, and the planner asks once more in other words, then gives up.
"""

import re
from collections.abc import Iterator, Sequence

from mujica_jax.agents import protocol
from mujica_jax.agents.mujica import PlannerState, WorkerState
from mujica_jax.records import Evidence, Search
from mujica_jax.tasks.task import Material
from mujica_jax.tasks.two_wiki.chains import COUNTRY_FORMS, MONTHS, country_form, evidence_rounds, parse_date

PERSON_RELATIONS = frozenset(
    "director father mother spouse performer composer sibling child creator producer editor presenter "
    "screenwriter".split()
) | {"founded by", "student of", "doctoral advisor"}
PARENTHESIS = re.compile(r"\s*\([^()]*\)\s*$")


class TextScript:
    """Remembers which triple each of its questions asks for: a worker is shown the question alone."""

    def __init__(self) -> None:
        self._asked: dict[str, Evidence] = {}

    def open_searches(self, state: PlannerState) -> list[tuple[Evidence, protocol.SearchCall]] | None:
        """The triples to ask for now, each in its next wording. None where one was asked in every wording in vain."""
        found = [search for search in state.searches if search.found]
        asked = {search.query for search in state.searches}
        for evidences in evidence_rounds(state.question.evidences):
            calls = []
            for evidence in evidences:
                wordings = queries_of(evidence)
                if any(one.query in wordings and (one.selected or stated(evidence, [one])) for one in found):
                    continue
                query = next((wording for wording in wordings if wording not in asked), None)
                if query is None:
                    return None
                self._asked[query] = evidence
                calls.append((evidence, protocol.SearchCall(query=query, candidate=None)))
            if calls:
                return calls
        return []

    def read(self, state: WorkerState) -> str:
        evidence = self._asked[state.query]
        stated = first_statement(evidence, state.materials)
        what = f"{evidence.relation} of {evidence.subject}"
        if stated is None:
            return protocol.write_worker(f"No passage states the {what}.", [], protocol.NOTHING_FOUND)
        number, value = stated
        thought = f"Passage [{number}] states the {what}: {value}."
        return protocol.write_worker(thought, [number], f"The {what} is {value}.")


def query_of(relation: str, label: str) -> str:
    """The sub-question that asks for one relation of one entity."""
    return f"{'Who' if relation in PERSON_RELATIONS else 'What'} is the {relation} of {label}?"


def queries_of(evidence: Evidence) -> tuple[str, str]:
    """Two wordings: a question, and what a search engine would be given."""
    return query_of(evidence.relation, evidence.subject), f"{evidence.subject} {evidence.relation}"


def first_statement(evidence: Evidence, materials: Sequence[Material]) -> tuple[int, str] | None:
    """The passage that states the object, and the words in which it does: the subject's own passage, or the first one
    that names the subject, too."""
    subject = PARENTHESIS.sub("", evidence.subject).casefold()
    own = [n for n, material in enumerate(materials) if PARENTHESIS.sub("", material.title).casefold() == subject]
    naming = [n for n, material in enumerate(materials) if n not in own and subject in material.text.casefold()]
    for number in (*own, *naming):
        for form in forms_of(evidence.object):
            if stands := re.search(rf"(?<!\w){re.escape(form)}(?!\w)", materials[number].text, re.IGNORECASE):
                return number, stands[0]
    return None


def fact(evidence: Evidence, value: str) -> str:
    return f"The {evidence.relation} of {evidence.subject} is {value}."


def stated(evidence: Evidence, searches: Sequence[Search]) -> str | None:
    """The object in the words of a passage that a search found."""
    for search in searches:
        materials = [Material(text=text, title=text.partition(": ")[0]) for text in search.materials]
        if (found := first_statement(evidence, materials)) is not None:
            return found[1]
    return None


def forms_of(value: str) -> Iterator[str]:
    """How a passage may write an object: as it is, a date in either order, a country as its people."""
    yield value
    if without := PARENTHESIS.sub("", value):
        yield without
    if (date := parse_date(value)) is not None and date[1]:
        year, month, day = date
        name = MONTHS[month - 1].capitalize()
        yield from (f"{day} {name} {year}", f"{name} {day}, {year}") if day else (f"{name} {year}",)
    form = country_form(value)
    if form in COUNTRY_FORMS:
        same = [other for other, named in COUNTRY_FORMS.items() if named[0] == COUNTRY_FORMS[form][0]]
        yield from sorted(same, key=lambda other: -len(other))
