"""The script that plays the agent Decex: it recalls or searches for the gold triples in order.

The pre-training text states the facts that a model can recall. If the kind of a question ends with
"known", the script answers its sub-questions from memory, in the words of that text. It solves any
other question by searches.

The first query of a sub-question consists of keywords. If the passages do not state the object of
the triple, the script asks the sub-question once more and searches for its own words. If that fails
too, the script ends the episode without an answer.
"""

import dataclasses
from collections.abc import Iterator

from mujica_jax.agents import decex, protocol
from mujica_jax.agents.decex import DecexState, Step
from mujica_jax.agents.single import INFORMATION_TAG, numbered_passages
from mujica_jax.demonstrations.mujica_text import conclusion, fact, first_statement, queries_of
from mujica_jax.records import UNKNOWN, Evidence, Question
from mujica_jax.tasks.task import Material
from mujica_jax.tasks.two_wiki.chains import evidence_rounds


def write(state: DecexState) -> str:
    """Return the next turn: one thought, followed by a search or the answer."""
    text = f"<think> {_read(state)}"
    for evidence in _evidences_in_order(state.question):
        # Skip a triple that an earlier step has solved. Give up after two failed searches.
        wording, keywords = queries_of(evidence)
        past_steps = [step for step in state.steps if step.question == wording]
        if any(_stated_value(evidence, step) is not None for step in past_steps):
            continue
        if len(past_steps) == len(queries_of(evidence)):
            return f"<think> {protocol.NOTHING_FOUND} </think>"

        thought = f"I need the {evidence.relation} of {evidence.subject}."
        text += decex.write_sub_question(thought, wording)
        if not state.question.is_known:
            query = wording if past_steps else keywords
            return text + decex.write_search(query)
        text += decex.write_memory(f"{evidence.subject}, {evidence.relation}.", _recalled(evidence))

    question = dataclasses.replace(state.question, candidates=())
    answer = question.answers[0]
    return text + decex.write_answer(conclusion(question, answer), answer)


def sample_text() -> Iterator[str]:
    """Yield the words of prompts and scripts, as training text for a new tokenizer."""
    yield decex.opening("brief").system
    yield "<think> " + decex.write_sub_question("The of is. I need the of .", "Who is the of ?")
    yield decex.write_memory(", of.", f"the of is {UNKNOWN}.") + decex.write_search("of")
    yield "<think> " + decex.write_answer("yes", "no")
    passage = numbered_passages([Material(text="")])
    yield f"<{INFORMATION_TAG}>\n{passage}\n</{INFORMATION_TAG}> {numbered_passages([])}"


def _recalled(evidence: Evidence) -> str:
    """Return the sentence of the pre-training text with a small first letter.

    It can then continue another sentence.
    """
    sentence = fact(evidence, evidence.object)
    return sentence[0].lower() + sentence[1:]


def _evidences_in_order(question: Question) -> list[Evidence]:
    """Return the gold triples in the order in which they can be asked for."""
    return [evidence for group in evidence_rounds(question.evidences) for evidence in group]


def _stated_value(evidence: Evidence, step: Step) -> str | None:
    """Return the object of a triple as the step states it, or None if the step does not."""
    if step.recalled is not None:
        return evidence.object
    statement = first_statement(evidence, step.materials)
    return None if statement is None else statement[1]


def _read(state: DecexState) -> str:
    """Return a sentence that says what the passages of the last search state."""
    if not state.steps:
        return ""
    last_step = state.steps[-1]
    evidence = next(
        evidence
        for evidence in _evidences_in_order(state.question)
        if queries_of(evidence)[0] == last_step.question
    )
    value = _stated_value(evidence, last_step)
    if value is None:
        return f"{protocol.NOTHING_FOUND} "
    return f"{fact(evidence, value)} "
