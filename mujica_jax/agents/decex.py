"""DecEx-RAG's process of decisions and executions (section 2.1 of the paper).

The output format is that of the paper's table 3. A turn of the model is one thought, then one
search or the final answer. The result of a search is the next message:

    <think> I need the director. So, the next sub-question is: Who directed the film Amber Tide?
    I need to look this up. </think>
    <search> Amber Tide 1961 film director </search>

    <information> ... </information>

    <think> Ilse Vandermark made it. So, the next sub-question is: Where was Ilse Vandermark born?
    I know about this: she is a Flemish director. I recall that Ilse Vandermark was born in Ghent.
    She was born in Ghent. </think>
    <answer> Ghent </answer>

Both decisions stand in the thought. The termination decision is a sub-question, or the end of the
thought with the final answer. The retrieval decision is a recalled fact, or the end of the thought
with a sub-query. Each decision with its execution is a `Piece` of a turn. An episode is sampled
turn by turn. A search tree (`methods/decex/tree.py`) samples it piece by piece: it samples the rest
of a turn and keeps the tokens of the first piece. So the pieces of a turn are the very tokens of
that turn.

Differences from the paper. Table 3 prints a thought without line breaks. Here a line break ends a
sub-question or a recalled fact; text without line breaks is read too. The sentences that begin an
execution ("I know about this:", "I need to look this up.") are ours, so that a tree can ask for
either branch. The paper's trees ask for each kind of execution under a prompt of its own (tables 4
to 8). Here the policy writes all of them under one prompt; a second model has those prompts
(`decex_writer.py`). The wording of all prompts is ours.
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

DECEX = "decex"  # role of the conversation
STOPS = ("</search>", "</answer>")

# What decisions and executions begin with.
SUB_QUESTION = "So, the next sub-question is:"
RECALL = "I recall that"
MEMORY = "I know about this:"
LOOK_UP = "I need to look this up."

# How a sub-question is solved: the retrieval decision.
Source = Literal["memory", "search"]
# Whether to answer or to ask the next sub-question: the termination decision.
Decided = Literal["stop", "go_on"]
PieceKind = Literal["sub-question", "memory", "search", "answer"]
BEGINS: dict[Source, str] = {"memory": MEMORY, "search": f"{LOOK_UP} </think>\n<search>"}
AFTER_THOUGHT: dict[Decided, str] = {"stop": " </think>\n<answer>", "go_on": f" {SUB_QUESTION}"}

# --- parsing what the model wrote ---

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
    """A decision with its execution."""

    kind: PieceKind
    text: str  # the sub-question, what is recalled, the sub-query or the final answer
    # Places in the text that was read. The thought before the decision ends at `start`.
    start: int
    end: int


def first_piece(text: str, *, in_thought: bool, has_sub_question: bool) -> Piece | None:
    """Return the first piece of a turn, or of the rest of one; None where nothing can be read.

    `in_thought` says that a thought is open where the text begins, `has_sub_question` that a
    sub-question waits for its answer. A search or an answer counts outside of thoughts only. An
    answer counts even where the turn also searches.
    """
    thought_end = _end_of_thought(text, in_thought)
    question = _SUB_QUESTION.search(text, 0, thought_end)
    recalled = _RECALLED.search(text, 0, thought_end) if has_sub_question else None
    if recalled is not None and (question is None or recalled.start() < question.start()):
        return _piece_in_thought(
            "memory", text, match=recalled, content=recalled["text"], thought_end=thought_end
        )
    if question is not None:
        # A sub-question may be followed by other words on its line.
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
    """Return where the first thought is closed; 0 where there is none.

    A chat template may have opened it.
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
    """Return a piece that stands in a thought. It ends with the white space of its line."""
    end = match.start("text") + len(content)
    rest_of_line = _REST_OF_LINE.match(text, end, thought_end)
    if rest_of_line is not None:
        end = rest_of_line.end()
    return Piece(kind=kind, text=protocol.one_line(content), start=match.start(), end=end)


# --- what the model writes ---
#
# Demonstrations are written with these functions, so that writer and reader cannot drift apart.


def write_sub_question(thought: str, question: str) -> str:
    return f"{thought} {SUB_QUESTION} {question}\n"


