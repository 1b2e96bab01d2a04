"""DecEx-RAG's process of decisions and executions, in one conversation (section 2.1 of the paper).

    decide   <think> ... </think> <question> sub-question </question>    to go on
             <think> ... </think> <answer> final answer </answer>        to stop
    solve    <recall> the sub-answer, from memory </recall>  or  <search> sub-query </search>

The state s_t = [Q, (q_1, r_1), ..., (q_t, r_t)] is the conversation so far. An iteration is two turns: the termination
decision with what it leads to, and the retrieval decision with what that leads to. Sub-question and sub-query are
written apart from each other, so that a query can be worded for the retriever. What a search found is the next message.

Differences from the paper. Its trained model writes the sub-questions and remembered answers of several iterations
into one thought and stops at each search; here each decision is a turn, so that a search tree can branch at it and
score it (`methods/search_tree.py`). Its search asks for each kind of execution under a prompt of its own (tables 4 to
7); here all are written under one prompt, and `Chain.solve` can be told how the turn begins. The wording is ours.
"""

import copy
import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Literal

from mujica_jax.agents import protocol
from mujica_jax.agents.agent import Attempt, Policy
from mujica_jax.agents.dialogue import Dialogue, Opening
from mujica_jax.agents.episode import Episode
from mujica_jax.agents.single import information
from mujica_jax.config.agents import DecexConfig
from mujica_jax.inference.requests import Completion, SamplingParams, TokenIds
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.records import Conversation, Question, StopReason, Trajectory
from mujica_jax.retrieval.errors import RetrievalError
from mujica_jax.tasks.task import Environment, EnvironmentKind, Material

DECEX = "decex"  # role of the conversation
STOPS = ("</question>", "</answer>", "</recall>", "</search>")
Source = Literal["memory", "search"]  # how a sub-question is solved
BEGINS: dict[Source, str] = {"memory": "<recall>", "search": "<search>"}
SOLVE = "Recall or search?"  # after a sub-question
GO_ON = "Go on."  # after a sub-answer from memory

# --- parsing what the model wrote, and writing it for demonstrations ---


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
    """One parsed turn that decides whether to go on: a sub-question, or the final answer, or neither."""

    question: str | None = None
    answer: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Solution:
    """One parsed turn that solves a sub-question: a sub-answer, or a sub-query, or neither."""

    recalled: str | None = None
    query: str | None = None


def parse_decision(text: str) -> Decision:
    """An answer ends the episode even where the turn also asks; thoughts are not read."""
    if (answer := protocol.parse_answer(text)) is not None:
        return Decision(answer=answer)
    return Decision(question=protocol.field("question", text) or None)


def parse_solution(text: str) -> Solution:
    """What is remembered counts even where the turn also searches; thoughts are not read."""
    recalled = protocol.field("recall", text)
    return Solution(recalled=recalled) if recalled else Solution(query=protocol.field("search", text) or None)


def write_decision(thought: str, decision: Decision) -> str:
    if decision.answer is not None:
        return protocol.write_answer(thought, decision.answer)
    return f"<think> {thought} </think>\n<question> {decision.question} </question>"


def write_solution(solution: Solution) -> str:
    if solution.recalled:
        return f"<recall> {solution.recalled} </recall>"
    return f"<search> {solution.query} </search>"


# --- prompts ---

_BRIEF = "Ask, recall or search, answer."
_RULES = (
    "You answer a question by solving simpler ones, one after the other.\n"
    "Whenever you learn something new, think inside <think> ... </think> about what is known and what is missing. "
    "Then either write the next sub-question, which asks for one fact, inside <question> ... </question>, or finish.\n"
    "After a sub-question you are asked whether you recall its answer or search for it. If you are sure of it, write "
    "it inside <recall> ... </recall>. If not, write a query for a search engine inside <search> ... </search>: it "
    "need not repeat the sub-question, but name what the right passage would say. You then receive passages.\n"
    "When a sub-question was not solved, ask it again in other words. When you know enough, write only the final "
    "answer, as short as possible, inside <answer> ... </answer>."
)
# A worked example as chat turns: (user message, model's reply). People and works are invented.
_EXAMPLES = (
    (
        "Question: Where was the director of film Amber Tide born?",
        write_decision("I need the director of Amber Tide.", Decision(question="Who directed the film Amber Tide?")),
    ),
    (SOLVE, write_solution(Solution(query="Amber Tide 1961 film director"))),
    (
        information((Material(text="Amber Tide: Amber Tide is a 1961 film directed by Ilse Vandermark."),)),
        write_decision(
            "Ilse Vandermark directed it. I need her place of birth.",
            Decision(question="Where was Ilse Vandermark born?"),
        ),
    ),
    (SOLVE, write_solution(Solution(recalled="Ilse Vandermark was born in Ghent."))),
    (GO_ON, write_decision("She was born in Ghent.", Decision(answer="Ghent"))),
)


def opening(mode: protocol.PromptMode) -> Opening:
    """Return the prompt of a mode: one line (`brief`), the rules, or the rules and a worked example (`few_shot`)."""
    if mode == "brief":
        return Opening(system=_BRIEF)
    return Opening(system=_RULES, examples=_EXAMPLES if mode == "few_shot" else ())


