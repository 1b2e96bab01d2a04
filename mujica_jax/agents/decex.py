"""The agent Decex: DecEx-RAG's process of decisions and executions (section 2.1 of the paper).

The model writes in the format of the paper's table 3. A turn is one thought, followed by one search
or by the final answer. The next message contains the results of the search:

    <think> I need the director. So, the next sub-question is: Who directed the film Amber Tide?
    I need to look this up. </think>
    <search> Amber Tide 1961 film director </search>

    <information> ... </information>

    <think> Ilse Vandermark made it. So, the next sub-question is: Where was Ilse Vandermark born?
    I know about this: she is a Flemish director. I recall that Ilse Vandermark was born in Ghent.
    She was born in Ghent. </think>
    <answer> Ghent </answer>

The model makes two kinds of decisions:

- The termination decision: ask the next sub-question in the thought, or end the thought and write
  the final answer.
- The retrieval decision: recall a fact in the thought, or end the thought and write a search.

A decision together with its execution is a `Piece` of a turn. An ordinary episode is sampled turn
by turn. A search tree (`methods/decex/tree.py`) samples piece by piece: it samples the rest of a
turn and keeps only the tokens of the first piece. The pieces of a turn, joined, are therefore
exactly the tokens of the turn.

Differences from the paper:

- Table 3 shows thoughts without line breaks. Here a line break ends a sub-question or a recalled
  fact. Text without line breaks is parsed too.
- The sentences that begin an execution ("I know about this:", "I need to look this up.") are our
  own. With them a search tree can ask for either branch.
- The paper's trees use a separate prompt for each kind of execution (tables 4 to 8). Here the
  policy writes all of them with one prompt. Only a second model uses separate prompts
  (`decex_writer.py`).
- The wording of all prompts is our own.
"""

import copy
import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal

from mujica_jax.agents import protocol
from mujica_jax.agents.agent import Attempt, Policy
from mujica_jax.agents.dialogue import Dialogue, Opening
from mujica_jax.agents.episode import Episode
from mujica_jax.agents.single import INFORMATION_TAG, numbered_passages
from mujica_jax.config.agents import DecexConfig
from mujica_jax.inference.requests import Completion, SamplingParams, TokenIds
from mujica_jax.models.thoughts import is_open_after
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.records import Conversation, Question, StopReason, Trajectory, Turn
from mujica_jax.retrieval.errors import RetrievalError
from mujica_jax.tasks.task import Environment, EnvironmentKind, Material

# The role of the conversation.
DECEX = "decex"
STOPS = ("</search>", "</answer>")

# The words with which decisions and executions begin.
SUB_QUESTION = "So, the next sub-question is:"
RECALL = "I recall that"
MEMORY = "I know about this:"
LOOK_UP = "I need to look this up."

# The retrieval decision: solve a sub-question from memory or by a search.
Source = Literal["memory", "search"]
# The termination decision: stop and answer, or go on with the next sub-question.
Decided = Literal["stop", "go_on"]
PieceKind = Literal["sub-question", "memory", "search", "answer"]
BEGINS: dict[Source, str] = {"memory": MEMORY, "search": f"{LOOK_UP} </think>\n<search>"}
AFTER_THOUGHT: dict[Decided, str] = {"stop": " </think>\n<answer>", "go_on": f" {SUB_QUESTION}"}

# --- Parsers for the turns that the model writes. ---

_THOUGHT_BEGINS = re.compile(r"\s*<think>", re.IGNORECASE)
_THOUGHT_ENDS = re.compile(r"</think>", re.IGNORECASE)
_SUB_QUESTION = re.compile(
    r"(?:so, )?(?:the )?next sub-question is:[ \t]*(?P<text>\S.*?)[ \t]*(?=\n|I recall that|\Z)",
    re.IGNORECASE,
)
_RECALLED = re.compile(
    r"I recall that[ \t]*(?P<text>\S.*?)[ \t]*(?=\n|(?:so, )?(?:the )?next sub-question is:|\Z)",
    re.IGNORECASE,
)
_REST_OF_LINE = re.compile(r"[ \t]*\n?")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """A decision with its execution, as parsed from the text of a turn.

    `text` is the sub-question, the recalled fact, the query or the final answer. `start` and `end`
    are positions in the parsed text. The thought before the decision ends at `start`.
    """

    kind: PieceKind
    text: str
    start: int
    end: int


