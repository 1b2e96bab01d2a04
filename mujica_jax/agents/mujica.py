"""One Mujica episode: a planner splits the question, workers answer its searches at the same time,
the planner goes on or answers.

Section 2.2 of the Mujica-MyGO paper. Planner and worker are one policy under two prompts; each
search of a turn is an independent worker conversation. Malformed output ends an episode with a
counted `StopReason` and never with an exception; failed episodes are records too.

Tags and prompts are a `Contract` that `agent.protocol` chooses, so that other papers' planners and
workers play the same episodes.

The state that a policy is asked with (`agent.py`) is `PlannerState` or `WorkerState`: the same
facts as the tokens, as plain values.
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
from mujica_jax.config.schema import MujicaConfig
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.records import Conversation, Entity, Question, Search, StopReason, Trajectory
from mujica_jax.retrieval.errors import RetrievalError
from mujica_jax.tasks.task import Environment, EnvironmentKind, Material

PLANNER, WORKER = "planner", "worker"  # roles of conversations
MUJICA_CONTRACT = Contract()
_CONTRACTS: dict[str, Contract] = {
    "mujica": MUJICA_CONTRACT,
    "evipath": EviPathContract(),
}  # by agent.protocol


def contract_of(agent: object) -> Contract:
    """Return the contract that an agent's configuration names. Agents without workers have
    Mujica's."""
    return _CONTRACTS[agent.protocol] if isinstance(agent, MujicaConfig) else MUJICA_CONTRACT


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannerState:
    """What the planner knows when it writes."""

    role: ClassVar = PLANNER
    question: Question
    candidates: tuple[Entity, ...]
    searches: tuple[Search, ...]
    parallel: bool = True  # False: one search of a turn is answered
    split: bool = True  # False: no worker reads, the planner is shown what was found
    observation: str = ""  # the message that answered its last searches


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerState:
    """What a worker knows when it writes."""

    role: ClassVar = WORKER
    query: str
    entity: Entity | None
    materials: tuple[Material, ...]


class Mujica:
    """Implements `Agent`: tokenizer, prompts and limits of planner and worker."""

    def __init__(self, tokenizer: Tokenizer, config: MujicaConfig) -> None:
        self._tokenizer, self._config = tokenizer, config
        self.contract = contract_of(config)

    async def run(self, attempt: Attempt, environment: Environment, policy: Policy) -> Trajectory:
        return await _Episode(self, attempt, environment, policy).play()

    def opening(self, role: str, kind: EnvironmentKind) -> Opening:
        name = "planner" if role == PLANNER else "worker"
        config = self._config
        return self.contract.opening(
            name, kind, config.prompt, parallel=config.parallel, split=config.split
        )

    def begin(self, role: str, kind: EnvironmentKind) -> Dialogue:
        """Return a new conversation of this role."""
        opening = self.opening(role, kind)
        return Dialogue(self._tokenizer, role, opening.system, opening.examples)


