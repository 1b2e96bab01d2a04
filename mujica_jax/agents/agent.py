"""The interfaces `Agent` and `Policy`, and the function that plays episodes.

An agent takes an `Attempt` at a question, plays one episode in an environment, and records it. A
`Policy` writes the turns of the episode. It gets token ids, sampling parameters and a state. The
state holds everything that the agent knows at this turn, as plain values. Only the scripts in
`demonstrations/` read it. Evaluation, runs and methods use this file alone and no type of a
particular agent.
"""

import asyncio
import contextlib
import dataclasses
import hashlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from mujica_jax.agents.dialogue import Opening
from mujica_jax.agents.protocol import WORKER
from mujica_jax.inference.requests import (
    Completion,
    Generator,
    SamplingParams,
    StreamingGenerator,
    TokenIds,
)
from mujica_jax.records import Question, Trajectory
from mujica_jax.rewards.reward import RewardFunction
from mujica_jax.tasks.task import Environment, EnvironmentKind

# The time between two polls. A call of the engine takes about as long, and a poll takes
# microseconds.
POLL_SECONDS = 0.1

EnvironmentOf = Callable[[Question], Environment]
OnEpisode = Callable[[Trajectory], None]
# Receives token ids of a turn, at least one, while the rest is still being decoded.
OnTokens = Callable[[TokenIds], None]
Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attempt:
    """One attempt at a question. `number` counts the attempts at the same question, from 0."""

    question: Question
    number: int
    seed: int
    temperature: float

    def turn_seed(self, place: str) -> int:
        """Return the sampling seed of one turn.

        It depends only on the run's seed, the question, the number of the attempt, and `place`, a
        name that is unique in the episode.
        """
        text = f"{self.seed}/{self.question.id}/{self.number}/{place}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")


class Policy(Protocol):
    """The writer of an agent's turns: a model, or a script that writes demonstrations."""

    @property
    def version(self) -> int:
        """Return the version number of the policy. Version 0 is the policy after the warm-up."""
        ...

    async def generate(
        self, prompt: TokenIds, params: SamplingParams, *, state: object, continues: bool
    ) -> Completion:
        """Write the turn that follows the token ids `prompt`.

        `state` holds the facts that the agent knows, in a type of its own. `continues` is True if
        more turns of the same conversation may follow.
        """
        ...


@runtime_checkable
class StreamingPolicy(Policy, Protocol):
    """A policy that can report the tokens of a turn while they are decoded."""

    def streaming(self, on_tokens: OnTokens) -> Policy:
        """Return this policy, with `on_tokens` called for the tokens of each of its turns.

        If the generator cannot stream, it is never called.
        """
        ...


class EnginePolicy:
    """A policy whose turns are written by the model behind a `Generator`."""

    def __init__(self, generator: Generator, *, on_tokens: OnTokens | None = None) -> None:
        self._generator = generator
        self._on_tokens = on_tokens

    def streaming(self, on_tokens: OnTokens) -> "EnginePolicy":
        """Return this policy, with `on_tokens` called for the tokens of each of its turns."""
        return EnginePolicy(self._generator, on_tokens=on_tokens)

    @property
    def version(self) -> int:
        """Return the policy version of the generator, or 0 if it has none."""
        return getattr(self._generator, "policy_version", 0)

    async def generate(
        self, prompt: TokenIds, params: SamplingParams, *, state: object, continues: bool
    ) -> Completion:
        """Let the model write the turn. The model reads only the prompt, not the state."""
        del state
        if self._on_tokens is None or not isinstance(self._generator, StreamingGenerator):
            return await self._generator.generate(prompt, params, continues=continues)

        items = self._generator.stream(prompt, params, continues=continues)
        async with contextlib.aclosing(items):
            async for item in items:
                if isinstance(item, Completion):
                    return item
                self._on_tokens(item.token_ids)
        raise AssertionError("a stream ends with the completion")


class TwoPolicies:
    """A policy of two models: one writes the worker's turns, and the other writes all other turns.

    The attribute `role` of the agent's state says whose turn it is.
    """

    def __init__(self, planner: Policy, worker: Policy) -> None:
        self._planner = planner
        self._worker = worker

    @property
    def version(self) -> int:
        """Return the version of the planner's policy."""
        return self._planner.version

    def streaming(self, on_tokens: OnTokens) -> "TwoPolicies":
        """Return the two policies, with `on_tokens` called for the tokens of each turn."""
        return TwoPolicies(
            _streaming(self._planner, on_tokens), _streaming(self._worker, on_tokens)
        )

    async def generate(
        self, prompt: TokenIds, params: SamplingParams, *, state: object, continues: bool
    ) -> Completion:
        """Let the model of the state's role write the turn."""
        is_worker = getattr(state, "role", "") == WORKER
        policy = self._worker if is_worker else self._planner
        return await policy.generate(prompt, params, state=state, continues=continues)


def _streaming(policy: Policy, on_tokens: OnTokens) -> Policy:
    """Return the policy with its tokens reported, if it can do that."""
    return policy.streaming(on_tokens) if isinstance(policy, StreamingPolicy) else policy


class Agent(Protocol):
    """A player of episodes. Any number of episodes may run at the same time."""

    async def run(self, attempt: Attempt, environment: Environment, policy: Policy) -> Trajectory:
        """Play one episode and return its record, without a reward.

        A malformed turn raises no exception. It ends the episode with a `StopReason`.
        """
        ...

    def opening(self, role: str, kind: EnvironmentKind) -> Opening:
        """Return the system prompt and the examples at the start of this role's conversations.

        Training uses it to give a trajectory another prompt.
        """
        ...


PlayAttempt = Callable[[Agent, Attempt, Environment, Policy], Awaitable[Trajectory]]


def _play_once(
    agent: Agent, attempt: Attempt, environment: Environment, policy: Policy
) -> Awaitable[Trajectory]:
    """Play an attempt once, without a repetition if a search fails."""
    return agent.run(attempt, environment, policy)


def _ignore_episode(trajectory: Trajectory) -> None:
    """Do nothing with an episode."""


def _no_poll() -> None:
    """Do nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpisodeHooks:
    """The functions that `run_episodes` calls while it plays."""

    # Plays one attempt. `faults.FaultGuard.play` also repeats an attempt if a search fails.
    play: PlayAttempt = _play_once
    # Receives each trajectory, with its reward, when the episode has ended.
    on_episode: OnEpisode = _ignore_episode
    # Called every POLL_SECONDS. An exception that it raises ends all episodes.
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
    """Play all attempts, at most `concurrency` episodes at a time.

    Returns the trajectories with their rewards, in the order of `attempts`. An episode that waits
    for its reward does not count towards `concurrency`. A slow judge therefore does not leave the
    engine idle.
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
    """Run all coroutines at the same time and return their results in order.

    `poll` is called every POLL_SECONDS, between two calls of the engine. If it raises an exception,
    the coroutines are cancelled.
    """
    all_parts = asyncio.gather(*parts)
    try:
        while True:
            done, _ = await asyncio.wait([all_parts], timeout=POLL_SECONDS)
            if done:
                return list(all_parts.result())
            poll()
    finally:
        # Wait until the cancelled coroutines have ended, and collect their errors.
        all_parts.cancel()
        await asyncio.gather(all_parts, return_exceptions=True)
