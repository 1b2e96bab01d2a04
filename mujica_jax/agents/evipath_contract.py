"""The class `EviPathContract`: the prompts, tags and parsers of EviPath.

They follow tables 8 to 11 of the paper "From Evidence to Trajectory". The paper's executor is
called `worker` in this package.

    planner, graph   <think> ... </think> <action> Search([i], "...") ... </action>
                     <think> ... </think> <answer> ... </answer>
    planner, text    <think> ... </think> <action> Search("...") ... </action>
                     <think> ... </think> <answer> ... </answer>
    executor         <think> ... </think> <select> [i][j] </select> <answer> ... </answer>
                     No relevant information found.   (without any tag, if no evidence matches)

Mujica's contract (`protocol.py`) differs in three places. In text environments the planner writes
<search>. The worker's answer has the tag <sentence>. A worker that finds nothing selects [-1].

Tags, fields and the order of the fields are those of the paper. The rules and the invented examples
are in our own words.

Where the paper is not explicit, we chose:

- Several searches in a turn. Table 10 shows one search, but section 4.1.2 describes a set of
  searches. In text environments a turn may therefore contain several, one on each line.
- The planner's prompt for graphs. Table 8 is a prompt for synthesis, and the paper shows none for
  training. Ours is the prompt of table 10 with the calls, candidates and observations of table 8.
- The executor's prompt for graphs. Table 9 is a prompt for synthesis too. Ours is the prompt of
  table 11 with triples.
- The `brief` prompts, for small models that are trained from scratch. They are the one-line prompts
  of Mujica.
"""

import re
from collections.abc import Sequence

from mujica_jax.agents import protocol
from mujica_jax.agents.contract import Contract
from mujica_jax.agents.dialogue import Opening
from mujica_jax.agents.protocol import (
    DOUBLE_QUOTES,
    NOTHING_FOUND,
    ONE_SEARCH,
    PLANNER,
    SINGLE_QUOTES,
    WORKER,
    PlannerAction,
    PromptMode,
    Role,
    SearchCall,
    WorkerReply,
    one_line,
)
from mujica_jax.models.thoughts import outside_thoughts
from mujica_jax.records import Entity, StopReason
from mujica_jax.tasks.task import EnvironmentKind

_CALL_BEGINS = re.compile(r"\bSearch\s*\(", re.IGNORECASE)
# A query ends at the first quotation mark before a bracket, as in protocol.py.
_TEXT_CALL = re.compile(
    rf"""\bSearch\s*\(\s*
    (?: [{DOUBLE_QUOTES}](?P<double>[^\n]*?)[{DOUBLE_QUOTES}]
      | [{SINGLE_QUOTES}](?P<single>[^\n]*?)[{SINGLE_QUOTES}] )
    \s*,?\s*\)""",
    re.IGNORECASE | re.VERBOSE,
)
_BARE_NOTHING_FOUND = NOTHING_FOUND.rstrip(".").casefold()
# The first word of a message to the planner, from tables 8 and 10.
_OBSERVATIONS = {"graph": "Observation:", "text": "Obs:"}


