"""What the scripted demonstrator writes over passages: a question for each gold triple whose
subject is known, and from the passages that a search really found the words that state its object.

The worker names the passage and repeats the object as it stands there, a date in the passage's own
order of day and month. Where no passage states the object, the worker selects [-1], and then:

- If the question's kind says that its facts are common knowledge, the worker answers from its own
  knowledge, as its prompt asks. A model can have learnt such a fact from the pre-training text.
- Any other fact it cannot know, and a demonstration that states it would teach a model to invent
  facts. So the worker says that nothing was found, and the planner asks once more in other words,
  then gives up. The prompt asks for an answer here too, so the warm-up does not learn such a
  worker's reply (`without_silent_workers`).
"""

import dataclasses
import re
from collections.abc import Iterator, Sequence

from mujica_jax.agents import protocol
from mujica_jax.agents.contract import Contract
from mujica_jax.agents.mujica import WORKER, PlannerState, WorkerState
from mujica_jax.records import Conversation, Evidence, Question, Search
from mujica_jax.tasks.task import Material
from mujica_jax.tasks.two_wiki import chains

PERSON_RELATIONS = frozenset(
    "director father mother spouse performer composer sibling child creator producer editor "
    "presenter screenwriter".split()
) | {"founded by", "student of", "doctoral advisor"}
YEAR = re.compile(r"\b\d{3,4}\b")
PARENTHESIS = re.compile(r"\s*\([^()]*\)\s*$")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Asked:
    """What one of the script's questions asks for."""

    evidence: Evidence
    is_known: bool  # common knowledge, as the kind of the planner's question says


class TextScript:
    """Remembers which triple each of its questions asks for: a worker is shown the question
    alone."""

    def __init__(self, contract: Contract) -> None:
        self._contract = contract
        self._asked: dict[str, _Asked] = {}

    def open_searches(
        self, state: PlannerState
    ) -> list[tuple[Evidence, protocol.SearchCall]] | None:
        """The triples to ask for now, each in its next wording. None where one was asked in every
        wording in vain."""
        asked = {search.query for search in state.searches}
        for evidences in chains.evidence_rounds(state.question.evidences):
            calls = []
            for evidence in evidences:
                wordings = queries_of(evidence)
                tried = [search for search in state.searches if search.query in wordings]
                if any(_is_answered(search, evidence, state) for search in tried):
                    continue
                query = next((wording for wording in wordings if wording not in asked), None)
                if query is None:
                    return None
                self._asked[query] = _Asked(evidence=evidence, is_known=state.question.is_known)
                calls.append((evidence, protocol.SearchCall(query=query, candidate=None)))
            if calls:
                return calls
        return []

    def read(self, state: WorkerState) -> str:
        asked = self._asked[state.query]
        evidence = asked.evidence
        what = f"{evidence.relation} of {evidence.subject}"
        statement = first_statement(evidence, state.materials)
        if statement is not None:
            number, value = statement
            thought = f"Passage [{number}] states the {what}: {value}."
            return self._contract.write_worker(thought, [number], f"The {what} is {value}.")
        sentence = fact(evidence, evidence.object) if asked.is_known else protocol.NOTHING_FOUND
        return self._contract.write_worker(f"No passage states the {what}.", [], sentence)


def _is_answered(search: Search, evidence: Evidence, state: PlannerState) -> bool:
    """Tell whether a search told the planner the object: in a worker's sentence, or in a passage
    that it reads."""
    if not search.found:
        return False
    return state.split or stated(evidence, [search]) is not None


def without_silent_workers(conversations: Sequence[Conversation]) -> tuple[Conversation, ...]:
    """Leave out the conversations of workers that say that nothing was found.

    The prompt of a worker over texts asks for an answer from its own knowledge instead."""
    return tuple(
        conversation
        for conversation in conversations
        if conversation.role != WORKER or not _is_silent(conversation)
    )


def _is_silent(worker: Conversation) -> bool:
    reply = worker.turns[-1].text
    return protocol.field("sentence", reply) == protocol.NOTHING_FOUND


def query_of(relation: str, label: str) -> str:
    """The sub-question that asks for one relation of one entity."""
    return f"{'Who' if relation in PERSON_RELATIONS else 'What'} is the {relation} of {label}?"


