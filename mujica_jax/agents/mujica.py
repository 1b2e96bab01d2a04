"""One Mujica episode: a planner splits the question, workers answer its searches at the same time, the planner goes on or answers.

Section 2.2 of the Mujica-MyGO paper. Planner and worker are one policy under two prompts; each search of a turn is an independent worker
conversation. Malformed output ends an episode with a counted `StopReason` and never with an exception; failed episodes are records too.

Who writes the turns is a `Policy`: the engine's model, or a script that knows the gold chain. A policy sees the token ids and, beside
them, the same facts as plain values.
"""

import asyncio
import dataclasses
import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from mujica_jax.agents import protocol
from mujica_jax.agents.dialogue import Dialogue
from mujica_jax.config.schema import AgentConfig
from mujica_jax.inference.requests import Completion, Generator, SamplingParams
from mujica_jax.models.tokenizer import Tokenizer, neutralise
from mujica_jax.records import Conversation, Entity, Question, Search, StopReason, Trajectory
from mujica_jax.retrieval.errors import RetrievalError
from mujica_jax.tasks.task import Environment, Material

POLL_SECONDS = 0.1  # a call of the engine takes as long; asking costs microseconds
HALF_CHARACTER = "\ufffd"  # what a tokenizer decodes where a cut left some bytes of a character


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannerView:
    """What the planner knows when it writes."""

    question: Question
    candidates: tuple[Entity, ...]
    searches: tuple[Search, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerView:
    """What a worker knows when it writes."""

    query: str
    entity: Entity | None
    materials: tuple[Material, ...]


class Policy(Protocol):
    async def write(
        self, prompt: Sequence[int], params: SamplingParams, view: PlannerView | WorkerView, *, continues: bool
    ) -> Completion: ...


class EnginePolicy:
    """The model behind a `Generator`."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    @property
    def version(self) -> int:
        return getattr(self._generator, "policy_version", 0)

    async def write(
        self, prompt: Sequence[int], params: SamplingParams, view: PlannerView | WorkerView, *, continues: bool
    ) -> Completion:
        del view  # the model reads tokens
        return await self._generator.generate(prompt, params, continues=continues)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attempt:
    """One try at one question."""

    question: Question
    number: int
    seed: int
    temperature: float


class Mujica:
    """The agent: tokenizer, prompts and limits. `run` plays one episode; any number may run at once."""

    def __init__(self, tokenizer: Tokenizer, config: AgentConfig, reward: Callable[[str, Question], float]) -> None:
        self._tokenizer, self._config, self.reward = tokenizer, config, reward

    async def run(self, attempt: Attempt, environment: Environment, policy: Policy, policy_version: int) -> Trajectory:
        return await _Episode(self._tokenizer, self._config, attempt, environment, policy).play(
            policy_version, self.reward
        )


class _Episode:
    """State of one episode: the planner's dialogue, the candidates numbered so far, the searches answered so far."""

    def __init__(
        self, tokenizer: Tokenizer, config: AgentConfig, attempt: Attempt, environment: Environment, policy: Policy
    ) -> None:
        self._tokenizer, self._config, self._attempt = tokenizer, config, attempt
        self._environment, self._policy = environment, policy
        self._planner = Dialogue(tokenizer, "planner", self._system("planner"))
        self._candidates = list(attempt.question.candidates) if environment.kind == "graph" else []
        self._searches: list[Search] = []
        self._workers: list[Conversation] = []
        self._malformed_workers = 0

    async def play(self, policy_version: int, reward: Callable[[str, Question], float]) -> Trajectory:
        began = time.monotonic()
        question = self._attempt.question
        self._planner.hear(protocol.planner_opening(question.text, self._candidates))
        answer, reason = "", StopReason.ITERATION_LIMIT
        for iteration in range(self._config.max_iterations):
            move = await self._plan(iteration)
            if move.answer is not None:
                answer, reason = move.answer, StopReason.ANSWERED
                break
            if move.refused is not None:
                reason = move.refused
                break
            try:
                await self._search_all(move.searches, iteration)
            except RetrievalError:
                reason = StopReason.RETRIEVER_FAILED
                break
        score = reward(answer, question) if reason is StopReason.ANSWERED else 0.0
        return Trajectory(
            question_id=question.id,
            attempt=self._attempt.number,
            policy_version=policy_version,
            seed=self._attempt.seed,
            planner=self._planner.record(),
            workers=tuple(self._workers),
            answer=answer,
            reward=score,
            rewards_by_part={"f1": score, "malformed_workers": float(self._malformed_workers)},
            stop_reason=reason,
            searches=tuple(self._searches),
            seconds=time.monotonic() - began,
        )

    async def _plan(self, iteration: int) -> protocol.PlannerMove:
        view = PlannerView(
            question=self._attempt.question, candidates=tuple(self._candidates), searches=tuple(self._searches)
        )
        text, cut = await self._write(self._planner, view, f"{iteration}", continues=True)
        if cut is not None:
            return protocol.PlannerMove(refused=cut)
        return protocol.parse_planner(
            text,
            self._environment.kind,
            candidates=len(self._candidates),
            max_searches=self._config.max_searches_per_turn,
        )

    async def _search_all(self, calls: Sequence[protocol.SearchCall], iteration: int) -> None:
        """All searches of a turn at once; their answers reach the planner as one message."""
        tasks = [asyncio.ensure_future(self._search(call, iteration, n)) for n, call in enumerate(calls)]
        try:
            found = await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # where one failed the episode is over: nobody reads what the others find
                task.cancel()
        first_new = len(self._candidates)
        known = {entity.id for entity in self._candidates}
        for search, conversation, entities in found:
            self._searches.append(search)
            if conversation is not None:
                self._workers.append(conversation)
            for entity in entities:
                if entity.id not in known:
                    known.add(entity.id)
                    self._candidates.append(entity)
        sentences = [search.sentence for search, _, _ in found]
        self._planner.hear(protocol.planner_observation(sentences, self._candidates[first_new:], first_new))

    async def _search(
        self, call: protocol.SearchCall, iteration: int, number: int
    ) -> tuple[Search, Conversation | None, list[Entity]]:
        """One sub-question: retrieve, let the worker read, and name the entities its selection makes searchable."""
        entity = None if call.candidate is None else self._candidates[call.candidate]
        materials = self._fit(await self._environment.search(call.query, entity))
        worker = Dialogue(self._tokenizer, "worker", self._system("worker"))
        shown = [material.text for material in materials]
        worker.hear(protocol.worker_opening(call.query, shown, self._environment.kind, self._config.prompt))
        view = WorkerView(query=call.query, entity=entity, materials=materials)
        text, cut = await self._write(worker, view, f"{iteration}.{number}", continues=False)
        reply = protocol.parse_worker(text if cut is None else "", materials=len(materials))
        self._malformed_workers += not reply.well_formed
        search = Search(
            iteration=iteration,
            query=call.query,
            entity="" if entity is None else entity.label,
            materials=tuple(protocol.one_line(text) for text in shown),
            selected=reply.selected,
            sentence=reply.sentence,
            found=reply.found,
        )
        entities = [entity for index in reply.selected for entity in materials[index].entities]
        conversation = worker.record()
        return search, conversation if conversation.turns[-1].role == "model" else None, entities

    async def _write(
        self, dialogue: Dialogue, view: PlannerView | WorkerView, place: str, *, continues: bool
    ) -> tuple[str, StopReason | None]:
        """Let the policy write one turn. Returns its text and, where a limit cut it, which."""
        room = self._config.max_trajectory_tokens - len(dialogue.token_ids)
        if room < 1:
            return "", StopReason.TRAJECTORY_LENGTH
        attempt = self._attempt
        params = SamplingParams(
            max_new_tokens=min(room, self._config.max_turn_tokens),
            temperature=attempt.temperature,
            seed=_seed_of(attempt.seed, attempt.question.id, attempt.number, place),
        )
        completion = await self._policy.write(dialogue.token_ids, params, view, continues=continues)
        text = dialogue.say(completion)
        if completion.finish_reason == "stop":
            return text, None
        limited_by_room = room < self._config.max_turn_tokens
        return text, StopReason.TRAJECTORY_LENGTH if limited_by_room else StopReason.TURN_LENGTH

    def _fit(self, materials: Sequence[Material]) -> tuple[Material, ...]:
        """The first materials that fit max_observation_tokens; the first one is cut to fit rather than left out."""
        limit = self._config.max_observation_tokens
        sizes_bytes = [len(neutralise(material.text).encode()) for material in materials]
        kept: list[Material] = []
        used = 0
        for place, material in enumerate(materials):
            # A byte-level token covers at least one byte, so what is short needs no tokenising to be known to fit.
            if used + sum(sizes_bytes[place:]) <= limit:
                return (*kept, *materials[place:])
            ids = self._tokenizer.encode_plain(material.text)
            used += len(ids)
            if used > limit:
                if not kept:
                    cut = self._tokenizer.decode(ids[:limit]).rstrip(HALF_CHARACTER)
                    kept.append(dataclasses.replace(material, text=cut))
                break
            kept.append(material)
        return tuple(kept)

    def _system(self, role: Literal["planner", "worker"]) -> str:
        return protocol.system_prompt(role, self._environment.kind, self._config.prompt)


def _seed_of(*parts: object) -> int:
    """A seed for one turn: a function of run seed, question, attempt and place in the episode alone."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")


async def run_episodes(
    agent: Mujica,
    attempts: Sequence[Attempt],
    environment: Environment,
    policy: Policy,
    *,
    policy_version: int,
    concurrency: int,
    on_episode: Callable[[Trajectory], None] = lambda trajectory: None,
    poll: Callable[[], None] = lambda: None,
) -> list[Trajectory]:
    """Play all attempts, at most `concurrency` at a time, and return their trajectories in the order of `attempts`.

    `poll` is called every POLL_SECONDS, between two calls of the engine; what it raises ends all episodes.
    """
    gate = asyncio.Semaphore(concurrency)

    async def one(attempt: Attempt) -> Trajectory:
        async with gate:
            trajectory = await agent.run(attempt, environment, policy, policy_version)
        on_episode(trajectory)
        return trajectory

    playing = asyncio.gather(*(one(attempt) for attempt in attempts))
    try:
        while not (await asyncio.wait([playing], timeout=POLL_SECONDS))[0]:
            poll()
        return list(playing.result())
    finally:
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)  # whoever was cancelled has ended, and is heard
