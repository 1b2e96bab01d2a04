"""Report what happens in an episode while it is played.

`EpisodeWatch` wraps the policy and the environment of an episode. The wrappers report every turn
and every search as an event, and change nothing. So any program can follow an episode, and no agent
has to know about it. For the agent mujica, the events also say which sub-questions a turn asks, and
what a worker selected and answered. They are read from the turns with the functions that the agent
itself uses.
"""

import codecs
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from mujica_jax.agents import protocol
from mujica_jax.agents.agent import Agent, Policy, StreamingPolicy
from mujica_jax.agents.dialogue import Dialogue
from mujica_jax.agents.mujica import Mujica, PlannerState, WorkerState
from mujica_jax.agents.protocol import WORKER
from mujica_jax.inference.requests import Completion, SamplingParams, TokenIds
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.records import Entity, Question, Trajectory, generated_tokens
from mujica_jax.retrieval.statistics import RetrievalStatistics
from mujica_jax.tasks.task import Environment, EnvironmentKind, Material


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened in an episode.

    Attributes:
        at_seconds: Seconds from the start of the episode to this event.
    """

    name: ClassVar[str]

    at_seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Return the name and the fields of the event as values that JSON can hold."""
        return {"event": self.name, **dataclasses.asdict(self)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpisodeStarted(Event):
    """The episode begins. `candidates` holds the labels of the question's entities."""

    name: ClassVar[str] = "started"

    question: str
    candidates: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SubQuestion:
    """A sub-question that a planner's turn asks.

    Attributes:
        query: The sub-question.
        entity: The label of the entity that is searched. Empty over passages.
        refusal: Why it is not searched. Empty if it is.
    """

    query: str
    entity: str = ""
    refusal: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TurnWritten(Event):
    """The model wrote a turn. Turns of mujica's workers are `SubQuestionAnswered` instead.

    Attributes:
        role: The role that the model plays, such as "planner" or "single".
        iteration: Number of the turn, counted from 0.
        text: The turn as the agent reads it.
        sub_questions: The sub-questions that the turn asks. Only mujica's planner has them.
        seconds: How long the model took.
        generated_tokens: Number of tokens that the model wrote.
    """

    name: ClassVar[str] = "turn"

    role: str
    iteration: int
    text: str
    sub_questions: tuple[SubQuestion, ...] = ()
    seconds: float
    generated_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextWritten(Event):
    """The model wrote a part of a turn, which goes on or has just ended.

    Models behind an endpoint write whole turns, without these events. `TurnWritten` and
    `SubQuestionAnswered` have the whole text, as the agent reads it: it may be shorter.

    Attributes:
        role: The role that the model plays, such as "planner" or "worker".
        iteration: Number of the turn, counted from 0. For a worker of mujica: of the planner's turn
            that asked the sub-question.
        number: Position of a worker's sub-question in this turn, counted from 0. None for others.
        text: The new text.
    """

    name: ClassVar[str] = "text"

    role: str
    iteration: int
    number: int | None
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchFinished(Event):
    """A search returned its results.

    Attributes:
        iteration: Number of the turn that asked for the search, counted from 0.
        number: Position of the search among those of this turn, counted from 0.
        query: The searched text.
        entity: The label of the searched entity. Empty over passages.
        materials: The results, best first.
        seconds: How long the search took.
    """

    name: ClassVar[str] = "search"

    iteration: int
    number: int
    query: str
    entity: str
    materials: tuple[str, ...]
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class SubQuestionAnswered(Event):
    """A worker read the results of a search and answered the sub-question.

    Attributes:
        iteration: Number of the planner's turn that asked the sub-question, counted from 0.
        number: Position of the sub-question in this turn, counted from 0.
        query: The sub-question.
        selected: The results that the worker selected.
        sentence: The worker's answer.
        text: The worker's turn.
        seconds: How long the model took.
        generated_tokens: Number of tokens that the model wrote.
    """

    name: ClassVar[str] = "worker"

    iteration: int
    number: int
    query: str
    selected: tuple[str, ...]
    sentence: str
    text: str
    seconds: float
    generated_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpisodeFinished(Event):
    """The episode ended.

    Attributes:
        answer: The answer. Empty if there is none.
        stop_reason: Why the episode ended, as `StopReason` names it.
        searches: Number of searches that were answered.
        generated_tokens: Number of tokens that the model wrote in the whole episode.
    """

    name: ClassVar[str] = "finished"

    answer: str
    stop_reason: str
    searches: int
    generated_tokens: int


OnEvent = Callable[[Event], None]


class EpisodeWatch:
    """The reporter of one episode. It calls `on_event` for each event, in the episode's thread."""

    def __init__(
        self, agent: Agent, tokenizer: Tokenizer, kind: EnvironmentKind, on_event: OnEvent
    ) -> None:
        """Start the clock. `kind` is the kind of the environment that the agent searches."""
        self._mujica = agent if isinstance(agent, Mujica) else None
        self._tokenizer = tokenizer
        self._kind: EnvironmentKind = kind
        self._report = on_event
        self._start_time = time.monotonic()
        # Number of turns so far, without those of workers.
        self._turns = 0
        # The searches of the last turn as (query, label of the entity). None: the search has ended.
        self._unsearched: list[tuple[str, str] | None] = []
        # The same searches. None: a worker has read the results.
        self._unread: list[tuple[str, str] | None] = []

    def policy(self, policy: Policy) -> Policy:
        """Return the policy with its turns reported."""
        return _WatchedPolicy(self, policy)

    def environment(self, environment: Environment) -> Environment:
        """Return the environment with its searches reported."""
        return _WatchedEnvironment(self, environment)

    def started(self, question: Question) -> None:
        """Report that the episode begins."""
        candidates = tuple(entity.label for entity in question.candidates)
        self._report(
            EpisodeStarted(
                at_seconds=self._elapsed(), question=question.text, candidates=candidates
            )
        )

    def finished(self, trajectory: Trajectory) -> None:
        """Report that the episode ended."""
        self._report(
            EpisodeFinished(
                at_seconds=self._elapsed(),
                answer=trajectory.answer,
                stop_reason=trajectory.stop_reason.value,
                searches=len(trajectory.searches),
                generated_tokens=generated_tokens([trajectory]),
            )
        )

    def begin_turn(self, state: object) -> "_WatchedTurn":
        """Return what reports the turn that the model writes next."""
        role = str(getattr(state, "role", ""))
        if self._mujica is None or not isinstance(state, WorkerState):
            return _WatchedTurn(self, state, role=role, iteration=self._turns, number=None)
        number = self._unread.index((state.query, _label(state.entity)))
        self._unread[number] = None
        return _WatchedTurn(self, state, role=role, iteration=self._turns - 1, number=number)

    def wrote_part(self, turn: "_WatchedTurn", token_ids: TokenIds) -> None:
        """Report a part of a turn."""
        shown = [token for token in token_ids if token not in self._tokenizer.stop_token_ids]
        data = b"".join(self._tokenizer.token_bytes(token) for token in shown)
        text = turn.decoder.decode(data)
        if text:
            self._report(
                TextWritten(
                    at_seconds=self._elapsed(),
                    role=turn.role,
                    iteration=turn.iteration,
                    number=turn.number,
                    text=text,
                )
            )

    def wrote(self, turn: "_WatchedTurn", completion: Completion, seconds: float) -> None:
        """Report a whole turn. `seconds` is how long the model took."""
        state = turn.state
        if self._mujica is not None and isinstance(state, WorkerState):
            self._worker_wrote(self._mujica, turn, completion, state, seconds)
            return

        sub_questions: tuple[SubQuestion, ...] = ()
        if self._mujica is not None and isinstance(state, PlannerState):
            text = self._text(completion, self._mujica.contract.observation(self._kind))
            # A turn that a limit cut asks nothing.
            if completion.finish_reason != "length":
                sub_questions = _sub_questions(self._mujica, text, state, self._kind)
        else:
            text = self._text(completion, None)

        searches = [(entry.query, entry.entity) for entry in sub_questions if not entry.refusal]
        self._unsearched = list(searches)
        self._unread = list(searches)
        self._turns += 1
        self._report(
            TurnWritten(
                at_seconds=self._elapsed(),
                role=turn.role,
                iteration=self._turns - 1,
                text=text,
                sub_questions=sub_questions,
                seconds=seconds,
                generated_tokens=len(completion.token_ids),
            )
        )

    def searched(
        self, query: str, entity: Entity | None, materials: Sequence[Material], seconds: float
    ) -> None:
        """Report a search. `seconds` is how long it took."""
        label = _label(entity)
        search = (query, label)
        if search in self._unsearched:
            number = self._unsearched.index(search)
            self._unsearched[number] = None
        else:
            # The agent is not mujica, so that the search was not read from a turn.
            number = len(self._unsearched)
            self._unsearched.append(None)
        self._report(
            SearchFinished(
                at_seconds=self._elapsed(),
                iteration=max(self._turns - 1, 0),
                number=number,
                query=query,
                entity=label,
                materials=tuple(protocol.one_line(material.text) for material in materials),
                seconds=seconds,
            )
        )

    def _worker_wrote(
        self,
        mujica: Mujica,
        turn: "_WatchedTurn",
        completion: Completion,
        state: WorkerState,
        seconds: float,
    ) -> None:
        """Report the turn of a worker."""
        text = self._text(completion, protocol.OBSERVATION)
        read_text = "" if completion.finish_reason == "length" else text
        reply = mujica.contract.parse_worker(read_text, materials=len(state.materials))
        assert turn.number is not None, "a worker's turn has the number of its sub-question"
        selected = [protocol.one_line(state.materials[index].text) for index in reply.selected]
        self._report(
            SubQuestionAnswered(
                at_seconds=self._elapsed(),
                iteration=turn.iteration,
                number=turn.number,
                query=state.query,
                selected=tuple(selected),
                sentence=reply.sentence,
                text=text,
                seconds=seconds,
                generated_tokens=len(completion.token_ids),
            )
        )

    def _text(self, completion: Completion, cut_at: str | None) -> str:
        """Return the text of a turn as the agent reads it."""
        return Dialogue(self._tokenizer, WORKER, system="").add_model(completion, cut_at=cut_at)

    def _elapsed(self) -> float:
        return time.monotonic() - self._start_time


def _label(entity: Entity | None) -> str:
    """Return the label of a searched entity. It is empty over passages."""
    return "" if entity is None else entity.label


def _sub_questions(
    mujica: Mujica, text: str, state: PlannerState, kind: EnvironmentKind
) -> tuple[SubQuestion, ...]:
    """Return the sub-questions that a planner's turn asks, as the agent parses them."""
    action = mujica.contract.parse_planner(
        text,
        kind,
        candidates=len(state.candidates),
        max_searches=mujica.config.max_searches_per_turn,
    )
    calls = action.searches if state.parallel else action.searches[:1]
    sub_questions = []
    for call in calls:
        entity = ""
        if call.candidate is not None and not call.refusal:
            entity = state.candidates[call.candidate].label
        sub_questions.append(SubQuestion(query=call.query, entity=entity, refusal=call.refusal))
    return tuple(sub_questions)


class _WatchedTurn:
    """A turn that the model writes, and its place in the episode."""

    def __init__(
        self, watch: EpisodeWatch, state: object, *, role: str, iteration: int, number: int | None
    ) -> None:
        self._watch = watch
        self.state = state
        self.role = role
        self.iteration = iteration
        # Position of a worker's sub-question. None for the turns of other roles.
        self.number = number
        # A character may be split over several tokens.
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def on_tokens(self, token_ids: TokenIds) -> None:
        """Report tokens of the turn."""
        self._watch.wrote_part(self, token_ids)


class _WatchedPolicy:
    """A policy that reports each turn to a watch."""

    def __init__(self, watch: EpisodeWatch, policy: Policy) -> None:
        self._watch = watch
        self._policy = policy

    @property
    def version(self) -> int:
        """Return the version of the policy."""
        return self._policy.version

    async def generate(
        self, prompt: TokenIds, params: SamplingParams, *, state: object, continues: bool
    ) -> Completion:
        """Let the policy write the turn, and report it."""
        start_time = time.monotonic()
        turn = self._watch.begin_turn(state)
        policy = self._policy
        if isinstance(policy, StreamingPolicy):
            policy = policy.streaming(turn.on_tokens)
        completion = await policy.generate(prompt, params, state=state, continues=continues)
        self._watch.wrote(turn, completion, time.monotonic() - start_time)
        return completion


class _WatchedEnvironment:
    """An environment that reports each search to a watch."""

    def __init__(self, watch: EpisodeWatch, environment: Environment) -> None:
        self._watch = watch
        self._environment = environment
        self.kind: EnvironmentKind = environment.kind

    @property
    def statistics(self) -> RetrievalStatistics:
        """Statistics of all searches so far."""
        return self._environment.statistics

    async def search(self, query: str, entity: Entity | None) -> tuple[Material, ...]:
        """Search the environment, and report the results. Raises RetrievalError."""
        start_time = time.monotonic()
        materials = await self._environment.search(query, entity)
        self._watch.searched(query, entity, materials, time.monotonic() - start_time)
        return materials