def first_piece(text: str, *, in_thought: bool, has_sub_question: bool) -> Piece | None:
    """Return the first piece of a turn or of the rest of a turn, or None if there is none.

    `in_thought` is True if a thought is already open where the text begins. `has_sub_question` is
    True if a sub-question waits for its answer. Only outside of thoughts does a search or an answer
    count. If a turn contains both, the answer counts.
    """
    thought_end = _end_of_thought(text, in_thought)
    question = _SUB_QUESTION.search(text, 0, thought_end)
    recalled = _RECALLED.search(text, 0, thought_end) if has_sub_question else None
    if recalled is not None and (question is None or recalled.start() < question.start()):
        return _piece_in_thought(
            "memory", text, match=recalled, content=recalled["text"], thought_end=thought_end
        )
    if question is not None:
        # Other words may follow the sub-question on its line.
        line = question["text"]
        sub_question = line[: line.rfind("?") + 1] or line
        return _piece_in_thought(
            "sub-question", text, match=question, content=sub_question, thought_end=thought_end
        )

    after_thought = text[thought_end:]
    answer = protocol.parse_answer(after_thought)
    if answer is not None:
        return Piece(kind="answer", text=answer, start=thought_end, end=len(text))
    query = protocol.field("search", after_thought)
    if query:
        return Piece(kind="search", text=query, start=thought_end, end=len(text))
    return None


def _end_of_thought(text: str, in_thought: bool) -> int:
    """Return the position at which the first thought ends, or 0 if the text has no thought.

    `in_thought` is True if the chat template or an earlier piece has opened the thought.
    """
    closing = _THOUGHT_ENDS.search(text)
    if closing is not None:
        return closing.start()
    if in_thought or _THOUGHT_BEGINS.match(text):
        return len(text)
    return 0


def _piece_in_thought(
    kind: PieceKind, text: str, *, match: re.Match[str], content: str, thought_end: int
) -> Piece:
    """Return a piece that is part of a thought. It includes the white space that ends its line."""
    end = match.start("text") + len(content)
    rest_of_line = _REST_OF_LINE.match(text, end, thought_end)
    if rest_of_line is not None:
        end = rest_of_line.end()
    return Piece(kind=kind, text=protocol.one_line(content), start=match.start(), end=end)


# --- Writers of pieces, for demonstrations. ---
#
# They are in this file with the parsers, so that both keep to the same format.


def write_sub_question(thought: str, question: str) -> str:
    """Write a thought that asks the next sub-question."""
    return f"{thought} {SUB_QUESTION} {question}\n"


def write_memory(thought: str, recalled: str) -> str:
    """Write the part of a thought that answers a sub-question from memory."""
    return f"{MEMORY} {thought} {RECALL} {recalled}\n"


def write_search(query: str, thought: str = LOOK_UP) -> str:
    """Write the end of a thought and a search."""
    return f"{thought} </think>\n<search> {query} </search>"


def write_answer(thought: str, answer: str) -> str:
    """Write the end of a thought and the final answer."""
    return f"{thought} </think>\n<answer> {answer} </answer>"


# --- Prompts. ---

_BRIEF = "Ask, recall or search, answer."
_RULES = (
    "You answer a question by solving simpler ones, one after the other.\n"
    "Whenever you receive something new, think inside <think> ... </think> about what is known and "
    "what is missing. As long as something is missing, write in your thought "
    f'"{SUB_QUESTION}" and a sub-question that asks for one fact, and end the line. Then decide '
    "how to solve it.\n"
    f'If you are sure of its answer, begin the next line with "{MEMORY}", write what you know, and '
    f'end the line with "{RECALL}" and the answer in one sentence. Then think on.\n'
    f'If you are not sure, write "{LOOK_UP}", close the thought, and write a query for a search '
    "engine inside <search> ... </search>. It need not repeat the sub-question, but name what the "
    "right passage would say. You then receive passages inside <information> ... "
    "</information>.\n"
    "When a sub-question was not solved, ask it again in other words. When the question follows "
    "from what you recalled and found, say in your thought why, close it, and write only the final "
    "answer, as short as possible, inside <answer> ... </answer>. Do not answer from anything that "
    "you did not recall or find before."
)
# One worked example as pairs (user message, model's reply). The people and works are invented.
_EXAMPLES = (
    (
        "Question: Where was the director of film Amber Tide born?",
        "<think> "
        + write_sub_question(
            "I need the director of Amber Tide.", "Who directed the film Amber Tide?"
        )
        + write_search("Amber Tide 1961 film director"),
    ),
    (
        "<information>\n"
        "[0] Amber Tide: Amber Tide is a 1961 film directed by Ilse Vandermark.\n"
        "</information>",
        "<think> "
        + write_sub_question(
            "Ilse Vandermark directed it. I need her place of birth.",
            "Where was Ilse Vandermark born?",
        )
        + write_memory("she is a Flemish director.", "Ilse Vandermark was born in Ghent.")
        + write_answer("The director was born in Ghent.", "Ghent"),
    ),
)


