"""Mujica's prompts for planner and worker, and the parsers of their turns.

The tags and fields come from the prompt tables of the paper (Mujica-MyGO, first version, tables
7-10). As in the paper, worked examples are chat turns. The wording and the examples are our own.

    planner, graph   <think> ... </think> <action> Search([i], "...") ... </action>
                     <think> ... </think> <answer> ... </answer>
    planner, text    <think> ... </think> <search> ... </search> <search> ... </search>
                     <think> ... </think> <answer> ... </answer>
    worker           <think> ... </think> <select> [i][j] </select> <sentence> ... </sentence>

Differences from the paper:

- In a graph environment, the planner sees the number of every new candidate.
- In a graph environment, the worker does not write the number of its source before the sentence.
- The prompt without workers is our own, because the paper does not show one.

The parsers read only text that the model generated, outside of its thoughts
(`models/thoughts.py`). They accept tags in upper and lower case. If tags are nested, the innermost
field counts. Text that cannot be parsed is counted: see `PlannerAction.unreadable` and
`WorkerReply.well_formed`.

Text from environments, from users and from the other role enters a prompt through
`Tokenizer.encode_plain`, which replaces the angle brackets of these tags. Such text is put on one
line. It can then neither end a field nor look like another numbered search result.
"""

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Final, Literal

from mujica_jax.agents.dialogue import Opening
from mujica_jax.models.thoughts import outside_thoughts
from mujica_jax.models.tokenizer import TAG_PATTERN
from mujica_jax.records import Entity, StopReason
from mujica_jax.tasks.task import EnvironmentKind

PromptMode = Literal["brief", "zero_shot", "few_shot"]
Role = Literal["planner", "worker"]

# The roles of conversations.
PLANNER: Final = "planner"
WORKER: Final = "worker"

NOTHING_FOUND = "No relevant information found."
# Tells the planner, after the answers to its other searches, that a search could not be parsed.
UNREADABLE = "A search of this turn could not be read."
# Begins a message to the planner. If the planner writes this word itself, its turn is cut there.
OBSERVATION = "Obs:"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchCall:
    """One search that a planner asks for."""

    query: str
    # The number of the candidate entity to search from. None in text environments.
    candidate: int | None
    # Why the search cannot be made, or empty. The planner reads it in place of an answer.
    refusal: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannerAction:
    """A parsed turn of the planner: searches, or an answer, or the reason why it has neither.

    `refused` is that reason. `unreadable` counts the searches that could not be parsed.
    """

    searches: tuple[SearchCall, ...] = ()
    answer: str | None = None
    refused: StopReason | None = None
    unreadable: int = 0

    @property
    def malformed(self) -> int:
        """Return how many searches could not be parsed or were refused."""
        return self.unreadable + sum(bool(call.refusal) for call in self.searches)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerReply:
    """A parsed turn of a worker.

    `selected` holds the indexes of the materials that the worker chose. If the turn has no
    sentence, `sentence` is NOTHING_FOUND and `well_formed` is False.
    """

    selected: tuple[int, ...]
    sentence: str
    well_formed: bool

    @property
    def has_selection(self) -> bool:
        """Whether the worker chose at least one material."""
        return bool(self.selected)


def stop_strings(role: Role, kind: EnvironmentKind) -> tuple[str, ...]:
    """Return the strings that end a turn, besides the stop token.

    A turn ends at its last closing tag, or where the model begins an observation. In a text
    environment the planner may write several searches, so the closing tag of a search does not end
    its turn.
    """
    if role == WORKER:
        return ("</sentence>", OBSERVATION)
    if kind == "text":
        return ("</answer>", OBSERVATION)
    return ("</action>", "</answer>", OBSERVATION)


# --- Parsers for the turns that the model writes. ---