class EviPathContract(Contract):
    """The prompts, tags and parsers of EviPath."""

    sentence_tag = "answer"
    explains_nothing_found = False
    has_own_words = True

    def opening(
        self,
        role: Role,
        kind: EnvironmentKind,
        mode: PromptMode,
        *,
        parallel: bool = True,
        split: bool = True,
    ) -> Opening:
        """Return the system prompt and the worked examples of a role.

        If `parallel` is False, the prompt asks the planner for one search in each turn. `split`
        must be True, because EviPath always has an executor.
        """
        assert split, "EviPath needs an executor, and the check of the configuration demands it"
        if mode == "brief":
            return super().opening(role, kind, mode=mode, parallel=parallel)
        rules = _RULES[role, kind]
        examples = _EXAMPLES[role, kind]
        if role == PLANNER and not parallel:
            rules += ONE_SEARCH
            examples = tuple(example for example in examples if not example.searches_in_parallel)
        if mode == "zero_shot":
            return Opening(system=rules)
        exchanges = [exchange for example in examples for exchange in example.exchanges]
        return Opening(system=rules, examples=tuple(exchanges))

    def observation(self, kind: EnvironmentKind) -> str:
        """Return the word that begins a message to the planner."""
        return _OBSERVATIONS[kind]

    def planner_observation(
        self,
        sentences: Sequence[str],
        new_candidates: Sequence[Sequence[Entity]],
        first: int,
        kind: EnvironmentKind,
    ) -> str:
        """Return the message to the planner with the answers to the searches of its turn.

        After each answer come the new candidates of that search. They are numbered from `first`.
        """
        lines = []
        next_number = first
        for sentence, entities in zip(sentences, new_candidates, strict=True):
            line = one_line(sentence)
            if entities:
                line += " Candidate:"
            for entity in entities:
                line += f" [{next_number}] {one_line(entity.label)}"
                next_number += 1
            lines.append(line)
        if kind == "text":
            return f"{_OBSERVATIONS[kind]} " + " ".join(lines)
        return "\n".join([_OBSERVATIONS[kind], *lines])

    def worker_opening(
        self,
        query: str,
        materials: Sequence[Sequence[str]],
        kind: EnvironmentKind,
        mode: PromptMode,
    ) -> str:
        """Return the message to an executor: the sub-question and the numbered evidence."""
        question = f"Question: {one_line(query)}"
        evidence_lines = protocol.numbered(materials, mode)
        return "\n".join([question, "Supporting evidences:", *evidence_lines])

    def stop_strings(self, role: Role, kind: EnvironmentKind) -> tuple[str, ...]:
        """Return the strings that end a turn of this role."""
        if role == WORKER:
            return ("</answer>", protocol.OBSERVATION)
        return ("</action>", "</answer>", self.observation(kind))

    def parse_planner(
        self, text: str, kind: EnvironmentKind, *, candidates: int, max_searches: int
    ) -> PlannerAction:
        """Parse a turn of the planner. For graphs the format is the same as Mujica's."""
        if kind == "graph":
            return super().parse_planner(
                text, kind, candidates=candidates, max_searches=max_searches
            )
        answer = protocol.parse_answer(text)
        if answer is not None:
            return PlannerAction(answer=answer)

        calls, unreadable = _text_calls(outside_thoughts(text))
        if not calls:
            return PlannerAction(refused=StopReason.NO_ACTION)
        if len(calls) > max_searches:
            return PlannerAction(refused=StopReason.TOO_MANY_SEARCHES)
        return PlannerAction(searches=tuple(calls), unreadable=unreadable)

    def parse_worker(self, text: str, *, materials: int) -> WorkerReply:
        """Parse a turn of the executor.

        A turn that consists of the sentence NOTHING_FOUND, without tags, says that no evidence
        matches. It may have quotation marks and may lack the full stop.
        """
        sentence = one_line(outside_thoughts(text)).strip("\"“”'.").casefold()
        if sentence == _BARE_NOTHING_FOUND:
            return WorkerReply(selected=(), sentence=NOTHING_FOUND, well_formed=True)
        return protocol.parse_worker(text, materials=materials, sentence_tag=self.sentence_tag)

    def write_searches(
        self, thought: str, calls: Sequence[SearchCall], kind: EnvironmentKind
    ) -> str:
        """Write a planner's turn that searches."""
        if kind == "graph":
            return super().write_searches(thought, calls, kind)
        lines = "\n".join(f'Search("{call.query}")' for call in calls)
        return f"<think> {thought} </think>\n<action>\n{lines}\n</action>"

    def write_worker(self, thought: str, selected: Sequence[int], sentence: str) -> str:
        """Write an executor's turn. An empty selection means that no evidence matches."""
        if not selected:
            return NOTHING_FOUND
        indexes = "".join(f"[{index}]" for index in selected)
        return (
            f"<think> {thought} </think>\n"
            f"<select> {indexes} </select>\n"
            f"<answer> {sentence} </answer>"
        )


class _Example:
    """A worked example: messages of user and assistant in turn, beginning with the user."""

    def __init__(self, *messages: str) -> None:
        self.messages = messages

    @property
    def searches_in_parallel(self) -> bool:
        """Whether one of the messages asks for several searches."""
        return any(message.count("Search(") > 1 for message in self.messages)

    @property
    def exchanges(self) -> list[protocol.Exchange]:
        """Return the example as pairs (user message, assistant message), in order."""
        return list(zip(self.messages[::2], self.messages[1::2], strict=True))