def opening(mode: protocol.PromptMode) -> Opening:
    """Return the system prompt and the worked example.

    `mode` is `brief` for one line, `zero_shot` for the rules, or `few_shot` for the rules and a
    worked example.
    """
    if mode == "brief":
        return Opening(system=_BRIEF)
    return Opening(system=_RULES, examples=_EXAMPLES if mode == "few_shot" else ())


# --- The agent. ---


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """A sub-question that was solved by a recalled fact or by passages."""

    # The sub-question. If the model searched without asking one, it is the query.
    question: str
    # The thought that led to the question.
    thought: str = ""
    recalled: str | None = None
    query: str = ""
    materials: tuple[Material, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecexState:
    """The facts that the model knows when it writes."""

    role: ClassVar = DECEX
    question: Question
    steps: tuple[Step, ...]
    # The sub-question to solve, or None if the termination decision is next.
    asked: str | None
    # The text of the unfinished turn so far.
    turn: str = ""
    # Text that is given as the beginning of the rest of the turn. The policy continues after it.
    begins: str = ""
    # True if only the first piece of the new text is kept.
    is_piece: bool = False


class Decex:
    """The agent of DecEx-RAG. It implements `Agent`."""

    def __init__(self, tokenizer: Tokenizer, config: DecexConfig) -> None:
        self._tokenizer = tokenizer
        self._config = config

    def opening(self, role: str, kind: EnvironmentKind) -> Opening:
        """Return the system prompt and the worked example. Role and kind do not matter."""
        del role, kind
        return opening(self._config.prompt)

    def begin(self, attempt: Attempt, environment: Environment, policy: Policy) -> "Chain":
        """Return the chain of a new episode."""
        return Chain(self._tokenizer, self._config, attempt, environment, policy)

    async def run(self, attempt: Attempt, environment: Environment, policy: Policy) -> Trajectory:
        """Play one episode and return its record, without a reward."""
        return await self.begin(attempt, environment, policy).finish()


class Chain(Episode):
    """The reasoning about one question so far.

    `outcome` is None while the chain is unfinished. Then it holds the answer, which is empty if
    there is none, and the reason why the chain ended. `asked` is the sub-question to solve, or None.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        config: DecexConfig,
        attempt: Attempt,
        environment: Environment,
        policy: Policy,
    ) -> None:
        super().__init__(tokenizer, config, attempt, environment, policy)
        self._config = config
        prompt = opening(config.prompt)
        self._dialogue = Dialogue(tokenizer, DECEX, system=prompt.system, examples=prompt.examples)
        self._dialogue.add_user(f"Question: {protocol.one_line(attempt.question.text)}")
        # The path from the root of a search tree to this chain.
        self._place = ""
        # How many times the policy has written a part of a turn on this chain.
        self._writes = 0
        # The text of the unfinished turn, and its number of tokens.
        self._open_turn = ""
        self._open_tokens = 0
        # The thought that led to the current sub-question.
        self._thought = ""
        # Counts the sub-questions, and the searches without a sub-question.
        self._iterations = 0
        self._discarded_tokens = 0
        self.steps: tuple[Step, ...] = ()
        self.asked: str | None = None
        self.last: Piece | None = None
        self.outcome: tuple[str, StopReason] | None = None

    def fork(self, place: str) -> "Chain":
        """Return an independent copy of the chain.

        `place` is a name that is unique among the forks of this chain. The fork's sampling seeds
        depend on it.
        """
        other = copy.copy(self)
        other._dialogue = self._dialogue.fork()
        other.searches = list(self.searches)
        other._place = f"{self._place}/{place}"
        return other

    @property
    def tokens(self) -> int:
        """Number of tokens of the conversation so far, with the sampled tokens that were dropped.

        The tokens that the policy samples after the end of a piece are dropped.
        """
        return len(self._dialogue.token_ids) + self._discarded_tokens

    @property
    def can_ask(self) -> bool:
        """Whether the limit permits another sub-question."""
        return self._iterations < self._config.max_iterations

    @property
    def _is_in_thought(self) -> bool:
        """Whether the model's next token is inside of a thought.

        That is the case in the middle of a turn, and if the chat template opens a thought.
        """
        return bool(self._open_turn) or self._dialogue.thought_open

    def pieces(self) -> Conversation:
        """Return the conversation with each piece of the model as a separate turn."""
        return self._dialogue.record()

    def record(self) -> Conversation:
        """Return the conversation with the pieces of each turn joined into one turn.

        The result looks as if each turn had been sampled in one go.
        """
        conversation = self._dialogue.record()
        return dataclasses.replace(conversation, turns=_joined(conversation.turns))

    async def finish(self) -> Trajectory:
        """Sample turns until the chain ends, and return the record of the episode.

        A chain that has already ended gets no further turns.
        """
        while self.outcome is None:
            await self._turn()
        answer, reason = self.outcome
        recalls = sum(step.recalled is not None for step in self.steps)
        return self.trajectory(
            [self.record()], answer=answer, reason=reason, counts={"recalls": float(recalls)}
        )

    async def decide(self) -> None:
        """Sample the termination decision: the final answer or the next sub-question.

        If the limit permits no further sub-question and the model asks one, the chain ends.
        """
        await self._piece("sub-question", "answer")

    async def decide_otherwise(self, sample: "Chain", to: Decided) -> None:
        """Sample the piece of decision `to`, after the thought that `sample` wrote.

        `sample` is a fork with the same past, which has made the opposite decision.
        """
        thought = sample._ids_before_decision()
        begins = (*thought, *self.tokenizer.encode_model(AFTER_THOUGHT[to]))
        kind: PieceKind = "sub-question" if to == "go_on" else "answer"
        await self._piece(kind, begins=begins)

    async def solve(self, source: Source) -> None:
        """Solve the sub-question from the given source.

        The next piece begins with the words of this retrieval decision, and the model continues.
        """
        assert self.asked is not None, "there must be a sub-question to solve"
        new_line = "" if self._open_turn.endswith("\n") else "\n"
        begins = self.tokenizer.encode_model(f"{new_line}{BEGINS[source]}")
        await self._piece(source, begins=tuple(begins))

    async def _turn(self) -> None:
        """Sample the rest of a turn, and execute all of its pieces."""
        part = self._part(begins=(), read_piece=None)
        text = await self._write(part)
        if text is None:
            return

        in_thought = self._is_in_thought
        self._open_turn += text
        while self.outcome is None:
            piece = first_piece(
                text, in_thought=in_thought, has_sub_question=self.asked is not None
            )
            if piece is None:
                self.outcome = ("", StopReason.NO_ACTION)
                return
            await self._follow(piece, text[: piece.start])
            if piece.kind == "search":
                return
            text = text[piece.end :]
            in_thought = True

    async def _piece(self, *kinds: PieceKind, begins: tuple[int, ...] = ()) -> None:
        """Sample one piece and execute it. If its kind is not in `kinds`, the chain ends."""
        has_sub_question = self.asked is not None
        in_thought = self._is_in_thought

        def read_piece(text: str) -> Piece | None:
            return first_piece(text, in_thought=in_thought, has_sub_question=has_sub_question)

        part = self._part(begins=begins, read_piece=read_piece)
        text = await self._write(part)
        if text is None:
            return
        self._open_turn += text
        if part.piece is None or part.piece.kind not in kinds:
            self.outcome = ("", StopReason.NO_ACTION)
            return
        await self._follow(part.piece, text[: part.piece.start])

    async def _follow(self, piece: Piece, thought: str) -> None:
        """Execute a piece. `thought` is the text before its decision."""
        self.last = piece
        if piece.kind == "answer":
            self.outcome = (piece.text, StopReason.ANSWERED)
        elif piece.kind == "memory":
            self._add_step(recalled=piece.text)
        elif piece.kind == "sub-question":
            self._ask(piece.text, thought)
        else:
            if self.asked is None:
                self._ask(piece.text, thought)
            if self.outcome is None:
                await self._search(piece.text)

    def _ask(self, question: str, thought: str) -> None:
        """Begin a sub-question. If the limit permits no further one, the chain ends."""
        if not self.can_ask:
            self.outcome = ("", StopReason.ITERATION_LIMIT)
            return
        self._iterations += 1
        self.asked = question
        self._thought = protocol.one_line(_THOUGHT_BEGINS.sub("", thought))

    async def _search(self, query: str) -> None:
        """Solve the sub-question by a search, and append the passages as the next message."""
        try:
            materials = await self.search_passages(query, len(self.steps))
        except RetrievalError:
            self.outcome = ("", StopReason.RETRIEVER_FAILED)
            return
        self._dialogue.add_user(numbered_passages(materials), tag=INFORMATION_TAG)
        self._open_turn = ""
        self._open_tokens = 0
        self._add_step(query=query, materials=materials)

    def _add_step(
        self, *, recalled: str | None = None, query: str = "", materials: tuple[Material, ...] = ()
    ) -> None:
        """Record that the sub-question is solved."""
        assert self.asked is not None, "there must be a sub-question to solve"
        step = Step(
            question=self.asked,
            thought=self._thought,
            recalled=recalled,
            query=query,
            materials=materials,
        )
        self.steps = (*self.steps, step)
        self.asked = None

    def _part(
        self, *, begins: tuple[int, ...], read_piece: Callable[[str], Piece | None] | None
    ) -> "_PartOfTurn":
        """Return a policy that writes the rest of a turn, after the tokens `begins`.

        If there is a parser `read_piece`, the policy keeps only the first piece of the rest.
        """
        return _PartOfTurn(
            self.policy,
            self.tokenizer,
            begins=begins,
            max_tokens=self._config.max_turn_tokens - self._open_tokens,
            read_piece=read_piece,
        )

    async def _write(self, part: "_PartOfTurn") -> str | None:
        """Sample a part of a turn and return its text.

        If a length limit cuts it, the chain ends and the result is None.
        """
        state = DecexState(
            question=self.attempt.question,
            steps=self.steps,
            asked=self.asked,
            turn=self._open_turn,
            begins=self.tokenizer.decode(part.begins),
            is_piece=part.read_piece is not None,
        )
        self._writes += 1
        tokens_before = len(self._dialogue.token_ids)
        written = await self.write(
            self._dialogue,
            f"{self._place}/{self._writes}",
            state=state,
            stop_strings=STOPS,
            continues=True,
            policy=part,
        )
        self._open_tokens += len(self._dialogue.token_ids) - tokens_before
        self._discarded_tokens += part.discarded_tokens
        if written.cut is not None:
            self.outcome = ("", written.cut)
            return None
        return self._dialogue.record().turns[-1].text

    def _ids_before_decision(self) -> tuple[int, ...]:
        """Return the tokens of the last piece that come before its decision."""
        ids = self._dialogue.record().turns[-1].token_ids
        assert self.last is not None, "the chain must have made a decision"
        thought = _spelled(self.tokenizer, ids)[: self.last.start].rstrip()
        return ids[: _tokens_of(self.tokenizer, ids, text=thought)]


def _joined(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """Return the turns, with consecutive turns of the model joined into one."""
    joined: list[Turn] = []
    for turn in turns:
        previous = joined[-1] if joined else None
        if previous is None or previous.role != "model" or turn.role != "model":
            joined.append(turn)
            continue
        logprobs = None
        if previous.logprobs is not None and turn.logprobs is not None:
            logprobs = (*previous.logprobs, *turn.logprobs)
        joined[-1] = dataclasses.replace(
            turn,
            token_ids=(*previous.token_ids, *turn.token_ids),
            text=previous.text + turn.text,
            logprobs=logprobs,
            trained=previous.trained and turn.trained,
            cut=turn.cut,
        )
    return tuple(joined)


def _spelled(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Return the text of tokens. The bytes of incomplete characters become surrogate escapes."""
    return b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", "surrogateescape")


def _readable(spelled: str) -> str:
    """Return a text from `_spelled` with U+FFFD in place of each incomplete character."""
    return spelled.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _tokens_of(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> int:
    """Return how many of the first tokens spell `text`, the beginning of their joined text.

    The last token may extend beyond `text`. It is counted if the rest of it is white space.
    """
    text_bytes = len(text.encode("utf-8", "surrogateescape"))
    spelled_bytes = 0
    for count, token in enumerate(ids):
        token_bytes = tokenizer.token_bytes(token)
        if spelled_bytes + len(token_bytes) > text_bytes:
            is_begun = spelled_bytes < text_bytes
            bytes_beyond_text = token_bytes[text_bytes - spelled_bytes :]
            if is_begun and not bytes_beyond_text.strip():
                return count + 1
            return count
        spelled_bytes += len(token_bytes)
    return len(ids)


class _PartOfTurn:
    """A policy that puts the tokens `begins` before the text that another policy writes.

    If there is a parser `read_piece`, only the first piece is kept. The tokens after it are counted
    in `discarded_tokens` and dropped. `piece` is then the parsed piece.

    The tokens in `begins` were not sampled and have no log-probabilities. A completion that starts
    with them therefore has none at all.
    """

    def __init__(
        self,
        policy: Policy,
        tokenizer: Tokenizer,
        *,
        begins: tuple[int, ...],
        max_tokens: int,
        read_piece: Callable[[str], Piece | None] | None,
    ) -> None:
        self._policy = policy
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self.begins = begins
        self.read_piece = read_piece
        self.piece: Piece | None = None
        self.discarded_tokens = 0

    @property
    def version(self) -> int:
        """Return the version of the other policy."""
        return self._policy.version

    async def generate(
        self, prompt: TokenIds, params: SamplingParams, *, state: object, continues: bool
    ) -> Completion:
        """Write the rest of the turn. It begins with the tokens `begins`."""
        room = min(params.max_new_tokens, self._max_tokens)
        new_tokens = room - len(self.begins)
        if new_tokens < 1:
            ids = self.begins[: max(room, 0)]
            return Completion(
                token_ids=ids, logprobs=None, finish_reason="length", policy_version=self.version
            )

        thought_open = is_open_after(
            self._tokenizer.decode(self.begins), was_open=params.thought_open
        )
        params = dataclasses.replace(params, max_new_tokens=new_tokens, thought_open=thought_open)
        completion = await self._policy.generate(
            (*prompt, *self.begins), params, state=state, continues=continues
        )
        if self.begins:
            ids = (*self.begins, *completion.token_ids)
            completion = dataclasses.replace(
                completion, token_ids=ids, logprobs=None, sampling_logprobs=None
            )
        if self.read_piece is None:
            return completion
        return self._cut_after_first_piece(completion, self.read_piece)

    def _cut_after_first_piece(
        self, completion: Completion, read_piece: Callable[[str], Piece | None]
    ) -> Completion:
        """Parse the first piece, and return the completion without the tokens after it."""
        ids = completion.token_ids
        if completion.finish_reason == "stop":
            ids = ids[:-1]
        text = _spelled(self._tokenizer, ids)
        piece = read_piece(text)
        if piece is not None:
            # Positions refer to the text with surrogate escapes. The text of a piece is searched
            # and stored, so it must be valid Unicode.
            self.piece = dataclasses.replace(piece, text=_readable(piece.text))

        # A search or an answer ends the turn.
        if piece is None or piece.kind in ("search", "answer"):
            return completion
        # If the piece ends where the length limit cut the turn, it may be incomplete.
        ends_with_piece = piece.end == len(text) and not text.endswith("\n")
        if completion.finish_reason == "length" and ends_with_piece:
            return completion

        count = _tokens_of(self._tokenizer, ids, text=text[: piece.end])
        self.discarded_tokens = len(completion.token_ids) - count
        logprobs = None if completion.logprobs is None else completion.logprobs[:count]
        return dataclasses.replace(
            completion,
            token_ids=ids[:count],
            logprobs=logprobs,
            sampling_logprobs=None,
            finish_reason="stop_string",
            stop_string=None,
        )
