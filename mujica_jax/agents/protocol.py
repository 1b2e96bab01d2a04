"""The contract between planner, worker and environment: the prompts, and the parser of what comes back.

The tags and fields are those of the paper's prompt tables (Mujica-MyGO, first version, tables 7-10); the wording is
ours.

    planner, graph   <think> ... </think> <action> Search([i], "...") ... </action>     or  <answer> ... </answer>
    planner, text    <think> ... </think> <search> ... </search> <search> ... </search> or  <answer> ... </answer>
    worker           <think> ... </think> <select> [i][j] </select> <sentence> ... </sentence>

Everything here reads only text that the model generated. What environments, users and the other agent say reaches a
prompt through `Tokenizer.encode_plain`, which neutralises these tags, and on one line, so that it can neither end a
field nor number a material.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import Literal

from mujica_jax.records import Entity, StopReason
from mujica_jax.tasks.task import EnvironmentKind

PromptMode = Literal["brief", "zero_shot", "few_shot"]

NOTHING_FOUND = "No relevant information found."
OBSERVATION = "Obs:"  # begins a message to the planner; a model that writes it itself is cut there


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchCall:
    query: str
    candidate: int | None  # number of the candidate searched; None in text environments


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannerAction:
    """One parsed planner turn: searches, or an answer, or neither with the reason."""

    searches: tuple[SearchCall, ...] = ()
    answer: str | None = None
    refused: StopReason | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerReply:
    """One parsed worker turn. If a field is missing, `well_formed` is False and the sentence says nothing was found."""

    selected: tuple[int, ...]
    sentence: str
    well_formed: bool

    @property
    def found(self) -> bool:
        return bool(self.selected)


def stop_strings(role: Literal["planner", "worker"], kind: EnvironmentKind) -> tuple[str, ...]:
    """What ends a turn besides the stop token: the tag that closes it, and the beginning of an observation.

    A planner over texts may write several searches, so its closing tag of a search ends nothing."""
    if role == "worker":
        return ("</sentence>", OBSERVATION)
    return ("</answer>", OBSERVATION) if kind == "text" else ("</action>", "</answer>", OBSERVATION)


# --- parsing what the model wrote ---

_THINK = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)  # a thought that never ends hides all that follows
_ACTION = re.compile(r"<action>(.*?)</action>", re.DOTALL)
_SEARCH_TAG = re.compile(r"<search>(.*?)</search>", re.DOTALL)
# A query ends at the first quotation mark before a bracket: names such as "Weird Al" Yankovic hold quotation marks
# themselves.
_SEARCH_CALL = re.compile(r"Search\(\s*\[?\s*(\d{1,6})\s*\]?\s*,\s*\"([^\n]*?)\"\s*\)")
_INDEX = re.compile(r"\[\s*(-?\d{1,6})\s*\]")


def without_thoughts(text: str) -> str:
    return _THINK.sub("", text)


def field(tag: str, text: str) -> str | None:
    """What a turn says first between these tags, outside of its thoughts, on one line."""
    found = re.search(f"<{tag}>(.*?)</{tag}>", without_thoughts(text), re.DOTALL)
    return None if found is None else one_line(found[1])


def parse_answer(text: str) -> str | None:
    return field("answer", text)


def parse_planner(text: str, kind: EnvironmentKind, *, candidates: int, max_searches: int) -> PlannerAction:
    """Read one planner turn. `candidates` is how many are numbered so far; thoughts are not read.

    An answer ends the episode even where the turn also searches: searching on after an answer has no meaning."""
    said = without_thoughts(text)
    if (answer := parse_answer(text)) is not None:
        return PlannerAction(answer=answer)
    if kind == "graph":
        calls = [
            SearchCall(query=one_line(query), candidate=int(number))
            for action in _ACTION.findall(said)
            for number, query in _SEARCH_CALL.findall(action)
        ]
        if any(call.candidate >= candidates for call in calls if call.candidate is not None):
            return PlannerAction(refused=StopReason.UNKNOWN_CANDIDATE)
    else:
        calls = [SearchCall(query=one_line(query), candidate=None) for query in _SEARCH_TAG.findall(said)]
    calls = [call for call in dict.fromkeys(calls) if call.query]
    if not calls:
        return PlannerAction(refused=StopReason.NO_ACTION)
    if len(calls) > max_searches:
        return PlannerAction(refused=StopReason.TOO_MANY_SEARCHES)
    return PlannerAction(searches=tuple(calls))


def parse_worker(text: str, *, materials: int, sentence_tag: str = "sentence") -> WorkerReply:
    """Read one worker turn. Indexes of materials that were not shown are dropped; [-1] selects nothing."""
    select, sentence = field("select", text), field(sentence_tag, text)
    if select is None or not sentence:
        return WorkerReply(selected=(), sentence=NOTHING_FOUND, well_formed=False)
    indexes = dict.fromkeys(int(index) for index in _INDEX.findall(select))
    selected = tuple(index for index in indexes if 0 <= index < materials)
    return WorkerReply(selected=selected, sentence=sentence, well_formed=True)


def one_line(text: str) -> str:
    """White space folded, so that a field cannot begin a new line of a prompt."""
    return " ".join(text.split())


# --- what the model is shown ---


def planner_opening(question: str, candidates: Sequence[Entity]) -> str:
    lines = [f"Question: {one_line(question)}"]
    if candidates:
        lines.append(_candidate_line(candidates, first=0))
    return "\n".join(lines)


def planner_observation(sentences: Sequence[str], new_candidates: Sequence[Entity], first: int) -> str:
    """The workers' answers in the order of the searches, and the entities that are new, numbered on."""
    lines = [f"{OBSERVATION} " + " ".join(one_line(sentence) for sentence in sentences)]
    if new_candidates:
        lines.append(_candidate_line(new_candidates, first=first))
    return "\n".join(lines)


