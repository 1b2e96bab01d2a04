"""The agent Mujica (section 2.2 of the Mujica-MyGO paper).

A planner splits the question into searches, workers answer them at the same time, and the planner
searches again or answers. Planner and worker are one policy with two prompts. Each search of a turn
is a separate conversation with a worker. Malformed output ends an episode with a `StopReason`,
never with an exception. Failed episodes are recorded too.

A `Contract`, which the setting `agent.protocol` chooses, holds the tags and prompts. The planners
and workers of other papers play the same episodes with another contract.

In addition to the tokens, a policy gets a `PlannerState` or a `WorkerState` (see `agent.py`). It
holds the same facts as plain values.
"""

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from mujica_jax.agents import protocol
from mujica_jax.agents.agent import Attempt, Policy
from mujica_jax.agents.contract import Contract
from mujica_jax.agents.dialogue import Dialogue, Opening
from mujica_jax.agents.episode import Episode
from mujica_jax.agents.evipath_contract import EviPathContract
from mujica_jax.agents.protocol import PLANNER, WORKER
from mujica_jax.config.schema import MujicaConfig
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.records import Conversation, Entity, Question, Search, StopReason, Trajectory
from mujica_jax.retrieval.errors import RetrievalError
from mujica_jax.tasks.task import Environment, EnvironmentKind, Material

MUJICA_CONTRACT = Contract()
# The contract for each value of `agent.protocol`.
_CONTRACTS: dict[str, Contract] = {
    "mujica": MUJICA_CONTRACT,
    "evipath": EviPathContract(),
}


def contract_of(agent: object) -> Contract:
    """Return the contract that an agent's configuration names.

    `agent` is a configuration. Agents without workers use Mujica's contract.
    """
    return _CONTRACTS[agent.protocol] if isinstance(agent, MujicaConfig) else MUJICA_CONTRACT


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannerState:
    """The facts that the planner knows when it writes."""

    role: ClassVar = PLANNER
    question: Question
    candidates: tuple[Entity, ...]
    searches: tuple[Search, ...]
    # True if all searches of a turn are answered, False if only the first one is.
    parallel: bool = True
    # True if workers read the materials, False if the planner reads them itself.
    split: bool = True
    # The last message to the planner, with the answers to its searches.
    observation: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerState:
    """The facts that a worker knows when it writes."""

    role: ClassVar = WORKER
    query: str
    entity: Entity | None
    materials: tuple[Material, ...]


class Mujica:
    """The agent Mujica: its tokenizer, prompts and limits. It implements `Agent`."""

    def __init__(self, tokenizer: Tokenizer, config: MujicaConfig) -> None:
        self.tokenizer = tokenizer
        self.config = config
        self.contract = contract_of(config)

    async def run(self, attempt: Attempt, environment: Environment, policy: Policy) -> Trajectory:
        """Play one episode and return its record, without a reward."""
        return await _Episode(self, attempt, environment, policy).play()

    def opening(self, role: str, kind: EnvironmentKind) -> Opening:
        """Return the system prompt and the worked examples of this role."""
        contract_role = PLANNER if role == PLANNER else WORKER
        config = self.config
        return self.contract.opening(
            contract_role,
            kind,
            mode=config.prompt,
            parallel=config.parallel,
            split=config.split,
        )

    def begin(self, role: str, kind: EnvironmentKind) -> Dialogue:
        """Return a new conversation of this role."""
        opening = self.opening(role, kind)
        return Dialogue(self.tokenizer, role, system=opening.system, examples=opening.examples)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _SearchResult:
    """The record of one search, the worker's conversation, and the entities that were found."""

    search: Search
    # None if there was no worker, or the worker wrote nothing.
    conversation: Conversation | None
    entities: list[Entity]


