"""The scripted demonstrator over passages.

It asks for each gold triple whose subject is known, and reads the object off the passages that the
search found. The worker names the passage and repeats the object as it stands there, a date in the
passage's own order of day and month. If no passage states the object, the worker selects [-1], and
then:

- If the question's kind says that its facts are common knowledge, the worker answers from its own
  knowledge, as its prompt asks. A model can have learnt such a fact from the pre-training text.
- The worker cannot know any other fact, and a demonstration that states it would teach a model to
  invent facts. So the worker says that nothing was found, and the planner asks once more in other
  words, then gives up. The prompt asks for an answer here too, so the warm-up does not learn such a
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
class _AskedFact:
    """The fact that one of the script's questions asks for."""

    evidence: Evidence
    is_known: bool  # common knowledge, as the kind of the planner's question says


class TextScript:
    """Writes planner and worker over passages.

    It remembers which triple each of its questions asks for: a worker is shown the question
    alone.
    """

    def __init__(self, contract: Contract) -> None:
        self._contract = contract
        self._facts_by_query: dict[str, _AskedFact] = {}

    def open_searches(
        self, state: PlannerState
    ) -> list[tuple[Evidence, protocol.SearchCall]] | None:
        """Return the triples to ask for now, each in its next wording.

        None says that one was asked in every wording in vain.
        """
        asked_queries = {search.query for search in state.searches}
        for evidences in chains.evidence_rounds(state.question.evidences):
            calls = []
            for evidence in evidences:
                wordings = queries_of(evidence)
                past_searches = [search for search in state.searches if search.query in wordings]
                if any(_is_answered(search, evidence, state) for search in past_searches):
                    continue
                new_wordings = [query for query in wordings if query not in asked_queries]
                if not new_wordings:
                    return None
                query = new_wordings[0]
                self._facts_by_query[query] = _AskedFact(
                    evidence=evidence, is_known=state.question.is_known
                )
                calls.append((evidence, protocol.SearchCall(query=query, candidate=None)))
            if calls:
                return calls
        return []

    def read(self, state: WorkerState) -> str:
        """Write the worker's turn about one question."""
        fact_asked = self._facts_by_query[state.query]
        evidence = fact_asked.evidence
        attribute = f"{evidence.relation} of {evidence.subject}"

        statement = first_statement(evidence, state.materials)
        if statement is not None:
            number, value = statement
            thought = f"Passage [{number}] states the {attribute}: {value}."
            return self._contract.write_worker(thought, [number], f"The {attribute} is {value}.")

        thought = f"No passage states the {attribute}."
        sentence = protocol.NOTHING_FOUND
        if fact_asked.is_known:
            sentence = fact(evidence, evidence.object)
        return self._contract.write_worker(thought, [], sentence)


def _is_answered(search: Search, evidence: Evidence, state: PlannerState) -> bool:
    """Check whether a search told the planner the object of a triple.

    The object stands in a worker's sentence, or in a passage that the planner reads.
    """
    if not search.found:
        return False
    return state.split or stated_object(evidence, [search]) is not None


def without_silent_workers(conversations: Sequence[Conversation]) -> tuple[Conversation, ...]:
    """Leave out the conversations of workers that say that nothing was found.

    The prompt of a worker over texts asks for an answer from its own knowledge instead.
    """
    return tuple(
        conversation
        for conversation in conversations
        if conversation.role != WORKER or not _is_silent(conversation)
    )


def _is_silent(worker: Conversation) -> bool:
    reply = worker.turns[-1].text
    return protocol.field("sentence", reply) == protocol.NOTHING_FOUND


def query_of(relation: str, label: str) -> str:
    """Return the sub-question that asks for one relation of one entity."""
    interrogative = "Who" if relation in PERSON_RELATIONS else "What"
    return f"{interrogative} is the {relation} of {label}?"


def queries_of(evidence: Evidence) -> tuple[str, str]:
    """Return two wordings: a question, and keywords for a search engine."""
    return query_of(evidence.relation, evidence.subject), f"{evidence.subject} {evidence.relation}"


def first_statement(evidence: Evidence, materials: Sequence[Material]) -> tuple[int, str] | None:
    """Return the number of the first passage that states the object, and the words that state it.

    The passages are the subject's own ones and then those that name the subject.
    """
    subject = PARENTHESIS.sub("", evidence.subject).casefold()
    own_passages: list[int] = []
    naming_passages: list[int] = []
    for number, material in enumerate(materials):
        if PARENTHESIS.sub("", material.title).casefold() == subject:
            own_passages.append(number)
        elif subject in material.text.casefold():
            naming_passages.append(number)

    for number in (*own_passages, *naming_passages):
        for form in forms_of(evidence.object):
            whole_words = rf"(?<!\w){re.escape(form)}(?!\w)"
            match = re.search(whole_words, materials[number].text, re.IGNORECASE)
            if match is not None:
                return number, match[0]
    return None