_FLAGS = re.DOTALL | re.IGNORECASE | re.ASCII
DOUBLE_QUOTES = '"\u201c\u201d\u201e\u00ab\u00bb\uff02'
SINGLE_QUOTES = "'`\u2018\u2019"
_NAME = rf"(?:[^\n,\[\]{DOUBLE_QUOTES}](?:(?!\bSearch\s*\()[^\n\[\]{DOUBLE_QUOTES}]){{0,200}}?)?"
_CALL_BEGINS = re.compile(r"\bSearch\s*\(", re.IGNORECASE)
# The candidate's name may follow its number, as in the list of candidates. A query ends at the
# first quotation mark before a bracket, because a name such as "Weird Al" Yankovic contains
# quotation marks.
_SEARCH_CALL = re.compile(
    rf"""\bSearch\s*\(\s*
    (?: \[\s*(?P<bracketed>[0-9]{{1,6}})\s*\] {_NAME} | (?P<bare>[0-9]{{1,6}}) )
    \s*,\s*
    (?: [{DOUBLE_QUOTES}](?P<double>[^\n]*?)[{DOUBLE_QUOTES}]
      | [{SINGLE_QUOTES}](?P<single>[^\n]*?)[{SINGLE_QUOTES}] )
    \s*,?\s*\)""",
    re.IGNORECASE | re.VERBOSE,
)
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_INDEXES = re.compile(r"\s*-?[0-9]{1,6}(?:[\s,;]+-?[0-9]{1,6})*\s*")


@functools.cache
def _field_pattern(tag: str) -> re.Pattern[str]:
    """Return a pattern for a field between two tags, with no tag of the same name inside."""
    return re.compile(rf"<\s*{tag}\s*>((?:(?!<\s*/?\s*{tag}\s*>).)*)<\s*/\s*{tag}\s*>", _FLAGS)


def field(tag: str, text: str) -> str | None:
    """Return the first field with this tag outside of thoughts, on one line, or None."""
    match = _field_pattern(tag).search(outside_thoughts(text))
    return None if match is None else one_line(match[1])


def fields(tag: str, text: str) -> list[str]:
    """Return the contents of all fields with this tag, in their order.

    `text` is a turn without its thoughts.
    """
    return _field_pattern(tag).findall(text)


def on_one_line(tag: str, text: str) -> str:
    """Return the text with each field of this tag on one line.

    `text` is a turn without its thoughts.
    """
    return _field_pattern(tag).sub(lambda field: re.sub(r"\s*\n\s*", " ", field[0]), text)


def opens(tag: str, text: str) -> int:
    """Return how many times the opening tag occurs in `text`, a turn without its thoughts."""
    return len(re.findall(rf"<\s*{tag}\s*>", text, _FLAGS))


def parse_answer(text: str) -> str | None:
    """Return the first answer outside of thoughts, or None.

    An answer that contains another tag of the protocol does not count.
    """
    for answer in _field_pattern("answer").findall(outside_thoughts(text)):
        if not TAG_PATTERN.search(answer):
            return one_line(answer)
    return None


def parse_planner(
    text: str, kind: EnvironmentKind, *, candidates: int, max_searches: int
) -> PlannerAction:
    """Parse a turn of the planner. Its thoughts are ignored.

    `candidates` is the number of candidates so far, and `max_searches` the largest permitted number
    of searches. If the turn contains an answer, its searches are ignored. A search with an unknown
    candidate number is refused, and the other searches of the turn are made.
    """
    answer = parse_answer(text)
    if answer is not None:
        return PlannerAction(answer=answer)

    turn = outside_thoughts(text)
    if kind == "graph":
        calls, unreadable = _graph_calls(turn, candidates)
    else:
        calls, unreadable = _text_calls(turn)
    calls = list(dict.fromkeys(calls))

    if not calls:
        return PlannerAction(refused=StopReason.NO_ACTION)
    if len(calls) > max_searches:
        return PlannerAction(refused=StopReason.TOO_MANY_SEARCHES)
    return PlannerAction(searches=tuple(calls), unreadable=unreadable)


