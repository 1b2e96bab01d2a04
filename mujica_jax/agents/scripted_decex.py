"""What the scripted demonstrator writes as DecEx: the gold triples in their order, each remembered or searched for.

Which facts a model can remember is what the pre-training text said of them: a question whose kind says "known" is
solved from memory, in the words of that text, any other by searches. A query is worded for a search engine; where its
passages do not state the object, the sub-question is asked once more and searched for in its own words, then given up.
"""

import dataclasses
from collections.abc import Iterator

from mujica_jax.agents import decex, protocol
from mujica_jax.agents.decex import DecexState, Decision, Solution, Step
from mujica_jax.agents.scripted_text import conclusion, fact, first_statement, queries_of
from mujica_jax.agents.single import information
from mujica_jax.records import UNKNOWN, Evidence, Question
from mujica_jax.tasks.task import Material
from mujica_jax.tasks.two_wiki.chains import evidence_rounds


def write(state: DecexState) -> str:
    """The next turn."""
    return _decide(state) if state.asked is None else _solve(state, state.asked)


def sample_text() -> Iterator[str]:
    """The words of prompts and scripts, for a from-scratch tokenizer."""
    yield f"{decex.opening('brief').system}\n{decex.SOLVE}\n{decex.GO_ON}"
    yield decex.write_decision("The of is. I need the of .", Decision(question="Who is the of ?"))
    yield decex.write_decision("yes", Decision(answer="no"))
    yield decex.write_solution(Solution(recalled=f"The of is {UNKNOWN}."))
    yield decex.write_solution(Solution(query="of"))
    yield information((Material(text=""),))


def _decide(state: DecexState) -> str:
    read = _read(state)
    for evidence in _in_order(state.question):
        wording = queries_of(evidence)[0]
        tried = [step for step in state.steps if step.question == wording]
        if any(_value(evidence, step) is not None for step in tried):
            continue
        if len(tried) == len(queries_of(evidence)):
            return f"<think> {protocol.NOTHING_FOUND} </think>"
        thought = f"{read}I need the {evidence.relation} of {evidence.subject}."
        return decex.write_decision(thought, Decision(question=wording))
    question, answer = dataclasses.replace(state.question, candidates=()), state.question.answers[0]
    return decex.write_decision(f"{read}{conclusion(question, answer)}", Decision(answer=answer))


def _solve(state: DecexState, asked: str) -> str:
    evidence = next(one for one in _in_order(state.question) if queries_of(one)[0] == asked)
    if state.question.is_known:
        return decex.write_solution(Solution(recalled=fact(evidence, evidence.object)))
    wording, keywords = queries_of(evidence)
    tried = any(step.question == asked for step in state.steps)
    return decex.write_solution(Solution(query=wording if tried else keywords))


def _in_order(question: Question) -> list[Evidence]:
    return [evidence for group in evidence_rounds(question.evidences) for evidence in group]


def _value(evidence: Evidence, step: Step) -> str | None:
    """The object in the words in which the step states it."""
    if step.recalled is not None:
        return evidence.object
    stated = first_statement(evidence, step.materials)
    return None if stated is None else stated[1]


def _read(state: DecexState) -> str:
    """What the last step's passages say; nothing of what was remembered, which is a sentence already."""
    if not state.steps or state.steps[-1].recalled is not None:
        return ""
    last = state.steps[-1]
    evidence = next(one for one in _in_order(state.question) if queries_of(one)[0] == last.question)
    value = _value(evidence, last)
    return f"{protocol.NOTHING_FOUND} " if value is None else f"{fact(evidence, value)} "
