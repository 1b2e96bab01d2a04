"""An agent that plays Mujica, and plays it again if the episode ends without an answer."""

import dataclasses
from typing import ClassVar, Literal

from mujica_jax.agents.agent import Attempt, Policy
from mujica_jax.agents.dialogue import Opening
from mujica_jax.agents.mujica import Mujica
from mujica_jax.config.agents import MujicaConfig
from mujica_jax.config.bounds import PositiveInt
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.records import StopReason, Trajectory
from mujica_jax.tasks.task import Environment, EnvironmentKind


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetryConfig(MujicaConfig):
    """Mujica, played again if an episode ends without an answer."""

    # Kind of agent.
    kind: Literal["retry"] = "retry"
    implementation: ClassVar[str] = "examples.retry_agent.agents:Retry"
    # Maximum number of episodes in one attempt.
    max_tries: PositiveInt = 2


class Retry:
    """The agent. Only its last episode is recorded, and only that one is learnt."""

    def __init__(self, tokenizer: Tokenizer, config: RetryConfig) -> None:
        self._mujica = Mujica(tokenizer, config)
        self._max_tries = config.max_tries

    def opening(self, role: str, kind: EnvironmentKind) -> Opening:
        """Return the system prompt and the examples at the start of this role's conversations."""
        return self._mujica.opening(role, kind)

    async def run(self, attempt: Attempt, environment: Environment, policy: Policy) -> Trajectory:
        """Play episodes with different seeds until one has an answer."""
        trajectory = await self._mujica.run(attempt, environment, policy)
        tries = 1
        while trajectory.stop_reason is not StopReason.ANSWERED and tries < self._max_tries:
            next_attempt = dataclasses.replace(attempt, seed=attempt.seed + tries)
            trajectory = await self._mujica.run(next_attempt, environment, policy)
            tries += 1
        counts = {**trajectory.counts, "tries": tries}
        return dataclasses.replace(trajectory, seed=attempt.seed, counts=counts)