def _graph_calls(turn: str, candidates: int) -> tuple[list[SearchCall], int]:
    """Return the calls of all actions in their order, and how many searches could not be parsed."""
    # An action without a closing tag cannot be parsed, nor can the <search> of text environments.
    actions = fields("action", turn)
    beside_actions = _field_pattern("action").sub(" ", turn)
    unclosed_actions = opens("action", turn) - len(actions)
    unreadable = unclosed_actions + len(fields("search", beside_actions))

    calls: list[SearchCall] = []
    for action in actions:
        beginning = _CALL_BEGINS.search(action)
        if beginning is None and action.strip():
            unreadable += 1
        while beginning is not None:
            match = _SEARCH_CALL.match(action, beginning.start())
            call = None if match is None else _call(match, candidates)
            if call is None:
                unreadable += 1
            else:
                calls.append(call)
            end = beginning.end() if match is None else match.end()
            beginning = _CALL_BEGINS.search(action, end)
    return calls, unreadable


def _call(match: re.Match[str], candidates: int) -> SearchCall | None:
    """Return the matched call, or None if its query is empty."""
    number = int(match["bracketed"] or match["bare"])
    quoted = match["single"] if match["double"] is None else match["double"]
    query = one_line(quoted.replace('\\"', '"'))
    if not query:
        return None
    refusal = ""
    if number >= candidates:
        refusal = f'"{query}" was not searched: candidate number {number} is unknown.'
    return SearchCall(query=query, candidate=number, refusal=refusal)


def _text_calls(turn: str) -> tuple[list[SearchCall], int]:
    """Return the calls in their order, and how many searches could not be parsed."""
    queries = [one_line(query) for query in fields("search", turn)]
    calls = [SearchCall(query=query, candidate=None) for query in queries if query]

    # Count searches that are empty or have no closing tag, and the <action> of graph environments.
    beside_searches = _field_pattern("search").sub(" ", turn)
    unreadable = opens("search", turn) - len(calls) + len(fields("action", beside_searches))
    return calls, unreadable


def parse_worker(text: str, *, materials: int, sentence_tag: str = "sentence") -> WorkerReply:
    """Parse a turn of a worker that was shown `materials` materials.

    [-1] selects nothing, and so does a turn that has a sentence but no selection. If the worker
    selects a material that it was not shown, the index is dropped and the turn is malformed.
    """
    select = field("select", text)
    sentence = field(sentence_tag, text)
    if not sentence:
        return WorkerReply(selected=(), sentence=NOTHING_FOUND, well_formed=False)
    if select is None:
        is_cut = opens("select", outside_thoughts(text)) > 0
        return WorkerReply(selected=(), sentence=sentence, well_formed=not is_cut)

    indexes, is_readable = _selection(select)
    selected = tuple(index for index in indexes if 0 <= index < materials)
    are_shown = all(-1 <= index < materials for index in indexes)
    return WorkerReply(selected=selected, sentence=sentence, well_formed=is_readable and are_shown)


def _selection(select: str) -> tuple[list[int], bool]:
    """Return the indexes of a selection without repetitions, and whether all of it was parsed.

    A selection is written as "[0][2]", "[0, 2]" or "0, 2".
    """
    groups = _BRACKETS.findall(select)
    if not groups and select:
        groups = [select]
    readable_groups = [group for group in groups if _INDEXES.fullmatch(group)]
    indexes: list[int] = []
    for group in readable_groups:
        indexes += [int(index) for index in re.findall(r"-?[0-9]+", group)]

    # A number or a dash between brackets, as in "[0]-[3]", has a meaning that is not parsed.
    between_brackets = _BRACKETS.sub("", select) if "[" in select else ""
    is_all_read = len(readable_groups) == len(groups)
    if re.search(r"[0-9-]", between_brackets):
        is_all_read = False
    return list(dict.fromkeys(indexes)), is_all_read


def one_line(text: str) -> str:
    """Return the text with single spaces as its only white space.

    Such text cannot begin a new line of a prompt.
    """
    return " ".join(text.split())


# --- Messages that the model reads. ---


def planner_opening(question: str, candidates: Sequence[Entity]) -> str:
    """Write the first message to the planner: the question and the numbered candidates."""
    lines = [f"Question: {one_line(question)}"]
    if candidates:
        lines.append(_candidate_line(candidates, first=0))
    return "\n".join(lines)


