"""What the scripted demonstrator writes as DecEx: the gold triples in their order, each recalled or
searched for.

Which facts a model can recall is what the pre-training text said of them: a question whose kind
says "known" is solved from memory, in the words of that text, any other by searches. A query is
worded for a search engine; where its passages do not state the object, the sub-question is asked
once more and searched for in its own words, then given up.
"""

import dataclasses
from collections.abc import Iterator

from mujica_jax.agents import decex, protocol
from mujica_jax.agents.decex import DecexState, Step
from mujica_jax.agents.scripted_text import conclusion, fact, first_statement, queries_of
from mujica_jax.agents.single import INFORMATION_TAG, numbered_passages
from mujica_jax.records import UNKNOWN, Evidence, Question
from mujica_jax.tasks.task import Material
from mujica_jax.tasks.two_wiki.chains import evidence_rounds


def write(state: DecexState) -> str:
    """Return the next turn: one thought, then a search or the answer."""
    thought = f"<think> {_read(state)}"
    for evidence in _in_order(state.question):
        wording, keywords = queries_of(evidence)
        tried = [step for step in state.steps if step.question == wording]
        if any(_value(evidence, step) is not None for step in tried):
            continue
        if len(tried) == len(queries_of(evidence)):
            return f"<think> {protocol.NOTHING_FOUND} </think>"
        thought += decex.write_sub_question(
            f"I need the {evidence.relation} of {evidence.subject}.", wording
        )
        if not state.question.is_known:
            return thought + decex.write_search(wording if tried else keywords)
        thought += decex.write_memory(
            f"{evidence.subject}, {evidence.relation}.", _recalled(evidence)
        )
    question, answer = dataclasses.replace(state.question, candidates=()), state.question.answers[0]
    return thought + decex.write_answer(conclusion(question, answer), answer)


def sample_text() -> Iterator[str]:
    """Yield the words of prompts and scripts, for a from-scratch tokenizer."""
    yield decex.opening("brief").system
    yield "<think> " + decex.write_sub_question("The of is. I need the of .", "Who is the of ?")
    yield decex.write_memory(", of.", f"the of is {UNKNOWN}.") + decex.write_search("of")
    yield "<think> " + decex.write_answer("yes", "no")
    passage = numbered_passages([Material(text="")])
    yield f"<{INFORMATION_TAG}>\n{passage}\n</{INFORMATION_TAG}> {numbered_passages([])}"


def _recalled(evidence: Evidence) -> str:
    """Return the sentence of the pre-training text, to stand within another sentence."""
    sentence = fact(evidence, evidence.object)
    return sentence[0].lower() + sentence[1:]


def _in_order(question: Question) -> list[Evidence]:
    return [evidence for group in evidence_rounds(question.evidences) for evidence in group]


def _value(evidence: Evidence, step: Step) -> str | None:
    """The object in the words in which the step states it."""
    if step.recalled is not None:
        return evidence.object
    stated = first_statement(evidence, step.materials)
    return None if stated is None else stated[1]


def _read(state: DecexState) -> str:
    """What the last search's passages say."""
    if not state.steps:
        return ""
    last = state.steps[-1]
    evidence = next(one for one in _in_order(state.question) if queries_of(one)[0] == last.question)
    value = _value(evidence, last)
    return f"{protocol.NOTHING_FOUND} " if value is None else f"{fact(evidence, value)} "
