"""What the scripted demonstrator writes for the agent that searches and reads in one conversation
(`single.py`).

A question whose facts are common knowledge (the tiny world says so in its kind, "compositional,
known") is answered from memory: the facts in order, then the answer. Any other is searched step by
step: keywords for the first gold triple that no passage so far states, its subject alone where they
were in vain, and then the episode ends without an answer. What is searched for is said to be
unknown in the words in which it would be recalled, so that a model that remembers it can notice.
"""

import dataclasses
from collections.abc import Iterator

from mujica_jax.agents import protocol
from mujica_jax.agents.scripted_text import conclusion, fact, stated
from mujica_jax.agents.single import (
    INFORMATION,
    INFORMATION_TAG,
    SingleState,
    numbered_passages,
    opening,
)
from mujica_jax.records import UNKNOWN, Question, Search
from mujica_jax.tasks.task import Material
from mujica_jax.tasks.two_wiki.chains import evidence_rounds


def write(state: SingleState, *, recalls: bool = True) -> str:
    """The next turn. One that does not recall searches for what is common knowledge, too."""
    question, answer = dataclasses.replace(state.question, candidates=()), state.question.answers[0]
    evidences = [evidence for group in evidence_rounds(question.evidences) for evidence in group]
    if recalls and question.is_known:
        return _turn(
            state,
            " ".join(fact(one, one.object) for one in evidences),
            conclusion(question, answer),
            answer,
        )
    asked = {search.query for search in state.searches}
    learnt: list[str] = []  # by the last search
    for evidence in evidences:
        value = stated(evidence, state.searches)
        if value is None:
            keywords = (
                f"{evidence.subject} {evidence.relation}",
                evidence.subject,
            )  # as the agent's prompt asks for
            query = next((words for words in keywords if words not in asked), None)
            if query is None:
                return _thought(state, protocol.NOTHING_FOUND)
            return (
                f"{_thought(state, ' '.join([*learnt, fact(evidence, UNKNOWN)]))}\n"
                f"<search> {query} </search>"
            )
        if stated(evidence, state.searches[:-1]) is None:
            learnt.append(fact(evidence, value))
    return _turn(
        state, protocol.NOTHING_FOUND, " ".join([*learnt, conclusion(question, answer)]), answer
    )


def sample_text() -> Iterator[str]:
    """The words of prompts and turns, for a from-scratch tokenizer."""
    for style in ("reflect", "search_r1"):
        yield opening(style, "brief").system
        state = SingleState(
            question=Question(id="", text="", answers=("",)), searches=(), style=style
        )
        later = dataclasses.replace(state, searches=(Search(iteration=0, query="", materials=()),))
        for each in (state, later):
            yield f"{_thought(each, f'The of is {UNKNOWN}.')}\n<search> of </search>"
            yield _turn(
                each,
                protocol.NOTHING_FOUND,
                "Earlier Later More Longer Rather same: and.",
                "yes no",
            )
    passages = f"{numbered_passages([])}\n{numbered_passages([Material(text='')])}"
    yield f"Question: What\n{INFORMATION}\n{passages}\n</{INFORMATION_TAG}>"
    yield "\n".join(f"[{number}]" for number in range(8))


def _turn(state: SingleState, thought: str, concluding: str, answer: str) -> str:
    """A last turn. The first of an episode thinks before it concludes."""
    closing = f"<answer> {answer} </answer>"
    if state.style == "search_r1":
        said = concluding if state.searches else f"{thought} {concluding}"
        return f"<think> {said} </think>\n{closing}"
    opening = [] if state.searches else [f"<think> {thought} </think>"]
    return "\n".join([*opening, f"<reflect> {concluding} </reflect>", closing])


def _thought(state: SingleState, text: str) -> str:
    tag = "reflect" if state.searches and state.style == "reflect" else "think"
    return f"<{tag}> {text} </{tag}>"