class _Episode(Episode):
    """The state of one episode: the planner's dialogue, and the numbered candidates so far."""

    def __init__(
        self, agent: Mujica, attempt: Attempt, environment: Environment, policy: Policy
    ) -> None:
        super().__init__(agent.tokenizer, agent.config, attempt, environment, policy)
        self._agent = agent
        self._config = agent.config
        self._contract = agent.contract
        self._planner = agent.begin(PLANNER, environment.kind)
        self._candidates = list(attempt.question.candidates) if environment.kind == "graph" else []
        self._observation = ""
        self._workers: list[Conversation] = []
        self._malformed_workers = 0
        # Counts the searches that could not be parsed or that named an unknown candidate.
        self._malformed_searches = 0

    async def play(self) -> Trajectory:
        """Play the episode to its end and return its record."""
        question = self.attempt.question
        self._planner.add_user(self._contract.planner_opening(question.text, self._candidates))

        # Let the planner search until it answers, fails or runs out of turns.
        answer = ""
        reason = StopReason.ITERATION_LIMIT
        for iteration in range(self._config.max_iterations):
            action = await self._plan(iteration)
            if action.answer is not None:
                answer = action.answer
                reason = StopReason.ANSWERED
                break
            if action.refused is not None:
                reason = action.refused
                break
            self._malformed_searches += action.malformed
            calls = action.searches if self._config.parallel else action.searches[:1]
            try:
                await self._search_all(calls, iteration, unreadable=action.unreadable)
            except RetrievalError:
                reason = StopReason.RETRIEVER_FAILED
                break

        counts = {
            "malformed_workers": float(self._malformed_workers),
            "malformed_searches": float(self._malformed_searches),
        }
        conversations = (self._planner.record(), *self._workers)
        return self.trajectory(conversations, answer=answer, reason=reason, counts=counts)

    async def _plan(self, iteration: int) -> protocol.PlannerAction:
        """Let the planner write one turn, and parse it."""
        state = PlannerState(
            question=self.attempt.question,
            candidates=tuple(self._candidates),
            searches=tuple(self.searches),
            parallel=self._config.parallel,
            split=self._config.split,
            observation=self._observation,
        )
        kind = self.environment.kind
        written = await self.write(
            self._planner,
            f"{iteration}",
            state=state,
            continues=True,
            stop_strings=self._contract.stop_strings(PLANNER, kind),
            cut_at=self._contract.observation(kind),
        )
        if written.cut is not None:
            return protocol.PlannerAction(refused=written.cut)
        return self._contract.parse_planner(
            written.text,
            kind,
            candidates=len(self._candidates),
            max_searches=self._config.max_searches_per_turn,
        )

    async def _search_all(
        self, calls: Sequence[protocol.SearchCall], iteration: int, *, unreadable: int
    ) -> None:
        """Answer all searches of a turn at the same time, and append one message to the planner.

        The message lists the answers in the order of the searches. For a refused search it gives
        the reason. `unreadable` is the number of searches that could not be parsed; if there are
        any, the message says so.

        Raises RetrievalError.
        """
        tasks = {
            number: asyncio.ensure_future(self._search(call, iteration, number))
            for number, call in enumerate(calls)
            if not call.refusal
        }
        try:
            await asyncio.gather(*tasks.values())
        finally:
            # A failed search ends the episode, and then the other searches are not needed.
            for task in tasks.values():
                task.cancel()

        # Record the searches in their order. `new_candidates` gets one list for each sentence.
        first_new = len(self._candidates)
        known_ids = {entity.id for entity in self._candidates}
        sentences: list[str] = []
        new_candidates: list[list[Entity]] = []
        for number, call in enumerate(calls):
            new_candidates.append([])
            if call.refusal:
                sentences.append(call.refusal)
                continue
            result = tasks[number].result()
            sentences.append(result.search.sentence)
            self.searches.append(result.search)
            if result.conversation is not None:
                self._workers.append(result.conversation)
            for entity in result.entities:
                if entity.id not in known_ids:
                    known_ids.add(entity.id)
                    new_candidates[-1].append(entity)
            self._candidates += new_candidates[-1]
        if unreadable:
            sentences.append(protocol.UNREADABLE)
            new_candidates.append([])

        self._observation = self._contract.planner_observation(
            sentences, new_candidates, first=first_new, kind=self.environment.kind
        )
        self._planner.add_user(self._observation)

    async def _search(
        self, call: protocol.SearchCall, iteration: int, number: int
    ) -> _SearchResult:
        """Answer one sub-question: retrieve materials, and let a worker read them.

        `number` is the position of the search in its turn. The entities of the result become
        candidates for later searches. They come from the materials that the worker selects, or from
        all materials if there is no worker. Raises RetrievalError.
        """
        entity = None if call.candidate is None else self._candidates[call.candidate]
        materials = self.fit(await self.environment.search(call.query, entity))
        search = Search(
            iteration=iteration,
            query=call.query,
            entity="" if entity is None else entity.label,
            materials=tuple(protocol.one_line(material.text) for material in materials),
        )

        # Without workers the planner reads the materials itself.
        if not self._config.split:
            parts = [material.parts for material in materials]
            line = protocol.found_line(parts, self._config.prompt)
            search = dataclasses.replace(search, sentence=line, found=bool(materials))
            return _SearchResult(search=search, conversation=None, entities=_entities(materials))

        state = WorkerState(query=call.query, entity=entity, materials=materials)
        reply, conversation = await self._read(state, place=f"{iteration}.{number}")

        # In a text environment, a worker that selects nothing may answer from its own knowledge.
        knows_answer = self.environment.kind == "text" and reply.sentence != protocol.NOTHING_FOUND
        search = dataclasses.replace(
            search,
            selected=reply.selected,
            sentence=reply.sentence,
            found=reply.has_selection or knows_answer,
        )
        entities = _entities([materials[index] for index in reply.selected])
        return _SearchResult(search=search, conversation=conversation, entities=entities)

    async def _read(
        self, state: WorkerState, place: str
    ) -> tuple[protocol.WorkerReply, Conversation | None]:
        """Let a new worker read the materials of one search.

        Returns the parsed reply and the conversation, which is None if the worker wrote nothing.
        """
        kind = self.environment.kind
        worker = self._agent.begin(WORKER, kind)
        parts = [material.parts for material in state.materials]
        worker.add_user(
            self._contract.worker_opening(state.query, parts, kind=kind, mode=self._config.prompt)
        )
        written = await self.write(
            worker,
            place,
            state=state,
            stop_strings=self._contract.stop_strings(WORKER, kind),
            cut_at=protocol.OBSERVATION,
        )

        text = written.text if written.cut is None else ""
        reply = self._contract.parse_worker(text, materials=len(state.materials))
        if not reply.well_formed:
            self._malformed_workers += 1

        conversation = worker.record()
        has_written = conversation.turns[-1].role == "model"
        return reply, conversation if has_written else None


def _entities(materials: Sequence[Material]) -> list[Entity]:
    """Return the entities that the materials name, in order."""
    return [entity for material in materials for entity in material.entities]