# --- the agent ---


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """A sub-question that was solved, by what is remembered or by the passages that were found."""

    question: str
    recalled: str | None = None
    materials: tuple[Material, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecexState:
    """What the model knows when it writes."""

    role: ClassVar = DECEX
    question: Question
    steps: tuple[Step, ...]
    asked: str | None  # the sub-question to solve; None where the next decision is due


class Decex:
    """Implements `Agent`."""

    def __init__(self, tokenizer: Tokenizer, config: DecexConfig) -> None:
        self._tokenizer, self._config = tokenizer, config

    def opening(self, role: str, kind: EnvironmentKind) -> Opening:
        del role, kind
        return opening(self._config.prompt)

    def begin(self, attempt: Attempt, environment: Environment, policy: Policy) -> "Chain":
        return Chain(self._tokenizer, self._config, attempt, environment, policy)

    async def run(self, attempt: Attempt, environment: Environment, policy: Policy) -> Trajectory:
        return await self.begin(attempt, environment, policy).finish()


class Chain(Episode):
    """The reasoning about one question, as far as it has come. It ends with an outcome: the answer, and why."""

    def __init__(
        self, tokenizer: Tokenizer, config: DecexConfig, attempt: Attempt, environment: Environment, policy: Policy
    ) -> None:
        super().__init__(tokenizer, config, attempt, environment, policy)
        self._config = config
        begins = opening(config.prompt)
        self._dialogue = Dialogue(tokenizer, DECEX, begins.system, begins.examples)
        self._dialogue.add_user(f"Question: {protocol.one_line(attempt.question.text)}")
        self._place = ""  # in a search tree
        self._turns = 0
        self.steps: tuple[Step, ...] = ()
        self.asked: str | None = None
        self.outcome: tuple[str, StopReason] | None = None

    def fork(self, place: str) -> "Chain":
        """The same past, and a future of its own. `place` is unique among the forks of this chain: it seeds what the
        fork samples."""
        other = copy.copy(self)
        other._dialogue, other.searches = self._dialogue.fork(), list(self.searches)
        other._place = f"{self._place}/{place}"
        return other

    @property
    def tokens(self) -> int:
        """Of the conversation so far."""
        return len(self._dialogue.token_ids)

    def record(self) -> Conversation:
        return self._dialogue.record()

    async def finish(self) -> Trajectory:
        """Go on to the end. One that has ended stays as it is."""
        while self.outcome is None:
            await (self.decide() if self.asked is None else self.solve())
        answer, reason = self.outcome
        recalls = sum(step.recalled is not None for step in self.steps)
        return self.trajectory([self.record()], answer, reason, {"recalls": float(recalls)})

    async def decide(self) -> None:
        """The termination decision: the final answer, or the next sub-question while iterations are left."""
        text = await self._write()
        if text is None:
            return
        decision = parse_decision(text)
        if decision.answer is not None:
            self.outcome = decision.answer, StopReason.ANSWERED
        elif decision.question is None:
            self.outcome = "", StopReason.NO_ACTION
        elif len(self.steps) == self._config.max_iterations:
            self.outcome = "", StopReason.ITERATION_LIMIT
        else:
            self.asked = decision.question
            self._dialogue.add_user(SOLVE)

    async def solve(self, source: Source | None = None) -> None:
        """The retrieval decision. With a `source` it is taken already: the turn begins with its tag, as if the model
        had written it, and the model writes the rest."""
        assert self.asked is not None, "a sub-question is solved"
        text = await self._write(BEGINS[source] if source else "")
        if text is None:
            return
        solution = parse_solution(text)
        if solution.recalled is None and solution.query is None:
            self.outcome = "", StopReason.NO_ACTION
            return
        materials: tuple[Material, ...] = ()
        if solution.query is not None:
            try:
                materials = await self.search_passages(solution.query, len(self.steps))
            except RetrievalError:
                self.outcome = "", StopReason.RETRIEVER_FAILED
                return
        self._dialogue.add_user(GO_ON if solution.query is None else information(materials))
        self.steps = (*self.steps, Step(question=self.asked, recalled=solution.recalled, materials=materials))
        self.asked = None

    async def _write(self, begins: str = "") -> str | None:
        """One turn; None, with the outcome, where a limit cut it."""
        policy, self._turns = self.policy, self._turns + 1
        state = DecexState(question=self.attempt.question, steps=self.steps, asked=self.asked)
        if begins:
            self.policy = _Begun(policy, self.tokenizer.encode_model(begins))
        place = f"{self._place}/{self._turns}"
        try:
            written = await self.write(self._dialogue, place, state=state, stop_strings=STOPS, continues=True)
        finally:
            self.policy = policy
        if written.cut is not None:
            self.outcome = "", written.cut
            return None
        return written.text


class _Begun:
    """Another policy's turns after these first tokens, which it has no log-probabilities for."""

    def __init__(self, policy: Policy, begins: Sequence[int]) -> None:
        self._policy, self._begins = policy, tuple(begins)

    @property
    def version(self) -> int:
        return self._policy.version

    async def generate(self, prompt: TokenIds, params: SamplingParams, *, state: object, continues: bool) -> Completion:
        room = params.max_new_tokens - len(self._begins)
        if room < 1:
            ids = self._begins[: params.max_new_tokens]
            return Completion(token_ids=ids, logprobs=None, finish_reason="length", policy_version=self.version)
        rest = dataclasses.replace(params, max_new_tokens=room)
        found = await self._policy.generate((*prompt, *self._begins), rest, state=state, continues=continues)
        ids = (*self._begins, *found.token_ids)
        return dataclasses.replace(found, token_ids=ids, logprobs=None, sampling_logprobs=None)