def write_memory(thought: str, recalled: str) -> str:
    return f"{MEMORY} {thought} {RECALL} {recalled}\n"


def write_search(query: str, thought: str = LOOK_UP) -> str:
    return f"{thought} </think>\n<search> {query} </search>"


def write_answer(thought: str, answer: str) -> str:
    return f"{thought} </think>\n<answer> {answer} </answer>"


# --- prompts ---

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
# One worked example: what the model is shown, and what it writes. People and works are invented.
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
    """Return the prompt of a mode.

    `brief` is one line, `zero_shot` the rules, `few_shot` the rules and a worked example.
    """
    if mode == "brief":
        return Opening(system=_BRIEF)
    return Opening(system=_RULES, examples=_EXAMPLES if mode == "few_shot" else ())


# --- the agent ---


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """A sub-question that was solved, by a recalled fact or by passages."""

    # The sub-question, or the query of a turn that searched without one.
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
    # The sub-question to solve, or None where the next decision is due.
    asked: str | None
    # The text of the open turn so far.
    turn: str = ""
    # The beginning of the rest of the turn. The policy writes on from there.
    begins: str = ""
    # Whether only the first piece of the new text stays in the turn.
    is_piece: bool = False


class Decex:
    """Implements `Agent`."""

    def __init__(self, tokenizer: Tokenizer, config: DecexConfig) -> None:
        self._tokenizer = tokenizer
        self._config = config

    def opening(self, role: str, kind: EnvironmentKind) -> Opening:
        del role, kind
        return opening(self._config.prompt)

    def begin(self, attempt: Attempt, environment: Environment, policy: Policy) -> "Chain":
        return Chain(self._tokenizer, self._config, attempt, environment, policy)

    async def run(self, attempt: Attempt, environment: Environment, policy: Policy) -> Trajectory:
        return await self.begin(attempt, environment, policy).finish()