def planner_observation(
    sentences: Sequence[str], new_candidates: Sequence[Entity], first: int
) -> str:
    """Write the message to the planner with the workers' answers and the new candidates.

    The answers come in the order of the searches. The new candidates are numbered from `first`.
    """
    answers = " ".join(one_line(sentence) for sentence in sentences)
    lines = [f"{OBSERVATION} {answers}"]
    if new_candidates:
        lines.append(_candidate_line(new_candidates, first=first))
    return "\n".join(lines)


def worker_opening(
    query: str, materials: Sequence[Sequence[str]], kind: EnvironmentKind, mode: PromptMode
) -> str:
    """Write the message to a worker: the sub-question and its numbered materials."""
    question = f"Question: {one_line(query)}"
    heading = "Materials:" if kind == "graph" else "Context:"
    return "\n".join([question, heading, *numbered(materials, mode)])


def numbered(materials: Sequence[Sequence[str]], mode: PromptMode) -> list[str]:
    """Return one line for each material, beginning with its number in brackets.

    A material is a sequence of parts: a passage has one part, and a triple has three.

    `brief` mode is for small models that are trained from scratch. It repeats the number between
    the relation and the object of a triple, or at the end of a passage. To select the line, the
    model can then copy the next token and need not look back.
    """
    lines = []
    for index, material in enumerate(materials):
        parts = [one_line(part) for part in material]
        if mode != "brief":
            line = ", ".join(parts)
        elif len(parts) == 1:
            line = f"{parts[0]} [{index}]"
        else:
            line = f"{', '.join(parts[:-1])} [{index}] {parts[-1]}"
        lines.append(f"[{index}] {line}")
    return lines


def _candidate_line(candidates: Sequence[Entity], first: int) -> str:
    """Return the line that lists the candidates, numbered from `first`."""
    numbered_labels = [
        f"[{number}] {one_line(entity.label)}" for number, entity in enumerate(candidates, first)
    ]
    return f"Candidate: {' '.join(numbered_labels)}"


# --- Writers of turns, for demonstrations. ---
#
# They are in this file with the parsers, so that both keep to the same format.


def write_graph_searches(thought: str, calls: Sequence[SearchCall]) -> str:
    """Write a planner's turn that searches a graph."""
    lines = "\n".join(f'Search([{call.candidate}], "{call.query}")' for call in calls)
    return f"<think> {thought} </think>\n<action>\n{lines}\n</action>"


def write_text_searches(thought: str, calls: Sequence[SearchCall]) -> str:
    """Write a planner's turn that searches texts."""
    lines = "\n".join(f"<search> {call.query} </search>" for call in calls)
    return f"<think> {thought} </think>\n{lines}"


def write_answer(thought: str, answer: str) -> str:
    """Write a planner's turn that answers the question."""
    return f"<think> {thought} </think>\n<answer> {answer} </answer>"


def write_worker(thought: str, selected: Sequence[int], sentence: str) -> str:
    """Write a worker's turn. `selected` holds the indexes of the materials that it chooses."""
    indexes = "".join(f"[{index}]" for index in selected) or "[-1]"
    return (
        f"<think> {thought} </think>\n"
        f"<select> {indexes} </select>\n"
        f"<sentence> {sentence} </sentence>"
    )


# --- Prompts. ---

# A user message and the model's reply.
Exchange = tuple[str, str]

# Prompts of one line, for models that were trained on the format.
_BRIEF = {
    (PLANNER, "graph"): "Plan.",
    (PLANNER, "text"): "Plan searches.",
    (WORKER, "graph"): "Extract.",
    (WORKER, "text"): "Read.",
}

_PLANNER_GRAPH_BEGINNING = (
    "You answer questions with the help of a knowledge graph. You are given a question and "
    "numbered candidate entities.\n"
    "First think inside <think> ... </think>: what is known, what is missing, which entity to ask "
    "about.\n"
    'Then either look facts up with Search([number], "one simple question") inside <action> ... '
    "</action>, or finish.\n"
    "Put searches that do not depend on each other into the same <action>, one a line; they are "
    "answered together.\n"
)
_PLANNER_TEXT_BEGINNING = (
    "You answer questions with the help of a search tool.\n"
    "First think inside <think> ... </think>: what is known, what is missing, how the question "
    "splits into simpler ones.\n"
    "Then either search, each query in its own <search> ... </search>, or finish.\n"
)
_QUERIES = (
    "A query must be explicit and ask for one fact; it cannot refer to other queries. Queries that "
    "do not depend on each other go into the same turn.\n"
)
_ANSWER = (
    "When you know enough, write only the final answer, as short as possible, inside <answer> ... "
    "</answer>."
)