def worker_opening(query: str, materials: Sequence[Sequence[str]], kind: EnvironmentKind, mode: PromptMode) -> str:
    """The question and its materials, numbered."""
    heading = "Materials:" if kind == "graph" else "Context:"
    return "\n".join([f"Question: {one_line(query)}", heading, *numbered(materials, mode)])


def numbered(materials: Sequence[Sequence[str]], mode: PromptMode) -> list[str]:
    """A line a material, which is its parts: one of a passage and three of a triple.

    In `brief` mode, for small models trained from scratch, the number also stands between the relation that is looked
    for and its object, or at a passage's end: naming the line is then copying one token on, where otherwise it means
    looking back."""
    lines = []
    for index, material in enumerate(materials):
        *before, last = (one_line(part) for part in material)
        if mode != "brief":
            line = ", ".join([*before, last])
        else:
            line = f"{', '.join(before)} [{index}] {last}" if before else f"{last} [{index}]"
        lines.append(f"[{index}] {line}")
    return lines


def _candidate_line(candidates: Sequence[Entity], first: int) -> str:
    listed = (f"[{number}] {one_line(entity.label)}" for number, entity in enumerate(candidates, first))
    return f"Candidate: {' '.join(listed)}"


# --- what the model writes; demonstrations are written with these, so that writer and reader cannot drift apart ---


def write_graph_searches(thought: str, calls: Sequence[SearchCall]) -> str:
    lines = "\n".join(f'Search([{call.candidate}], "{call.query}")' for call in calls)
    return f"<think> {thought} </think>\n<action>\n{lines}\n</action>"


def write_text_searches(thought: str, calls: Sequence[SearchCall]) -> str:
    return f"<think> {thought} </think>\n" + "\n".join(f"<search> {call.query} </search>" for call in calls)


def write_answer(thought: str, answer: str) -> str:
    return f"<think> {thought} </think>\n<answer> {answer} </answer>"


def write_worker(thought: str, selected: Sequence[int], sentence: str) -> str:
    chosen = "".join(f"[{index}]" for index in selected) or "[-1]"
    return f"<think> {thought} </think>\n<select> {chosen} </select>\n<sentence> {sentence} </sentence>"


# --- system prompts ---

_BRIEF = {
    ("planner", "graph"): "Plan.",
    ("planner", "text"): "Plan searches.",
    ("worker", "graph"): "Extract.",
    ("worker", "text"): "Read.",
}

_RULES = {
    ("planner", "graph"): (
        "You answer questions with the help of a knowledge graph. You are given a question and numbered candidate "
        "entities.\n"
        "First think inside <think> ... </think>: what is known, what is missing, which entity to ask about.\n"
        'Then either look facts up with Search([number], "one simple question") inside <action> ... </action>, or '
        "finish.\n"
        "Put searches that do not depend on each other into the same <action>, one a line; they are answered "
        "together.\n"
        "You then receive observations, and new candidates with their numbers. A search asks for one fact about one "
        "candidate.\n"
        "When you know enough, write only the final answer, as short as possible, inside <answer> ... </answer>."
    ),
    ("planner", "text"): (
        "You answer questions with the help of a search tool.\n"
        "First think inside <think> ... </think>: what is known, what is missing, how the question splits into simpler "
        "ones.\n"
        "Then either search, each query in its own <search> ... </search>, or finish.\n"
        "A query must be explicit and ask for one fact; it cannot refer to other queries. Queries that do not depend "
        "on each other go\n"
        "into the same turn.\n"
        "You then receive observations. When you know enough, write only the final answer, as short as possible, "
        "inside\n"
        "<answer> ... </answer>."
    ),
    ("worker", "graph"): (
        "You extract one fact from numbered materials, each a triple: subject, relation, object.\n"
        "Think inside <think> ... </think> about which entity and which relation the question asks for.\n"
        "Put the index of every material that states the answer inside <select> ... </select>, like [0][2], or [-1] if "
        "none does.\n"
        "Then state the answer as one full sentence that mirrors the question inside <sentence> ... </sentence>. Use "
        "only the\n"
        f"materials. If none answers, the sentence is: {NOTHING_FOUND}"
    ),
    ("worker", "text"): (
        "You answer one question from numbered passages.\n"
        "Think inside <think> ... </think> about which passage answers it and why.\n"
        "Put the index of the passage you rely on inside <select> ... </select>, like [0], or [-1] if none helps.\n"
        "Then state the answer as one full sentence that mirrors the question inside <sentence> ... </sentence>."
    ),
}