def fact(evidence: Evidence, value: str) -> str:
    """Write the sentence that states a value as the object of a triple."""
    return f"The {evidence.relation} of {evidence.subject} is {value}."


def stated_object(evidence: Evidence, searches: Sequence[Search]) -> str | None:
    """Return the object of a triple in the words of a passage that a search found."""
    for search in searches:
        materials = [
            Material(text=text, title=text.partition(": ")[0]) for text in search.materials
        ]
        statement = first_statement(evidence, materials)
        if statement is not None:
            return statement[1]
    return None


def conclusion(question: Question, answer: str) -> str:
    """Return the thought before an answer.

    For two chains it names, in this order: what was found at their ends, with the numbers of the
    candidates they began with; which one decides; the number and the name of that one. Each step
    then follows from one look back.
    """
    ends = chains.chain_ends(question.evidences)
    if len(ends) != 2:
        return f"{answer}."
    if answer in ("yes", "no"):
        values = [group[0].object for group in ends.values()]
        return f"{' and '.join(values)}: {'same' if answer == 'yes' else 'different'}."

    first, second = ends
    labels = [entity.label for entity in question.candidates]
    are_numbered = first in labels and second in labels
    if answer not in ends or (labels and not are_numbered):
        return f"{answer}."

    first_quantity = _quantity(ends[first], ends[second])
    second_quantity = _quantity(ends[second], ends[first])
    other_label = second if answer == first else first
    comparison = _comparison(ends[answer], ends[other_label])
    if not labels:
        return (
            f"{first}: {first_quantity}. {second}: {second_quantity}. "
            f"{comparison.capitalize()}: {answer}."
        )
    first_number = labels.index(first)
    second_number = labels.index(second)
    answer_quantity = first_quantity if answer == first else second_quantity
    return (
        f"{first_quantity} [{first_number}] and {second_quantity} [{second_number}]: "
        f"{comparison} {answer_quantity} [{labels.index(answer)}] {answer}."
    )


def forms_of(value: str) -> Iterator[str]:
    """Yield the ways in which a passage may write an object.

    They are the value as it is, a date in either order, and a country as its people.
    """
    yield value
    without_parenthesis = PARENTHESIS.sub("", value)
    if without_parenthesis:
        yield without_parenthesis

    date = chains.parse_date(value)
    if date is not None and date[1]:
        year, month, day = date
        month_name = chains.MONTHS[month - 1].capitalize()
        if day:
            yield f"{day} {month_name} {year}"
            yield f"{month_name} {day}, {year}"
        else:
            yield f"{month_name} {year}"

    form = chains.country_form(value)
    if form in chains.COUNTRY_FORMS:
        country, _ = chains.COUNTRY_FORMS[form]
        forms_of_country = [
            other_form
            for other_form, (other_country, _) in chains.COUNTRY_FORMS.items()
            if other_country == country
        ]
        yield from sorted(forms_of_country, key=len, reverse=True)


def _quantity(group: Sequence[Evidence], other_group: Sequence[Evidence]) -> str:
    """Return what is compared: years, or the whole values.

    Whole values are compared where some are no dates, or where years do not decide.
    """
    years = _last_years(group)
    other_years = _last_years(other_group)
    all_have_years = len(years) == len(group) and len(other_years) == len(other_group)
    if all_have_years and years != other_years:
        return " to ".join(years)
    return " and ".join(evidence.object for evidence in group)


def _last_years(group: Sequence[Evidence]) -> list[str]:
    """Return the last year in each object that has one."""
    years_by_object = [YEAR.findall(evidence.object) for evidence in group]
    return [years[-1] for years in years_by_object if years]


def _comparison(group: Sequence[Evidence], other_group: Sequence[Evidence]) -> str:
    """Return the word that says why the first group is the answer."""
    if len(group) != len(other_group):
        return "more"
    if len(group) > 1:
        return "longer"
    date = chains.parse_date(group[0].object)
    other_date = chains.parse_date(other_group[0].object)
    if date is None or other_date is None:
        return "rather"
    return "earlier" if chains.compare_dates(date, other_date) < 0 else "later"