_RULES = {
    (PLANNER, "graph"): (
        f"{_PLANNER_GRAPH_BEGINNING}You then receive observations, and new candidates with their "
        "numbers. A search asks for one fact about one candidate.\n"
        f"{_ANSWER}"
    ),
    (PLANNER, "text"): (
        f"{_PLANNER_TEXT_BEGINNING}{_QUERIES}You then receive observations. {_ANSWER}"
    ),
    (WORKER, "graph"): (
        "You extract one fact from numbered materials, each a triple: subject, relation, object.\n"
        "Think inside <think> ... </think> about which entity and which relation the question asks "
        "for.\n"
        "Put the index of every material that states the answer inside <select> ... </select>, "
        "like [0][2], or [-1] if none does.\n"
        "Then state the answer as one full sentence that mirrors the question inside <sentence> "
        "... </sentence>. Use only the materials. If none answers, the sentence is: "
        f"{NOTHING_FOUND}"
    ),
    (WORKER, "text"): (
        "You answer one question from numbered passages.\n"
        "Think inside <think> ... </think> about which passage answers it and why.\n"
        "Put the index of the passage you rely on inside <select> ... </select>, like [0], or [-1] "
        "if none helps.\n"
        "Then state the answer as one full sentence that mirrors the question inside <sentence> "
        "... </sentence>. If no passage helps, try your best to answer the question from your own "
        "knowledge."
    ),
}
# Prompts without workers: the planner reads the search results itself.
_RULES_WITHOUT_WORKERS = {
    "graph": (
        f"{_PLANNER_GRAPH_BEGINNING}You then receive, for each search in its order, the triples "
        "about its candidate, numbered from [0]: subject, relation, object. Read the facts off "
        "them yourself: some of them do not matter. You also receive new candidates with their "
        "numbers. A search asks about one candidate.\n"
        f"{_ANSWER}"
    ),
    "text": (
        f"{_PLANNER_TEXT_BEGINNING}{_QUERIES}You then receive, for each query in its order, the "
        "passages found, numbered from [0]. Read the facts off them yourself: some of them do not "
        "matter.\n"
        f"{_ANSWER}"
    ),
}
ONE_SEARCH = "\nWrite one search a turn: only the first one is answered."

# --- Worked examples. ---
#
# The people and works are invented, so that no example reveals a fact of a benchmark.

_FILM = Entity(id="Amber Tide", label="Amber Tide")
_OTHER_FILM = Entity(id="The Tin Orchard", label="The Tin Orchard")
_DIRECTOR = Entity(id="Ilse Vandermark", label="Ilse Vandermark")
_OTHER_DIRECTOR = Entity(id="Anton Hale", label="Anton Hale")
_CITY = Entity(id="Ghent", label="Ghent")
_WHICH_FIRST = "Which film came out first, Amber Tide or The Tin Orchard?"
_WHERE_BORN = "Where was the director of film Amber Tide born?"
_FILM_TRIPLES = (
    ("Amber Tide", "publication date", "1961"),
    ("Amber Tide", "director", "Ilse Vandermark"),
)
_OTHER_FILM_TRIPLES = (
    ("The Tin Orchard", "publication date", "1948"),
    ("The Tin Orchard", "director", "Anton Hale"),
)
_DIRECTOR_TRIPLES = (
    ("Ilse Vandermark", "place of birth", "Ghent"),
    ("Amber Tide", "director", "Ilse Vandermark"),
)
_FILM_PASSAGE = ("Amber Tide: Amber Tide is a 1961 film directed by Ilse Vandermark.",)
_OTHER_FILM_PASSAGE = ("The Tin Orchard: The Tin Orchard is a comedy film of 1948 by Anton Hale.",)
_DIRECTOR_PASSAGE = (
    "Ilse Vandermark: Ilse Vandermark (born 3 May 1920 in Ghent) was a film director.",
)