class Chain(Episode):
    """The reasoning about one question so far. It ends with an outcome: the answer, and why."""

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
        # The path from the root of a search tree, and how many parts were written on this chain.
        self._place = ""
        self._writes = 0
        # The text and the tokens of the turn that is being written.
        self._open_turn = ""
        self._open_tokens = 0
        # The thought that led to the sub-question.
        self._thought = ""
        # Sub-questions, and searches without one.
        self._iterations = 0
        self._discarded_tokens = 0
        self.steps: tuple[Step, ...] = ()
        self.asked: str | None = None
        self.last: Piece | None = None
        self.outcome: tuple[str, StopReason] | None = None

    def fork(self, place: str) -> "Chain":
        """Return a chain with the same past and a future of its own.

        `place` is unique among the forks of this chain: it seeds what the fork samples.
        """
        other = copy.copy(self)
        other._dialogue = self._dialogue.fork()
        other.searches = list(self.searches)
        other._place = f"{self._place}/{place}"
        return other

    @property
    def tokens(self) -> int:
        """Tokens of the conversation so far, with those that were sampled beyond a piece."""
        return len(self._dialogue.token_ids) + self._discarded_tokens

    @property
    def can_ask(self) -> bool:
        """Whether iterations are left."""
        return self._iterations < self._config.max_iterations

    @property
    def _is_in_thought(self) -> bool:
        """Whether the model writes on in its thought.

        It does so in the middle of a turn, and after a template that opens the thought.
        """
        return bool(self._open_turn) or self._dialogue.thought_open

    def pieces(self) -> Conversation:
        """Return the conversation with each piece of the model as a turn."""
        return self._dialogue.record()

    def record(self) -> Conversation:
        """Return the conversation with the pieces of each turn joined.

        The turns are as if each had been sampled at once.
        """
        conversation = self._dialogue.record()
        return dataclasses.replace(conversation, turns=_joined(conversation.turns))

    async def finish(self) -> Trajectory:
        """Write turns to the end and return the record. A chain that has ended stays as it is."""
        while self.outcome is None:
            await self._turn()
        answer, reason = self.outcome
        recalls = sum(step.recalled is not None for step in self.steps)
        return self.trajectory(
            [self.record()], answer=answer, reason=reason, counts={"recalls": float(recalls)}
        )

    async def decide(self) -> None:
        """Take the termination decision: the final answer or the next sub-question.

        A sub-question is possible only while iterations are left.
        """
        await self._piece("sub-question", "answer")

    async def decide_otherwise(self, sample: "Chain", to: Decided) -> None:
        """Take the other termination decision than `sample`, after the same thought.

        `sample` is a fork with the same past.
        """
        thought = sample._ids_before_decision()
        begins = (*thought, *self.tokenizer.encode_model(AFTER_THOUGHT[to]))
        kind: PieceKind = "sub-question" if to == "go_on" else "answer"
        await self._piece(kind, begins=begins)

    async def solve(self, source: Source) -> None:
        """Execute the retrieval decision.

        The next piece begins with the words of the decision, and the model writes on.
        """
        assert self.asked is not None, "a sub-question is solved"
        new_line = "" if self._open_turn.endswith("\n") else "\n"
        begins = self.tokenizer.encode_model(f"{new_line}{BEGINS[source]}")
        await self._piece(source, begins=tuple(begins))

    async def _turn(self) -> None:
        """Write the rest of a turn, and follow all of its pieces."""
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
        """Write one piece. The chain ends where the piece is of no kind in `kinds`."""
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
        """Do what a piece says. `thought` is the text before its decision."""
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
        """Begin a sub-question. Without an iteration left, the chain ends."""
        if not self.can_ask:
            self.outcome = ("", StopReason.ITERATION_LIMIT)
            return
        self._iterations += 1
        self.asked = question
        self._thought = protocol.one_line(_THOUGHT_BEGINS.sub("", thought))

    async def _search(self, query: str) -> None:
        """Solve the sub-question by a search, whose passages are the next message."""
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
        assert self.asked is not None, "a sub-question is solved"
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
        """Return the policy that writes the rest of a turn.

        With `read_piece` it writes the first piece of the rest only.
        """
        return _PartOfTurn(
            self.policy,
            self.tokenizer,
            begins=begins,
            max_tokens=self._config.max_turn_tokens - self._open_tokens,
            read_piece=read_piece,
        )

    async def _write(self, part: "_PartOfTurn") -> str | None:
        """Write a part of a turn and return its text.

        If a limit cuts it, the chain ends and None is returned.
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
        """Return the tokens of the last piece that stand before its decision."""
        ids = self._dialogue.record().turns[-1].token_ids
        assert self.last is not None, "the chain has decided"
        thought = _spelled(self.tokenizer, ids)[: self.last.start].rstrip()
        return ids[: _tokens_of(self.tokenizer, ids, text=thought)]


def _joined(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """Return the turns with each run of model turns as one."""
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
    """Return the text of tokens byte by byte. Half a character at its end is kept."""
    return b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", "surrogateescape")


def _readable(spelled: str) -> str:
    """Return spelled text with U+FFFD for each part of a character that is not whole."""
    return spelled.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _tokens_of(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> int:
    """Return how many of the first tokens spell `text`, which is the beginning of what they say.

    A token that goes on beyond `text` is counted if it adds only white space.
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
    """Implements `Policy`: lets another policy write on after the tokens `begins`.

    With `read_piece` the first piece is kept and the tokens after it are left out. The tokens of
    `begins` have no log-probabilities, and then neither has the rest.
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
        self.piece: Piece | None = None  # the first piece, once it is read
        self.discarded_tokens = 0

    @property
    def version(self) -> int:
        return self._policy.version

    async def generate(
        self, prompt: TokenIds, params: SamplingParams, *, state: object, continues: bool
    ) -> Completion:
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
        """Read the first piece, and return the completion without the tokens after it."""
        ids = completion.token_ids
        if completion.finish_reason == "stop":
            ids = ids[:-1]
        text = _spelled(self._tokenizer, ids)
        piece = read_piece(text)
        if piece is not None:
            # Places count in the spelled text, but what is searched and stored must be whole text.
            self.piece = dataclasses.replace(piece, text=_readable(piece.text))

        # A search or an answer ends the turn.
        if piece is None or piece.kind in ("search", "answer"):
            return completion
        # The length limit may have cut the piece itself.
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