class _Episode(Episode):
    """With the planner's dialogue and the candidates numbered so far."""

    def __init__(
        self, agent: Mujica, attempt: Attempt, environment: Environment, policy: Policy
    ) -> None:
        super().__init__(agent._tokenizer, agent._config, attempt, environment, policy)
        self._agent, self._config = agent, agent._config
        self._contract = agent.contract
        self._planner = agent.begin(PLANNER, environment.kind)
        self._candidates = list(attempt.question.candidates) if environment.kind == "graph" else []
        self._observation = ""
        self._workers: list[Conversation] = []
        self._malformed_workers = 0
        self._malformed_searches = 0  # could not be read, or named an unknown candidate

    async def play(self) -> Trajectory:
        question = self.attempt.question
        self._planner.add_user(self._contract.planner_opening(question.text, self._candidates))
        answer, reason = "", StopReason.ITERATION_LIMIT
        for iteration in range(self._config.max_iterations):
            action = await self._plan(iteration)
            if action.answer is not None:
                answer, reason = action.answer, StopReason.ANSWERED
                break
            if action.refused is not None:
                reason = action.refused
                break
            try:
                self._malformed_searches += action.malformed
                asked = action.searches if self._config.parallel else action.searches[:1]
                await self._search_all(asked, iteration, unreadable=action.unreadable)
            except RetrievalError:
                reason = StopReason.RETRIEVER_FAILED
                break
        counts = {
            "malformed_workers": float(self._malformed_workers),
            "malformed_searches": float(self._malformed_searches),
        }
        return self.trajectory((self._planner.record(), *self._workers), answer, reason, counts)

    async def _plan(self, iteration: int) -> protocol.PlannerAction:
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
        limit = self._config.max_searches_per_turn
        return self._contract.parse_planner(
            written.text, kind, candidates=len(self._candidates), max_searches=limit
        )

    async def _search_all(
        self, calls: Sequence[protocol.SearchCall], iteration: int, *, unreadable: int
    ) -> None:
        """Make all searches of a turn at once, and tell the planner their answers in one message,
        in their order.

        A refused search is answered by the reason."""
        tasks = {
            number: asyncio.ensure_future(self._search(call, iteration, number))
            for number, call in enumerate(calls)
            if not call.refusal
        }
        try:
            await asyncio.gather(*tasks.values())
        finally:
            for (
                task
            ) in tasks.values():  # if one fails the episode is over, and the others are not needed
                task.cancel()
        first_new = len(self._candidates)
        known = {entity.id for entity in self._candidates}
        sentences: list[str] = []
        named: list[list[Entity]] = []  # the new candidates of each sentence
        for number, call in enumerate(calls):
            named.append([])
            if call.refusal:
                sentences.append(call.refusal)
                continue
            search, conversation, entities = tasks[number].result()
            sentences.append(search.sentence)
            self.searches.append(search)
            if conversation is not None:
                self._workers.append(conversation)
            for entity in entities:
                if entity.id not in known:
                    known.add(entity.id)
                    named[-1].append(entity)
            self._candidates += named[-1]
        if unreadable:
            sentences.append(protocol.UNREADABLE)
            named.append([])
        self._observation = self._contract.planner_observation(
            sentences, named, first_new, self.environment.kind
        )
        self._planner.add_user(self._observation)

    async def _search(
        self, call: protocol.SearchCall, iteration: int, number: int
    ) -> tuple[Search, Conversation | None, list[Entity]]:
        """One sub-question: retrieve, let the worker read, and name the entities its selection
        makes searchable."""
        entity = None if call.candidate is None else self._candidates[call.candidate]
        materials = self.fit(await self.environment.search(call.query, entity))
        shown = [material.parts for material in materials]
        label = "" if entity is None else entity.label
        texts = tuple(protocol.one_line(material.text) for material in materials)
        search = Search(iteration=iteration, query=call.query, entity=label, materials=texts)
        if not self._config.split:  # the planner reads itself
            line = protocol.found_line(shown, self._config.prompt)
            return (
                dataclasses.replace(search, sentence=line, found=bool(shown)),
                None,
                _entities(materials),
            )
        worker = self._agent.begin(WORKER, self.environment.kind)
        worker.add_user(
            self._contract.worker_opening(
                call.query, shown, self.environment.kind, self._config.prompt
            )
        )
        state = WorkerState(query=call.query, entity=entity, materials=materials)
        written = await self.write(
            worker,
            f"{iteration}.{number}",
            state=state,
            stop_strings=self._contract.stop_strings(WORKER, self.environment.kind),
            cut_at=protocol.OBSERVATION,
        )
        reply = self._contract.parse_worker(
            written.text if written.cut is None else "", materials=len(materials)
        )
        self._malformed_workers += not reply.well_formed
        # Over texts a worker that selects nothing may answer from its own knowledge.
        knows_answer = self.environment.kind == "text" and reply.sentence != protocol.NOTHING_FOUND
        search = dataclasses.replace(
            search,
            selected=reply.selected,
            sentence=reply.sentence,
            found=reply.found or knows_answer,
        )
        entities = _entities([materials[index] for index in reply.selected])
        conversation = worker.record()
        return search, conversation if conversation.turns[-1].role == "model" else None, entities


def _entities(materials: Sequence[Material]) -> list[Entity]:
    return [entity for material in materials for entity in material.entities]
