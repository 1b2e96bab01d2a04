"""The prompts of EviPath's teacher, and the parser of its replies (tables 8 and 9 of the paper).

The teacher plays planner or executor. It reads the agent's own prompt and writes the agent's own
tags (`contract.py`), so the agent's parsers can read its turns.

The teacher also reads a hint that the agent never sees. The hint contains the answer, the
supporting evidence and a plan that the teacher has made, under the field names of the paper. For
the executor it contains the index of the golden evidence. As in the tables, the hint comes before
the planner's opening and after the executor's opening.

Two more prompts ask for other replies: a plan as numbered lines, and the answer to a sub-question
as one sentence. The paper shows neither of them. The wording of all prompts is our own.

In `brief` mode each set of rules is one word. This mode is for small models that have learnt these
prompts in their warm-up.
"""

import re
from collections.abc import Sequence

from mujica_jax.agents import protocol
from mujica_jax.agents.protocol import PromptMode
from mujica_jax.models.thoughts import outside_thoughts

PLAN_RULES = (
    "You split a complex question into simple ones. You are given the question and its answer, and "
    "supporting evidences if there are any: work back from them how the answer is found.\n"
    "Write one sub-question a line, numbered, in the order in which they are asked. Each asks for "
    "one fact. What only an earlier sub-question tells has no name yet: write "
    '"the director" and not who that is. Do not write the answer.\n'
    "\n"
    "Example:\n"
    "\n"
    "Question: Where was the director of film Amber Tide born?\n"
    "Answer: Ghent\n"
    "Supporting evidences:\n"
    "Amber Tide, director, Ilse Vandermark\n"
    "Ilse Vandermark, place of birth, Ghent\n"
    "Assistant: 1. Who is the director of Amber Tide?\n"
    "2. Where was the director born?"
)

_PLANNER_ADDITION = (
    "\n\n"
    "You write a model solution. You are told the answer, the supporting evidences if there are "
    "any, and a plan; the searches that you write lead there. Write every turn as one who knows "
    "only the question and the observations: do not name in a thought or a search what no "
    "observation has told yet."
)

_ANSWER_RULES = (
    "You answer a question from supporting evidences alone. Write the answer as one full sentence "
    "that mirrors the question, inside <{tag}> ... </{tag}>.\n"
    "\n"
    "Example:\n"
    "\n"
    "Question: Who is the director of Amber Tide?\n"
    "Supporting evidences:\n"
    "Amber Tide, director, Ilse Vandermark\n"
    "Ilse Vandermark, place of birth, Ghent\n"
    "Assistant: <{tag}> The director of Amber Tide is Ilse Vandermark. </{tag}>"
)

_WORKER_ADDITION = (
    "\n\n"
    "You write a model solution. You are told the answer and the golden evidence: find your way to "
    "it in your thought and consider no other evidence, select exactly its indexes, and write the "
    "answer as the sentence. Do not mention that you were told."
)

_BRIEF_ADDITION = " Told."
_BRIEF_ANSWER_RULES = "Answer."

_PLANNED = re.compile(r"^\s*\d{1,2}[.)]\s*(\S.*)$", re.MULTILINE)


def planner_addition(mode: PromptMode) -> str:
    """Return the text that is added to the planner's rules if a teacher plays the planner."""
    return _BRIEF_ADDITION if mode == "brief" else _PLANNER_ADDITION


def worker_addition(mode: PromptMode) -> str:
    """Return the text that is added to the worker's rules if a teacher plays the worker."""
    return _BRIEF_ADDITION if mode == "brief" else _WORKER_ADDITION


def answer_rules(mode: PromptMode, tag: str) -> str:
    """Return the rules for answering a sub-question from gold evidence.

    The answer is written inside of the tag `tag`.
    """
    return _BRIEF_ANSWER_RULES if mode == "brief" else _ANSWER_RULES.format(tag=tag)


def answer_stops(tag: str) -> tuple[str, ...]:
    """Return the strings that end the answer to a sub-question."""
    return (f"</{tag}>",)


def write_sentence(tag: str, sentence: str) -> str:
    """Write the answer to a sub-question, inside of the tag `tag`."""
    return f"<{tag}> {sentence} </{tag}>"


def plan_request(question: str, answer: str, evidence: Sequence[str]) -> str:
    """Write the message that asks for a plan: the question, its answer and the evidence."""
    lines = [f"Question: {protocol.one_line(question)}", *_answer_and_evidence(answer, evidence)]
    return "\n".join(lines)


def planner_hint(answer: str, evidence: Sequence[str], plan: Sequence[str]) -> str:
    """Write the hint for the planner's teacher. It comes before the planner's opening."""
    lines = _answer_and_evidence(answer, evidence)
    if plan:
        lines += ["Plan:", *numbered(plan)]
    return "\n".join(lines)


def answer_request(query: str, evidence: Sequence[str]) -> str:
    """Write the message that asks for the answer to a sub-question from gold evidence."""
    return "\n".join([f"Question: {protocol.one_line(query)}", *_evidence(evidence)])


def worker_hint(answer: str, golden: Sequence[tuple[int, str]], mode: PromptMode) -> str:
    """Write the hint for the worker's teacher: the answer and the golden evidence.

    It comes after the worker's opening. `golden` holds the index and the text of each piece of
    evidence. In `brief` mode the hint contains only the indexes.
    """
    if mode == "brief":
        evidence = "".join(f"[{index}]" for index, _ in golden)
    else:
        evidence = "\n".join(f"[{index}] {protocol.one_line(text)}" for index, text in golden)
    return f"Answer: {answer}\nGolden evidence: {evidence}"


def plan_in_thought(plan: Sequence[str]) -> str:
    """Write the plan as the beginning of the planner's first thought (tables 8 and 10)."""
    return "\n".join(["To solve this problem, I need to ask:", *numbered(plan)])


def parse_plan(text: str) -> list[str]:
    """Return the sub-questions of a plan, which are the numbered lines of the reply."""
    return [protocol.one_line(line) for line in _PLANNED.findall(outside_thoughts(text))]


def numbered(plan: Sequence[str]) -> list[str]:
    """Return the sub-questions of a plan as numbered lines."""
    return [f"{number}. {question}" for number, question in enumerate(plan, start=1)]


def sample_text() -> str:
    """Return the words of the brief prompts, as training text for a new tokenizer."""
    hint = planner_hint("yes", ["a, of, b"], [])
    golden = worker_hint("The of is.", [(0, "")], "brief")
    return f"Plan.{_BRIEF_ADDITION}\n{_BRIEF_ANSWER_RULES}\n{hint}\n{golden}"


def _answer_and_evidence(answer: str, evidence: Sequence[str]) -> list[str]:
    """Return the lines with the answer and, if there is any, the evidence."""
    lines = [f"Answer: {protocol.one_line(answer)}"]
    if evidence:
        lines += _evidence(evidence)
    return lines


def _evidence(evidence: Sequence[str]) -> list[str]:
    """Return the lines with the evidence, below their heading."""
    return ["Supporting evidences:", *map(protocol.one_line, evidence)]
