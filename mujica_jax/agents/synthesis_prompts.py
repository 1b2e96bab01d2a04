"""What a teacher of EviPath is asked, and how its replies are read (tables 8 and 9 of the paper; the wording is ours).

A teacher that plays planner or worker reads the agent's own worked examples and writes the agent's own tags
(`protocol.py`), so its turns are read by the same parsers. Beside them it is shown what the agent never is: answer,
gold evidence, plan. Two more prompts have replies of their own: the plan, numbered lines, and a sub-question's answer,
one <sentence>.
"""

import re
from collections.abc import Sequence

from mujica_jax.agents import protocol
from mujica_jax.models.thoughts import first_thought, outside_thoughts

SENTENCE_STOPS = ("</sentence>",)

PLAN_RULES = """You split a complex question into simple ones. You are given the question and its answer, and evidence \
if there is any: work back from them how the answer is found.
Write one sub-question a line, numbered, in the order in which they are asked. Each asks for one fact. What only an \
earlier sub-question tells has no name yet: write "the director" and not who that is. Do not write the answer.

Example:

Question: Where was the director of film Amber Tide born?
Answer: Ghent
Evidence:
Amber Tide, director, Ilse Vandermark
Ilse Vandermark, place of birth, Ghent
Assistant: 1. Who is the director of Amber Tide?
2. Where was the director born?"""

PLANNER_ADDITION = """

You write a model solution. You are told the answer, the evidence if there is any, and a plan; the searches that you \
write lead there. Write every turn as one who knows only the question and the observations: do not name in a thought \
or a search what no observation has told yet."""

ANSWER_RULES = """You answer a question from evidence alone. Write the answer as one full sentence that mirrors the \
question, inside <sentence> ... </sentence>.

Example:

Question: Who is the director of Amber Tide?
Evidence:
Amber Tide, director, Ilse Vandermark
Ilse Vandermark, place of birth, Ghent
Assistant: <sentence> The director of Amber Tide is Ilse Vandermark. </sentence>"""

WORKER_ADDITION = """

You write a model solution. You are told the answer and which indexes state it: find your way to them in your thought, \
select exactly these, and write the answer as the sentence. Do not mention that you were told."""

_PLANNED = re.compile(r"^\s*\d{1,2}[.)]\s*(\S.*)$", re.MULTILINE)


def plan_request(question: str, answer: str, evidence: Sequence[str]) -> str:
    return "\n".join([f"Question: {protocol.one_line(question)}", *_told(answer, evidence)])


def planner_hint(answer: str, evidence: Sequence[str], plan: Sequence[str]) -> str:
    """Stands before the opening that the agent's own planner reads."""
    return "\n".join([*_told(answer, evidence), *(["Plan:", *numbered(plan)] if plan else [])])


def answer_request(query: str, evidence: Sequence[str]) -> str:
    return "\n".join([f"Question: {protocol.one_line(query)}", "Evidence:", *map(protocol.one_line, evidence)])


def worker_hint(answer: str, places: Sequence[int]) -> str:
    """Stands behind the opening that the agent's own worker reads."""
    return f"Answer: {answer}\nStated by: {''.join(f'[{place}]' for place in places)}"


def plan_in_thought(plan: Sequence[str]) -> str:
    """The plan is the beginning of the planner's first thought (table 8)."""
    return "\n".join(["To answer this, I need to ask:", *numbered(plan)])


def parse_plan(text: str) -> list[str]:
    return [protocol.one_line(line) for line in _PLANNED.findall(outside_thoughts(text))]


def parse_thought(text: str) -> str:
    """The first one; empty where there is none."""
    return first_thought(text)


def numbered(plan: Sequence[str]) -> list[str]:
    return [f"{number}. {question}" for number, question in enumerate(plan, start=1)]


def _told(answer: str, evidence: Sequence[str]) -> list[str]:
    shown = ["Evidence:", *map(protocol.one_line, evidence)] if evidence else []
    return [f"Answer: {protocol.one_line(answer)}", *shown]