def queries_of(evidence: Evidence) -> tuple[str, str]:
    """Two wordings: a question, and what a search engine would be given."""
    return query_of(evidence.relation, evidence.subject), f"{evidence.subject} {evidence.relation}"


def first_statement(evidence: Evidence, materials: Sequence[Material]) -> tuple[int, str] | None:
    """The passage that states the object, and the words in which it does: the subject's own
    passage, or the first one that names the subject, too."""
    subject = PARENTHESIS.sub("", evidence.subject).casefold()
    own = [
        n
        for n, material in enumerate(materials)
        if PARENTHESIS.sub("", material.title).casefold() == subject
    ]
    naming = [
        n
        for n, material in enumerate(materials)
        if n not in own and subject in material.text.casefold()
    ]
    for number in (*own, *naming):
        for form in forms_of(evidence.object):
            if stands := re.search(
                rf"(?<!\w){re.escape(form)}(?!\w)", materials[number].text, re.IGNORECASE
            ):
                return number, stands[0]
    return None


def fact(evidence: Evidence, value: str) -> str:
    return f"The {evidence.relation} of {evidence.subject} is {value}."


def stated(evidence: Evidence, searches: Sequence[Search]) -> str | None:
    """The object in the words of a passage that a search found."""
    for search in searches:
        materials = [
            Material(text=text, title=text.partition(": ")[0]) for text in search.materials
        ]
        if (found := first_statement(evidence, materials)) is not None:
            return found[1]
    return None


def conclusion(question: Question, answer: str) -> str:
    """The thought before an answer. For two chains: what was found at their ends with the numbers
    of the candidates they began with, then the one that decides, its number and its name, so that
    each step follows from one look back.
    """
    ends = chains.chain_ends(question.evidences)
    if len(ends) != 2:
        return f"{answer}."
    if answer in ("yes", "no"):
        values = [group[0].object for group in ends.values()]
        return f"{' and '.join(values)}: {'same' if answer == 'yes' else 'different'}."
    labels = [entity.label for entity in question.candidates]
    (first, one), (second, other) = ends.items()
    found = {first: _quantity(one, other), second: _quantity(other, one)}
    if answer not in ends or (labels and not {first, second} <= set(labels)):
        return f"{answer}."
    side = _side(ends[answer], ends[second if answer == first else first])
    if not labels:
        return f"{first}: {found[first]}. {second}: {found[second]}. {side.capitalize()}: {answer}."
    numbered = {label: f"{quantity} [{labels.index(label)}]" for label, quantity in found.items()}
    return f"{numbered[first]} and {numbered[second]}: {side} {numbered[answer]} {answer}."


def forms_of(value: str) -> Iterator[str]:
    """How a passage may write an object: as it is, a date in either order, a country as its
    people."""
    yield value
    if without := PARENTHESIS.sub("", value):
        yield without
    if (date := chains.parse_date(value)) is not None and date[1]:
        year, month, day = date
        name = chains.MONTHS[month - 1].capitalize()
        yield from (f"{day} {name} {year}", f"{name} {day}, {year}") if day else (f"{name} {year}",)
    form = chains.country_form(value)
    if form in chains.COUNTRY_FORMS:
        same = [
            other
            for other, named in chains.COUNTRY_FORMS.items()
            if named[0] == chains.COUNTRY_FORMS[form][0]
        ]
        yield from sorted(same, key=lambda other: -len(other))


def _quantity(group: Sequence[Evidence], other: Sequence[Evidence]) -> str:
    """What is compared: years, or the whole values where they are no dates or years do not
    decide."""
    of_both = ([YEAR.findall(evidence.object) for evidence in some] for some in (group, other))
    years, others = ([found[-1] for found in some if found] for some in of_both)
    decided = len(years) == len(group) and len(others) == len(other) and years != others
    return " to ".join(years) if decided else " and ".join(evidence.object for evidence in group)


def _side(deciding: Sequence[Evidence], other: Sequence[Evidence]) -> str:
    if len(deciding) != len(other):
        return "more"
    if len(deciding) > 1:
        return "longer"
    dates = [chains.parse_date(group[0].object) for group in (deciding, other)]
    if dates[0] is None or dates[1] is None:
        return "rather"
    return "earlier" if chains.compare_dates(dates[0], dates[1]) < 0 else "later"
