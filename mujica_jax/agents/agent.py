"""The interface of agents: what an agent is, who writes its turns, and how episodes are played.

An agent plays one episode of an `Attempt` in an environment and records it. A `Policy` writes its
turns. The policy gets token ids, sampling parameters and a state. The state holds what the agent
knows at this turn as plain values. Only the agent's own scripts (`demonstrations/`) read it.
Evaluation, runs and methods know this file and no agent's own types.
"""

import asyncio
import dataclasses
import hashlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from mujica_jax.agents.dialogue import Opening
from mujica_jax.agents.protocol import WORKER
from mujica_jax.inference.requests import Completion, Generator, SamplingParams, TokenIds
from mujica_jax.records import Question, Trajectory
from mujica_jax.rewards.reward import RewardFunction
from mujica_jax.tasks.task import Environment, EnvironmentKind

# About as long as one call of the engine. A poll costs microseconds.
POLL_SECONDS = 0.1

EnvironmentOf = Callable[[Question], Environment]
OnEpisode = Callable[[Trajectory], None]
Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attempt:
    """One try at one question."""

    question: Question
    number: int
    seed: int
    temperature: float

    def turn_seed(self, place: str) -> int:
        """Return the seed of one turn.

        It depends on run seed, question, attempt and place in the episode alone.
        """
        text = f"{self.seed}/{self.question.id}/{self.number}/{place}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")


class Policy(Protocol):
    """Writes an agent's turns."""

    @property
    def version(self) -> int: ...

    async def generate(
        self, prompt: TokenIds, params: SamplingParams, *, state: object, continues: bool
    ) -> Completion:
        """Write the turn after `prompt` (token ids).

        `state` is the agent's own. `continues` says that the conversation may go on.
        """
        ...


class EnginePolicy:
    """The model behind a `Generator`."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    @property
    def version(self) -> int:
        return getattr(self._generator, "policy_version", 0)

    async def generate(
        self, prompt: TokenIds, params: SamplingParams, *, state: object, continues: bool
    ) -> Completion:
        del state  # the model reads tokens
        return await self._generator.generate(prompt, params, continues=continues)


class TwoPolicies:
    """Two models: one writes as worker, the other one writes everything else.

    The `role` of an agent's state says whose turn it is.
    """

    def __init__(self, planner: Policy, worker: Policy) -> None:
        self._planner = planner
        self._worker = worker

    @property
    def version(self) -> int:
        return self._planner.version

    async def generate(
        self, prompt: TokenIds, params: SamplingParams, *, state: object, continues: bool
    ) -> Completion:
        is_worker = getattr(state, "role", "") == WORKER
        policy = self._worker if is_worker else self._planner
        return await policy.generate(prompt, params, state=state, continues=continues)


class Agent(Protocol):
    """Plays episodes; any number may run at once."""

    async def run(self, attempt: Attempt, environment: Environment, policy: Policy) -> Trajectory:
        """Play one episode and return its record, without its reward.

        A malformed turn ends it with a `StopReason`, never with an exception.
        """
        ...

    def opening(self, role: str, kind: EnvironmentKind) -> Opening:
        """Return what conversations of this role begin with.

        With it, trajectories can be moved to another prompt.
        """
        ...


PlayAttempt = Callable[[Agent, Attempt, Environment, Policy], Awaitable[Trajectory]]


def _play_once(
    agent: Agent, attempt: Attempt, environment: Environment, policy: Policy
) -> Awaitable[Trajectory]:
    """Play an attempt. It is not repeated if a search fails."""
    return agent.run(attempt, environment, policy)


def _ignore_episode(trajectory: Trajectory) -> None:
    """Do nothing with an episode."""


def _no_poll() -> None:
    """Do nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpisodeHooks:
    """The functions of a program that `run_episodes` calls while it plays."""

    # Plays one attempt. `faults.FaultGuard.play` repeats it if a search fails.
    play: PlayAttempt = _play_once
    # Takes each trajectory, with its reward, when its episode has ended.
    on_episode: OnEpisode = _ignore_episode
    # Is called every POLL_SECONDS. An exception that it raises ends all episodes.
    poll: Callable[[], None] = _no_poll


NO_HOOKS = EpisodeHooks()


async def run_episodes(
    agent: Agent,
    attempts: Sequence[Attempt],
    environment: EnvironmentOf,
    policy: Policy,
    *,
    reward: RewardFunction,
    concurrency: int,
    hooks: EpisodeHooks = NO_HOOKS,
) -> list[Trajectory]:
    """Play all attempts, at most `concurrency` at a time.

    Returns their trajectories with rewards, in the order of `attempts`. The reward is waited for
    outside of `concurrency`, so that a slow judge does not keep the engine idle.
    """
    free_places = asyncio.Semaphore(concurrency)

    async def play_and_reward(attempt: Attempt) -> Trajectory:
        async with free_places:
            trajectory = await hooks.play(agent, attempt, environment(attempt.question), policy)
        trajectory = await reward.rewarded(trajectory, attempt.question)
        hooks.on_episode(trajectory)
        return trajectory

    return await gather_polled([play_and_reward(attempt) for attempt in attempts], hooks.poll)


async def gather_polled(
    parts: Sequence[Coroutine[Any, Any, Result]], poll: Callable[[], None]
) -> list[Result]:
    """Run all parts at once and return their results in order.

    `poll` is called every POLL_SECONDS, between two calls of the engine. An exception that it
    raises ends the parts.
    """
    all_parts = asyncio.gather(*parts)
    try:
        while True:
            done, _ = await asyncio.wait([all_parts], timeout=POLL_SECONDS)
            if done:
                return list(all_parts.result())
            poll()
    finally:
        # Wait until the cancelled parts have ended, and read their errors.
        all_parts.cancel()
        await asyncio.gather(all_parts, return_exceptions=True)