def found_line(materials: Sequence[Sequence[str]], mode: PromptMode) -> str:
    """Write the results of one search for a planner without workers."""
    return " ".join(numbered(materials, mode)) or NOTHING_FOUND


def _planner_graph_examples(
    dates: Sequence[str], director: str, birth: str, *, added_candidates: Sequence[Entity]
) -> tuple[tuple[Exchange, ...], ...]:
    """Return two worked examples for the planner in a graph environment.

    `dates`, `director` and `birth` are the answers to the searches. `added_candidates` are the new
    candidates after the two searches for dates.
    """
    return (
        (
            (
                planner_opening(_WHICH_FIRST, [_FILM, _OTHER_FILM]),
                write_graph_searches(
                    "I need the publication dates of both films. They do not depend on each other.",
                    [
                        SearchCall(query="When did Amber Tide come out?", candidate=0),
                        SearchCall(query="When did The Tin Orchard come out?", candidate=1),
                    ],
                ),
            ),
            (
                planner_observation(dates, added_candidates, first=2),
                write_answer(
                    "Amber Tide came out in 1961 and The Tin Orchard in 1948. 1948 is earlier than "
                    "1961.",
                    "The Tin Orchard",
                ),
            ),
        ),
        (
            (
                planner_opening(_WHERE_BORN, [_FILM]),
                write_graph_searches(
                    "First I need the director of Amber Tide.",
                    [SearchCall(query="Who is the director of Amber Tide?", candidate=0)],
                ),
            ),
            (
                planner_observation([director], [_DIRECTOR], first=1),
                write_graph_searches(
                    "The director is Ilse Vandermark. Now I need her place of birth.",
                    [SearchCall(query="Where was Ilse Vandermark born?", candidate=1)],
                ),
            ),
            (
                planner_observation([birth], [_CITY], first=2),
                write_answer("The director was born in Ghent.", "Ghent"),
            ),
        ),
    )


def _planner_text_examples(
    dates: Sequence[str], director: str, birth: str
) -> tuple[tuple[Exchange, ...], ...]:
    """Return two worked examples for the planner in a text environment.

    `dates`, `director` and `birth` are the answers to the searches.
    """
    return (
        (
            (
                planner_opening(_WHICH_FIRST, []),
                write_text_searches(
                    "I need the release dates of both films. They do not depend on each other.",
                    [
                        SearchCall(query="When was the film Amber Tide released?", candidate=None),
                        SearchCall(
                            query="When was the film The Tin Orchard released?", candidate=None
                        ),
                    ],
                ),
            ),
            (
                planner_observation(dates, [], first=0),
                write_answer(
                    "Amber Tide was released in 1961 and The Tin Orchard in 1948. 1948 is earlier "
                    "than 1961.",
                    "The Tin Orchard",
                ),
            ),
        ),
        (
            (
                planner_opening(_WHERE_BORN, []),
                write_text_searches(
                    "First I need the director of Amber Tide.",
                    [SearchCall(query="Who directed the film Amber Tide?", candidate=None)],
                ),
            ),
            (
                planner_observation([director], [], first=0),
                write_text_searches(
                    "The director is Ilse Vandermark. Now I need her place of birth.",
                    [SearchCall(query="Where was Ilse Vandermark born?", candidate=None)],
                ),
            ),
            (
                planner_observation([birth], [], first=0),
                write_answer("The director was born in Ghent.", "Ghent"),
            ),
        ),
    )


