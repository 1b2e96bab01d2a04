"""The script that plays the agent Single, which searches and reads in one conversation.

If the facts of a question are common knowledge, the script states them in order from memory and
then answers. The tiny world marks such questions by their kind, "compositional, known".

For any other question it searches step by step. The query consists of keywords for the first gold
triple that no passage has stated so far. If that search finds nothing, the next query is only the
subject of the triple. If that finds nothing either, the episode ends without an answer.

Before a search, the thought says that the fact is unknown, in the same words in which the fact
would be recalled. A model that remembers the fact can then notice that it knows it.
"""

import dataclasses
from collections.abc import Iterator

from mujica_jax.agents import protocol
from mujica_jax.agents.single import (
    INFORMATION,
    INFORMATION_TAG,
    SingleState,
    numbered_passages,
    opening,
)
from mujica_jax.demonstrations.mujica_text import conclusion, fact, stated_object
from mujica_jax.records import UNKNOWN, Evidence, Question, Search
from mujica_jax.tasks.task import Material
from mujica_jax.tasks.two_wiki.chains import evidence_rounds


def write(state: SingleState, *, recalls: bool = True) -> str:
    """Return the next turn. If `recalls` is False, it searches for common knowledge too."""
    question = dataclasses.replace(state.question, candidates=())
    answer = question.answers[0]
    evidences = [evidence for group in evidence_rounds(question.evidences) for evidence in group]

    # Answer from memory.
    if recalls and question.is_known:
        facts = " ".join(fact(evidence, evidence.object) for evidence in evidences)
        return _last_turn(state, facts, conclusion(question, answer), answer)

    # Search for the first triple that no passage states. The thought names the facts that the last
    # search added.
    new_facts: list[str] = []
    for evidence in evidences:
        value = stated_object(evidence, state.searches)
        if value is None:
            return _search(state, evidence, new_facts)
        is_new = stated_object(evidence, state.searches[:-1]) is None
        if is_new:
            new_facts.append(fact(evidence, value))

    # All facts are known, so answer.
    closing_thought = " ".join([*new_facts, conclusion(question, answer)])
    return _last_turn(state, protocol.NOTHING_FOUND, closing_thought, answer)


def _search(state: SingleState, evidence: Evidence, new_facts: list[str]) -> str:
    """Return a turn that searches for a triple, or one that gives up after two failed searches."""
    asked_queries = {search.query for search in state.searches}
    # The queries are keywords because the agent's prompt asks for keywords.
    for query in (f"{evidence.subject} {evidence.relation}", evidence.subject):
        if query not in asked_queries:
            thought = " ".join([*new_facts, fact(evidence, UNKNOWN)])
            return f"{_thought(state, thought)}\n<search> {query} </search>"
    return _thought(state, protocol.NOTHING_FOUND)


def sample_text() -> Iterator[str]:
    """Yield the words of prompts and turns, as training text for a new tokenizer."""
    for style in ("reflect", "search_r1"):
        yield opening(style, "brief").system
        question = Question(id="", text="", answers=("",))
        first_state = SingleState(question=question, searches=(), style=style)
        past_search = Search(iteration=0, query="", materials=())
        later_state = dataclasses.replace(first_state, searches=(past_search,))
        for state in (first_state, later_state):
            yield f"{_thought(state, f'The of is {UNKNOWN}.')}\n<search> of </search>"
            yield _last_turn(
                state,
                protocol.NOTHING_FOUND,
                "Earlier Later More Longer Rather same: and.",
                "yes no",
            )
    passages = f"{numbered_passages([])}\n{numbered_passages([Material(text='')])}"
    yield f"Question: What\n{INFORMATION}\n{passages}\n</{INFORMATION_TAG}>"
    yield "\n".join(f"[{number}]" for number in range(8))


def _last_turn(state: SingleState, thought: str, closing_thought: str, answer: str) -> str:
    """Return the turn that answers. `thought` is written only in the first turn of an episode."""
    answer_field = f"<answer> {answer} </answer>"
    is_first_turn = not state.searches
    if state.style == "search_r1":
        whole_thought = f"{thought} {closing_thought}" if is_first_turn else closing_thought
        return f"<think> {whole_thought} </think>\n{answer_field}"

    fields = [f"<reflect> {closing_thought} </reflect>", answer_field]
    if is_first_turn:
        fields.insert(0, f"<think> {thought} </think>")
    return "\n".join(fields)


def _thought(state: SingleState, text: str) -> str:
    """Return a thought inside of the tag that this turn requires."""
    tag = "reflect" if state.searches and state.style == "reflect" else "think"
    return f"<{tag}> {text} </{tag}>"