def _text_calls(turn: str) -> tuple[list[SearchCall], int]:
    """Return the calls of all actions, and how many searches could not be parsed.

    The calls are in order and without repetitions.
    """
    actions = protocol.fields("action", turn)
    unreadable = protocol.opens("action", turn) - len(actions)
    queries: list[str] = []
    for action in actions:
        queries_of_action: list[str] = []
        for match in _TEXT_CALL.finditer(action):
            quoted = match["single"] if match["double"] is None else match["double"]
            query = one_line(quoted)
            if query:
                queries_of_action.append(query)
        queries += queries_of_action

        # An action with text but without a call counts as one search that could not be parsed.
        calls_begun = len(_CALL_BEGINS.findall(action))
        if calls_begun == 0 and action.strip():
            calls_begun = 1
        unreadable += calls_begun - len(queries_of_action)

    calls = [SearchCall(query=query, candidate=None) for query in dict.fromkeys(queries)]
    return calls, max(unreadable, 0)


# --- System prompts. ---

_EXECUTOR_TASK = (
    "Your task is to answer a question based on supporting evidence, of which some is noise."
)
_EXECUTOR_STEPS = (
    "You need to:\n"
    "1. Identify what the question asks for, review all evidence and summarise what supports the "
    "answer. Put your thoughts between <think> and </think> tags.\n"
    "2. Put the index of the golden evidence between <select> and </select> tags. If several "
    "pieces contain the answer, select all of them. If none matches, respond with "
    f'"{NOTHING_FOUND}" and nothing else.\n'
    "3. Summarise the answer in one complete declarative sentence between <answer> and </answer> "
    "tags."
)
_RULES = {
    (PLANNER, "graph"): (
        "Your task is to answer a complex question with the help of a knowledge graph. You are "
        "given the question and numbered candidate entities.\n"
        "You need to:\n"
        "1. Make a plan: decompose the question into steps.\n"
        "2. Solve the problem step by step.\n"
        "Put your thoughts between <think> and </think> tags.\n"
        'Use Search([X], "question") between <action> and </action> tags to get information about '
        "candidate [X]. Write one call a line; the calls of one turn are answered together. What a "
        "search asks is a question, and it names entities in full.\n"
        "Observations follow, with new candidates. Label the final answer, as short as possible, "
        "with <answer> *** </answer>."
    ),
    (PLANNER, "text"): (
        "Your task is to answer a complex question with the help of a search tool.\n"
        "You need to:\n"
        "1. Make a plan: decompose the question into steps.\n"
        "2. Solve the problem step by step.\n"
        "Put your thoughts between <think> and </think> tags.\n"
        'Use Search("question") between <action> and </action> tags to get information from '
        "supporting evidence. Write one call a line; the calls of one turn are answered "
        "together.\n"
        "What a search asks is an interrogative sentence. It holds no pronouns such as this or "
        "these: name entities in full.\n"
        "Observations follow. Label the final answer, as short as possible, with <answer> *** "
        "</answer>."
    ),
    (WORKER, "graph"): (
        f"{_EXECUTOR_TASK} Each piece is a triple: subject, relation, object.\n{_EXECUTOR_STEPS}"
    ),
    (WORKER, "text"): f"{_EXECUTOR_TASK}\n{_EXECUTOR_STEPS}",
}