# Each example is a separate chat, whose first message asks the question.
_EXAMPLES: dict[tuple[Role, EnvironmentKind], tuple[tuple[Exchange, ...], ...]] = {
    (PLANNER, "graph"): _planner_graph_examples(
        ["Amber Tide came out in 1961.", "The Tin Orchard came out in 1948."],
        director="The director of Amber Tide is Ilse Vandermark.",
        birth="Ilse Vandermark was born in Ghent.",
        added_candidates=[],
    ),
    (PLANNER, "text"): _planner_text_examples(
        ["Amber Tide was released in 1961.", "The Tin Orchard was released in 1948."],
        director="The film Amber Tide was directed by Ilse Vandermark.",
        birth="Ilse Vandermark was born in Ghent.",
    ),
    (WORKER, "graph"): (
        (
            (
                worker_opening(
                    "Who is the director of Amber Tide?",
                    _FILM_TRIPLES,
                    kind="graph",
                    mode="few_shot",
                ),
                write_worker(
                    "The question asks for the director of Amber Tide. Material [1] states it.",
                    [1],
                    "The director of Amber Tide is Ilse Vandermark.",
                ),
            ),
        ),
        (
            (
                worker_opening(
                    "Who is the mother of Ilse Vandermark?",
                    _DIRECTOR_TRIPLES,
                    kind="graph",
                    mode="few_shot",
                ),
                write_worker(
                    "The question asks for the mother of Ilse Vandermark. No material states it.",
                    [],
                    NOTHING_FOUND,
                ),
            ),
        ),
    ),
    (WORKER, "text"): (
        (
            (
                worker_opening(
                    "Where was Ilse Vandermark born?",
                    (_FILM_PASSAGE, _DIRECTOR_PASSAGE),
                    kind="text",
                    mode="few_shot",
                ),
                write_worker(
                    "The question asks where Ilse Vandermark was born. Passage [1] says that she "
                    "was born in Ghent.",
                    [1],
                    "Ilse Vandermark was born in Ghent.",
                ),
            ),
        ),
        (
            (
                worker_opening(
                    "How many days does a leap year have?",
                    (_OTHER_FILM_PASSAGE,),
                    kind="text",
                    mode="few_shot",
                ),
                write_worker(
                    "The question asks for the days of a leap year. No passage says it. I know "
                    "that there are 366.",
                    [],
                    "A leap year has 366 days.",
                ),
            ),
        ),
    ),
}
_EXAMPLES_WITHOUT_WORKERS = {
    "graph": _planner_graph_examples(
        [found_line(_FILM_TRIPLES, "few_shot"), found_line(_OTHER_FILM_TRIPLES, "few_shot")],
        director=found_line(_FILM_TRIPLES, "few_shot"),
        birth=found_line(_DIRECTOR_TRIPLES, "few_shot"),
        added_candidates=[_DIRECTOR, _OTHER_DIRECTOR],
    ),
    "text": _planner_text_examples(
        [
            found_line((_FILM_PASSAGE, _OTHER_FILM_PASSAGE), "few_shot"),
            found_line((_OTHER_FILM_PASSAGE,), "few_shot"),
        ],
        director=found_line((_FILM_PASSAGE,), "few_shot"),
        birth=found_line((_FILM_PASSAGE, _DIRECTOR_PASSAGE), "few_shot"),
    ),
}


def opening(
    role: Role,
    kind: EnvironmentKind,
    mode: PromptMode,
    *,
    parallel: bool = True,
    split: bool = True,
) -> Opening:
    """Return the system prompt and the worked examples of a role.

    - `mode` `brief` gives one line, for models that were trained on the format. `zero_shot` gives
      the rules. `few_shot` gives the rules, and worked examples as chat turns.
    - If `parallel` is False, the rules ask the planner for one search in each turn. The example with
      two searches in a turn is then left out.
    - If `split` is False, there are no workers. The rules and examples of the planner then say that
      it reads the search results itself.
    """
    if mode == "brief":
        return Opening(system=_BRIEF[role, kind])
    rules = _RULES[role, kind]
    examples = _EXAMPLES[role, kind]
    if role == PLANNER and not split:
        rules = _RULES_WITHOUT_WORKERS[kind]
        examples = _EXAMPLES_WITHOUT_WORKERS[kind]
    if role == PLANNER and not parallel:
        rules += ONE_SEARCH
        examples = examples[1:]
    if mode == "zero_shot":
        return Opening(system=rules)
    exchanges = [exchange for example in examples for exchange in example]
    return Opening(system=rules, examples=tuple(exchanges))
