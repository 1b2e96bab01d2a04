"""Episodes without a model: a tokenizer, a little graph, and a policy that writes given texts."""

import asyncio
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from mujica_jax.agents.agent import Attempt, EnvironmentOf
from mujica_jax.agents.mujica import Mujica, PlannerState, WorkerState
from mujica_jax.config.schema import MujicaConfig
from mujica_jax.demonstrations.policy import sample_text
from mujica_jax.inference.requests import Completion, SamplingParams
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.records import Entity, Question, Trajectory
from mujica_jax.retrieval.errors import RetrievalError
from mujica_jax.retrieval.retriever import RetrievalStatistics
from mujica_jax.rewards.reward import find_reward
from mujica_jax.tasks.task import Environment, Material
from tests.helpers.patience import HANG_SECONDS

CONFIG = MujicaConfig(
    prompt="brief",
    max_iterations=4,
    max_searches_per_turn=3,
    max_turn_tokens=200,
    max_trajectory_tokens=1000,
    max_observation_tokens=300,
)
FILM = Entity(id="Q0", label="Amber Tide")
DIRECTOR = Entity(id="Q1", label="Ilse Vand")
CITY = Entity(id="Q2", label="Ghent")
OTHER_FILM = Entity(id="Q3", label="Tin Orchard")
QUESTION = Question(
    id="q-1",
    text="Where was the director of Amber Tide born?",
    answers=("Ghent",),
    candidates=(FILM, OTHER_FILM),
)
GRAPH = {
    FILM.id: (
        Material(text="Amber Tide, publication date, 1961", entities=(FILM,)),
        Material(text="Amber Tide, director, Ilse Vand", entities=(FILM, DIRECTOR)),
    ),
    OTHER_FILM.id: (
        Material(text="Tin Orchard, director, Ilse Vand", entities=(OTHER_FILM, DIRECTOR)),
    ),
    DIRECTOR.id: (Material(text="Ilse Vand, place of birth, Ghent", entities=(DIRECTOR, CITY)),),
}


@functools.cache
def tokenizer() -> Tokenizer:
    """Return a byte-level tokenizer in which the protocol's tags are tokens."""
    return Tokenizer.train((text for _ in range(5) for text in sample_text()), 600)


@dataclasses.dataclass
class LittleWorld:
    """An environment with materials by entity (graph) or by query (text).

    Searches whose query is in `failing` raise.
    """

    materials: Mapping[str, Sequence[Material]] = dataclasses.field(default_factory=lambda: GRAPH)
    kind: Literal["graph", "text"] = "graph"
    failing: frozenset[str] = frozenset()
    searched: list[tuple[str, Entity | None]] = dataclasses.field(default_factory=list)
    statistics: RetrievalStatistics = dataclasses.field(default_factory=RetrievalStatistics)

    async def search(self, query: str, entity: Entity | None) -> tuple[Material, ...]:
        self.searched.append((query, entity))
        await asyncio.sleep(0)
        if query in self.failing:
            raise RetrievalError(f"the search for {query} timed out")
        return tuple(self.materials.get(query if entity is None else entity.id, ()))


@dataclasses.dataclass(frozen=True)
class Request:
    prompt: tuple[int, ...]
    params: SamplingParams
    state: PlannerState | WorkerState
    continues: bool


class ToldPolicy:
    """A policy for one episode.

    It writes the planner's turns in their order and a worker's turn by its query.
    """

    version = 3

    def __init__(
        self,
        plans: Sequence[str],
        reads: Mapping[str, str] | Callable[[WorkerState], str] | None = None,
    ) -> None:
        self._plans = list(plans)
        self._reads = reads or {}
        self.requests: list[Request] = []

    async def generate(
        self, prompt: Sequence[int], params: SamplingParams, *, state: object, continues: bool
    ) -> Completion:
        assert isinstance(state, PlannerState | WorkerState)
        self.requests.append(Request(tuple(prompt), params, state, continues))
        await asyncio.sleep(0)
        if isinstance(state, PlannerState):
            return completion(self._plans.pop(0), params.max_new_tokens)
        text = self._reads(state) if callable(self._reads) else self._reads[state.query]
        return completion(text, params.max_new_tokens)


def completion(text: str, most_tokens: int = 1000) -> Completion:
    """Return what an engine would return for this text."""
    ids = (*tokenizer().encode_model(text), tokenizer().end_of_turn_id)
    sampled = ids[:most_tokens]
    return Completion(
        token_ids=sampled,
        logprobs=tuple(-0.5 - n / 8 for n in range(len(sampled))),
        sampling_logprobs=None,
        finish_reason="stop" if sampled == ids else "length",
        policy_version=3,
    )


def attempt(
    question: Question = QUESTION, *, number: int = 0, seed: int = 0, temperature: float = 1.0
) -> Attempt:
    return Attempt(question=question, number=number, seed=seed, temperature=temperature)


def agent(**changes) -> Mujica:
    return Mujica(tokenizer(), dataclasses.replace(CONFIG, **changes))


def everywhere(world: Environment) -> EnvironmentOf:
    """Return a function that gives every question this world."""
    return lambda question: world


def rewarded(trajectory: Trajectory, question: Question, name: str = "f1") -> Trajectory:
    return trajectory.with_reward(find_reward(name, "two_wiki")(trajectory, question))


def play(
    policy: ToldPolicy, world: Environment | None = None, question: Question = QUESTION, **changes
) -> Trajectory:
    """Play one episode and reward it by F1. `changes` are limits that differ from CONFIG."""
    world = LittleWorld() if world is None else world
    return rewarded(
        asyncio.run(
            asyncio.wait_for(agent(**changes).run(attempt(question), world, policy), HANG_SECONDS)
        ),
        question,
    )


def search(*calls: tuple[int, str]) -> str:
    lines = "\n".join(f'Search([{candidate}], "{query}")' for candidate, query in calls)
    return f"<think> look </think>\n<action>\n{lines}\n</action>"


def answer(text: str) -> str:
    return f"<think> done </think>\n<answer> {text} </answer>"


def read(indexes: str, sentence: str) -> str:
    return f"<think> see </think>\n<select> {indexes} </select>\n<sentence> {sentence} </sentence>"
