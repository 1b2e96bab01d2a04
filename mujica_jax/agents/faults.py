"""Repeat attempts whose search failed, and end the program if the retriever is gone.

A failed search is a fault of the environment and says nothing about the policy. The attempt is
played again with the same seeds: if the search is answered this time, the episode is the same as
without the fault. An attempt that fails in all of its repeats stays in the records as
`retriever_failed`. It earns no reward, and groups, means and thresholds leave it out
(`Trajectory.is_rewarded`). If too many attempts in a row fail, the program ends instead of learning
from nothing.
"""

from mujica_jax.agents.agent import Agent, Attempt, Policy
from mujica_jax.config.schema import FaultConfig
from mujica_jax.errors import UserError
from mujica_jax.records import Trajectory
from mujica_jax.tasks.task import Environment


class EnvironmentLostError(UserError):
    """The retriever has failed for so long that nothing can be learnt or measured."""


class FaultGuard:
    """Plays attempts, repeats those that fail, and counts failures in a row.

    One guard serves a whole program.
    """

    def __init__(self, config: FaultConfig | None = None) -> None:
        self._config = FaultConfig() if config is None else config
        self._failed_in_a_row = 0

    async def play(
        self, agent: Agent, attempt: Attempt, environment: Environment, policy: Policy
    ) -> Trajectory:
        """Play one attempt within its bound of repeats. Raises EnvironmentLostError."""
        trajectory = await agent.run(attempt, environment, policy)
        repeats = 0
        while trajectory.is_environment_fault and repeats < self._config.repeats:
            repeats += 1
            trajectory = await agent.run(attempt, environment, policy)
        self._count(trajectory)
        return trajectory

    def _count(self, trajectory: Trajectory) -> None:
        """Count failures in a row. Raises EnvironmentLostError after too many."""
        if not trajectory.is_environment_fault:
            # An episode without a search does not show that the retriever answers.
            if trajectory.searches:
                self._failed_in_a_row = 0
            return

        self._failed_in_a_row += 1
        if self._failed_in_a_row > self._config.max_in_a_row:
            raise EnvironmentLostError(
                f"{self._failed_in_a_row} attempts in a row ended because a search failed, each of "
                f"them played {self._config.repeats + 1} times, and faults.max_in_a_row is "
                f"{self._config.max_in_a_row}: start the retriever again or correct its address, "
                "then give the same command; what is finished is kept"
            )