# The people and works are invented, so that no example reveals a fact of a benchmark.
_EXAMPLES = {
    (PLANNER, "graph"): (
        _Example(
            "Question: Which film came out first, Amber Tide or The Tin Orchard?\n"
            "Candidate: [0] Amber Tide [1] The Tin Orchard",
            "<think> To solve this problem, I need to:\n"
            "1. Find the publication date of Amber Tide.\n"
            "2. Find the publication date of The Tin Orchard.\n"
            "3. Compare the two dates. </think>\n"
            "<action>\n"
            'Search([0], "When did Amber Tide come out?")\n'
            'Search([1], "When did The Tin Orchard come out?")\n'
            "</action>",
            "Observation:\nAmber Tide came out in 1961.\nThe Tin Orchard came out in 1948.",
            "<think> 1948 is earlier than 1961, so The Tin Orchard came out first. </think>\n"
            "<answer> The Tin Orchard </answer>",
        ),
        _Example(
            "Question: Where was the director of film Amber Tide born?\nCandidate: [0] Amber Tide",
            "<think> To solve this problem, I need to:\n"
            "1. Find the director of Amber Tide.\n"
            "2. Find the place of birth of the director. </think>\n"
            "<action>\n"
            'Search([0], "Who is the director of Amber Tide?")\n'
            "</action>",
            "Observation:\n"
            "The director of Amber Tide is Ilse Vandermark. Candidate: [1] Ilse Vandermark",
            "<think> Now that I have the director, I need the place of birth of Ilse Vandermark. "
            "</think>\n"
            "<action>\n"
            'Search([1], "Where was Ilse Vandermark born?")\n'
            "</action>",
            "Observation:\nIlse Vandermark was born in Ghent. Candidate: [2] Ghent",
            "<think> The director was born in Ghent. </think>\n<answer> Ghent </answer>",
        ),
    ),
    (PLANNER, "text"): (
        _Example(
            "Question: Which film came out first, Amber Tide or The Tin Orchard?",
            "<think> To solve this problem, I need to:\n"
            "1. Find the release date of Amber Tide.\n"
            "2. Find the release date of The Tin Orchard.\n"
            "3. Compare the two dates. </think>\n"
            "<action>\n"
            'Search("When was the film Amber Tide released?")\n'
            'Search("When was the film The Tin Orchard released?")\n'
            "</action>",
            "Obs: Amber Tide was released in 1961. The Tin Orchard was released in 1948.",
            "<think> 1948 is earlier than 1961, so The Tin Orchard came out first. </think>\n"
            "<answer> The Tin Orchard </answer>",
        ),
        _Example(
            "Question: Where was the director of film Amber Tide born?",
            "<think> To solve this problem, I need to:\n"
            "1. Find the director of Amber Tide.\n"
            "2. Find the place of birth of the director. </think>\n"
            "<action>\n"
            'Search("Who directed the film Amber Tide?")\n'
            "</action>",
            "Obs: The film Amber Tide was directed by Ilse Vandermark.",
            "<think> Now that I have the director, I need the place of birth of Ilse Vandermark. "
            "</think>\n"
            "<action>\n"
            'Search("Where was Ilse Vandermark born?")\n'
            "</action>",
            "Obs: Ilse Vandermark was born in Ghent.",
            "<think> The director was born in Ghent. </think>\n<answer> Ghent </answer>",
        ),
    ),
    (WORKER, "graph"): (
        _Example(
            "Question: Who is the director of Amber Tide?\n"
            "Supporting evidences:\n"
            "[0] Amber Tide, publication date, 1961\n"
            "[1] Amber Tide, director, Ilse Vandermark",
            "<think> The question asks me to find the director of Amber Tide. [1] says the "
            "director of Amber Tide is Ilse Vandermark. </think>\n"
            "<select> [1] </select>\n"
            "<answer> The director of Amber Tide is Ilse Vandermark. </answer>",
        ),
        _Example(
            "Question: Who is the mother of Ilse Vandermark?\n"
            "Supporting evidences:\n"
            "[0] Ilse Vandermark, place of birth, Ghent\n"
            "[1] Amber Tide, director, Ilse Vandermark",
            NOTHING_FOUND,
        ),
    ),
    (WORKER, "text"): (
        _Example(
            "Question: Where was Ilse Vandermark born?\n"
            "Supporting evidences:\n"
            "[0] Amber Tide: Amber Tide is a 1961 film directed by Ilse Vandermark.\n"
            "[1] Ilse Vandermark: Ilse Vandermark (born 3 May 1920 in Ghent) was a film director.",
            "<think> The question asks me to find where Ilse Vandermark was born. [1] says she was "
            "born in Ghent. </think>\n"
            "<select> [1] </select>\n"
            "<answer> Ilse Vandermark was born in Ghent. </answer>",
        ),
        _Example(
            "Question: Who is the mother of Ilse Vandermark?\n"
            "Supporting evidences:\n"
            "[0] Amber Tide: Amber Tide is a 1961 film directed by Ilse Vandermark.",
            NOTHING_FOUND,
        ),
    ),
}