# Invented people and works: an example must not give away a fact of any benchmark.
_EXAMPLES = {
    ("planner", "graph"): """Question: Which film came out first, Amber Tide or The Tin Orchard?
Candidate: [0] Amber Tide [1] The Tin Orchard
Assistant: <think> I need the publication dates of both films. They do not depend on each other. </think>
<action>
Search([0], "When did Amber Tide come out?")
Search([1], "When did The Tin Orchard come out?")
</action>
Obs: Amber Tide came out in 1961. The Tin Orchard came out in 1948.
Assistant: <think> 1948 is earlier than 1961, so The Tin Orchard came out first. </think>
<answer> The Tin Orchard </answer>

Question: Where was the director of film Amber Tide born?
Candidate: [0] Amber Tide
Assistant: <think> First I need the director of Amber Tide. </think>
<action>
Search([0], "Who is the director of Amber Tide?")
</action>
Obs: The director of Amber Tide is Ilse Vandermark.
Candidate: [1] Ilse Vandermark
Assistant: <think> Now I need the place of birth of Ilse Vandermark. </think>
<action>
Search([1], "Where was Ilse Vandermark born?")
</action>
Obs: Ilse Vandermark was born in Ghent.
Candidate: [2] Ghent
Assistant: <think> The director was born in Ghent. </think>
<answer> Ghent </answer>""",
    ("planner", "text"): """Question: Which film came out first, Amber Tide or The Tin Orchard?
Assistant: <think> I need the release dates of both films. They do not depend on each other. </think>
<search> When was the film Amber Tide released? </search>
<search> When was the film The Tin Orchard released? </search>
Obs: Amber Tide was released in 1961. The Tin Orchard was released in 1948.
Assistant: <think> 1948 is earlier than 1961, so The Tin Orchard came out first. </think>
<answer> The Tin Orchard </answer>

Question: Where was the director of film Amber Tide born?
Assistant: <think> First I need the director of Amber Tide. </think>
<search> Who directed the film Amber Tide? </search>
Obs: The film Amber Tide was directed by Ilse Vandermark.
Assistant: <think> Now I need the place of birth of Ilse Vandermark. </think>
<search> Where was Ilse Vandermark born? </search>
Obs: Ilse Vandermark was born in Ghent.
Assistant: <think> The director was born in Ghent. </think>
<answer> Ghent </answer>""",
    ("worker", "graph"): """Question: Who is the director of Amber Tide?
Materials:
[0] Amber Tide, publication date, 1961
[1] Amber Tide, director, Ilse Vandermark
Assistant: <think> The question asks for the director of Amber Tide. Material [1] states it. </think>
<select> [1] </select>
<sentence> The director of Amber Tide is Ilse Vandermark. </sentence>

Question: Who is the mother of Ilse Vandermark?
Materials:
[0] Ilse Vandermark, place of birth, Ghent
[1] Amber Tide, director, Ilse Vandermark
Assistant: <think> The question asks for the mother of Ilse Vandermark. No material states it. </think>
<select> [-1] </select>
<sentence> No relevant information found. </sentence>""",
    ("worker", "text"): """Question: Where was Ilse Vandermark born?
Context:
[0] Amber Tide: Amber Tide is a 1961 film directed by Ilse Vandermark.
[1] Ilse Vandermark: Ilse Vandermark (born 3 May 1920 in Ghent) was a film director.
Assistant: <think> The question asks where Ilse Vandermark was born. Passage [1] says that she was \
born in Ghent. </think>
<select> [1] </select>
<sentence> Ilse Vandermark was born in Ghent. </sentence>""",
}


def system_prompt(
    role: Literal["planner", "worker"], kind: EnvironmentKind, mode: PromptMode, *, parallel: bool = True
) -> str:
    """`brief` is one line for models trained on the format, `zero_shot` the rules, `few_shot` worked examples too.
    Without `parallel` the planner is told to search once a turn, and not shown the example that searches twice."""
    key = (role, kind)
    if mode == "brief":
        return _BRIEF[key]
    rules, examples = _RULES[key], _EXAMPLES[key]
    if role == "planner" and not parallel:
        rules += "\nWrite one search a turn: only the first one is answered."
        examples = "Question: " + examples.partition("\n\nQuestion: ")[2]
    return rules if mode == "zero_shot" else f"{rules}\n\nExamples:\n\n{examples}"
