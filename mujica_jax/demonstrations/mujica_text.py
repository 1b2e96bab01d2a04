"""The script that plays planner and worker of Mujica in text environments.

The planner asks for each gold triple whose subject is known. The worker looks for the object in the
passages. It names the passage and repeats the object exactly as the passage writes it, for example
a date with day and month in the same order.

If no passage states the object, the worker selects [-1]. Its sentence then depends on the question:

- If the facts of the question are common knowledge, according to its kind, the worker answers from
  its own knowledge, as its prompt asks. A model can have learnt the fact from the pre-training text.
- Otherwise the worker cannot know the fact. A demonstration that states it would teach a model to
  invent facts. The worker therefore says that nothing was found. The planner asks once more in
  other words and then gives up. Because the worker's prompt asks for an answer here too, the
  warm-up leaves such replies out (`without_silent_workers`).
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
    """The fact that a sub-question of the script asks for.

    `is_known` is True if the facts of the planner's question are common knowledge.
    """

    evidence: Evidence
    is_known: bool


class TextScript:
    """The script for planner and worker in text environments.

    A worker sees only the sub-question. The script therefore remembers which triple each
    sub-question asks for.
    """

    def __init__(self, contract: Contract) -> None:
        self._contract = contract
        self._facts_by_query: dict[str, _AskedFact] = {}

    def open_searches(
        self, state: PlannerState
    ) -> list[tuple[Evidence, protocol.SearchCall]] | None:
        """Return the triples to ask for now, each with the search in its next wording.

        Returns an empty list if all triples are answered. Returns None if a triple was asked for in
        every wording without success.
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
        """Write the worker's turn for a sub-question."""
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
    """Return whether the planner has learnt the object of a triple from a search.

    The object is in the worker's sentence, or in a passage that the planner reads itself.
    """
    if not search.found:
        return False
    return state.split or stated_object(evidence, [search]) is not None


def without_silent_workers(conversations: Sequence[Conversation]) -> tuple[Conversation, ...]:
    """Return the conversations without those of workers who say that nothing was found.

    In text environments, the worker's prompt asks for an answer from its own knowledge instead.
    """
    return tuple(
        conversation
        for conversation in conversations
        if conversation.role != WORKER or not _is_silent(conversation)
    )


def _is_silent(worker: Conversation) -> bool:
    """Return whether the worker says that nothing was found."""
    reply = worker.turns[-1].text
    return protocol.field("sentence", reply) == protocol.NOTHING_FOUND


def query_of(relation: str, label: str) -> str:
    """Return the sub-question that asks for one relation of one entity."""
    interrogative = "Who" if relation in PERSON_RELATIONS else "What"
    return f"{interrogative} is the {relation} of {label}?"


def queries_of(evidence: Evidence) -> tuple[str, str]:
    """Return the two wordings of a sub-question: a question, and keywords for a search engine."""
    return query_of(evidence.relation, evidence.subject), f"{evidence.subject} {evidence.relation}"


def first_statement(evidence: Evidence, materials: Sequence[Material]) -> tuple[int, str] | None:
    """Return the first passage that states the object of a triple, or None.

    The result is the number of the passage and the object in its words. Passages about the subject
    come first, then passages that mention the subject. Other passages do not count.
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
    """Return the object of a triple in the words of the first passage that states it, or None."""
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

    A comparison has two chains of triples. The thought then names, in this order:

    1. the values at the ends of both chains, each with the number of the candidate that it belongs
       to;
    2. the word that decides, such as "earlier";
    3. the value that decides, with the number and the name of its candidate.

    A model can then write each part by looking back once.
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
    """Yield the forms in which a passage may write an object.

    They are the value itself, a date with day and month in either order, and other forms of a
    country, such as its people.
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
    """Return the words that are compared: the years, or else the whole values.

    The whole values are compared if some of them have no year, or if the years are equal.
    """
    years = _last_years(group)
    other_years = _last_years(other_group)
    all_have_years = len(years) == len(group) and len(other_years) == len(other_group)
    if all_have_years and years != other_years:
        return " to ".join(years)
    return " and ".join(evidence.object for evidence in group)


def _last_years(group: Sequence[Evidence]) -> list[str]:
    """Return the last year in each object, without the objects that contain no year."""
    years_by_object = [YEAR.findall(evidence.object) for evidence in group]
    return [years[-1] for years in years_by_object if years]


def _comparison(group: Sequence[Evidence], other_group: Sequence[Evidence]) -> str:
    """Return the word that says why the first group of triples belongs to the answer."""
    if len(group) != len(other_group):
        return "more"
    if len(group) > 1:
        return "longer"
    date = chains.parse_date(group[0].object)
    other_date = chains.parse_date(other_group[0].object)
    if date is None or other_date is None:
        return "rather"
    return "earlier" if chains.compare_dates(date, other_date) < 0 else "later"
