"""One Mujica episode: a planner splits the question, workers answer its searches at the same time, the planner goes on
or answers.

Section 2.2 of the Mujica-MyGO paper. Planner and worker are one policy under two prompts; each search of a turn is an
independent worker conversation. Malformed output ends an episode with a counted `StopReason` and never with an
exception; failed episodes are records too.

Tags and prompts are a `Contract` that `agent.protocol` chooses, so that other papers' planners and workers play the
same episodes.

The state that a policy is asked with (`agent.py`) is `PlannerState` or `WorkerState`: the same facts as the tokens, as
plain values.
"""

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from mujica_jax.agents import protocol
from mujica_jax.agents.agent import Attempt, Policy
from mujica_jax.agents.contract import Contract
from mujica_jax.agents.dialogue import Dialogue
from mujica_jax.agents.episode import Episode
from mujica_jax.agents.evipath_contract import EviPathContract
from mujica_jax.config.schema import MujicaConfig
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.records import Conversation, Entity, Question, Search, StopReason, Trajectory
from mujica_jax.retrieval.errors import RetrievalError
from mujica_jax.tasks.task import Environment, EnvironmentKind, Material

PLANNER, WORKER = "planner", "worker"  # roles of conversations
MUJICA_CONTRACT = Contract()
_CONTRACTS: dict[str, Contract] = {"mujica": MUJICA_CONTRACT, "evipath": EviPathContract()}  # by agent.protocol


def contract_of(agent: object) -> Contract:
    """Return the contract that an agent's configuration names. Agents without planner and workers have none to name."""
    return _CONTRACTS[agent.protocol] if isinstance(agent, MujicaConfig) else MUJICA_CONTRACT


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannerState:
    """What the planner knows when it writes."""

    role: ClassVar = PLANNER
    question: Question
    candidates: tuple[Entity, ...]
    searches: tuple[Search, ...]
    parallel: bool = True  # False: one search of a turn is answered
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

    def system_prompt(self, role: str, kind: EnvironmentKind) -> str:
        name = "planner" if role == PLANNER else "worker"
        return self.contract.system_prompt(name, kind, self._config.prompt, parallel=self._config.parallel)


class _Episode(Episode):
    """With the planner's dialogue and the candidates numbered so far."""

    def __init__(self, agent: Mujica, attempt: Attempt, environment: Environment, policy: Policy) -> None:
        super().__init__(agent._tokenizer, agent._config, attempt, environment, policy)
        self._agent, self._config, self._contract = agent, agent._config, agent.contract
        self._planner = Dialogue(self.tokenizer, PLANNER, agent.system_prompt(PLANNER, environment.kind))
        self._candidates = list(attempt.question.candidates) if environment.kind == "graph" else []
        self._observation = ""
        self._workers: list[Conversation] = []
        self._malformed_workers = 0

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
                asked = action.searches if self._config.parallel else action.searches[:1]
                await self._search_all(asked, iteration)
            except RetrievalError:
                reason = StopReason.RETRIEVER_FAILED
                break
        counts = {"malformed_workers": float(self._malformed_workers)}
        return self.trajectory((self._planner.record(), *self._workers), answer, reason, counts)

    async def _plan(self, iteration: int) -> protocol.PlannerAction:
        state = PlannerState(
            question=self.attempt.question,
            candidates=tuple(self._candidates),
            searches=tuple(self.searches),
            parallel=self._config.parallel,
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
        return self._contract.parse_planner(written.text, kind, candidates=len(self._candidates), max_searches=limit)

    async def _search_all(self, calls: Sequence[protocol.SearchCall], iteration: int) -> None:
        """All searches of a turn at once; their answers reach the planner as one message."""
        tasks = [asyncio.ensure_future(self._search(call, iteration, n)) for n, call in enumerate(calls)]
        try:
            found = await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # if one fails the episode is over, and the others are not needed
                task.cancel()
        first_new = len(self._candidates)
        known = {entity.id for entity in self._candidates}
        named: list[list[Entity]] = []  # the new candidates of each search
        for search, conversation, entities in found:
            self.searches.append(search)
            if conversation is not None:
                self._workers.append(conversation)
            named.append([])
            for entity in entities:
                if entity.id not in known:
                    known.add(entity.id)
                    named[-1].append(entity)
            self._candidates += named[-1]
        sentences = [search.sentence for search, _, _ in found]
        self._observation = self._contract.planner_observation(sentences, named, first_new, self.environment.kind)
        self._planner.add_user(self._observation)

    async def _search(
        self, call: protocol.SearchCall, iteration: int, number: int
    ) -> tuple[Search, Conversation | None, list[Entity]]:
        """One sub-question: retrieve, let the worker read, and name the entities its selection makes searchable."""
        entity = None if call.candidate is None else self._candidates[call.candidate]
        materials = self.fit(await self.environment.search(call.query, entity))
        shown = [material.parts for material in materials]
        label = "" if entity is None else entity.label
        texts = tuple(protocol.one_line(material.text) for material in materials)
        search = Search(iteration=iteration, query=call.query, entity=label, materials=texts)
        if not self._config.split:  # the planner reads itself
            lines = protocol.numbered(shown, self._config.prompt)
            read = dataclasses.replace(search, sentence=" ".join(lines) or protocol.NOTHING_FOUND, found=bool(lines))
            return read, None, _entities(materials)
        worker = Dialogue(self.tokenizer, WORKER, self._agent.system_prompt(WORKER, self.environment.kind))
        worker.add_user(self._contract.worker_opening(call.query, shown, self.environment.kind, self._config.prompt))
        state = WorkerState(query=call.query, entity=entity, materials=materials)
        written = await self.write(
            worker,
            f"{iteration}.{number}",
            state=state,
            stop_strings=self._contract.stop_strings(WORKER, self.environment.kind),
            cut_at=protocol.OBSERVATION,
        )
        reply = self._contract.parse_worker(written.text if written.cut is None else "", materials=len(materials))
        self._malformed_workers += not reply.well_formed
        search = dataclasses.replace(search, selected=reply.selected, sentence=reply.sentence, found=reply.found)
        entities = _entities([materials[index] for index in reply.selected])
        conversation = worker.record()
        return search, conversation if conversation.turns[-1].role == "model" else None, entities


def _entities(materials: Sequence[Material]) -> list[Entity]:
    return [entity for material in materials for entity in material.entities]
