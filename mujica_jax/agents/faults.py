"""The class `FaultGuard`, which repeats attempts whose search failed.

A failed search is a fault of the environment and says nothing about the policy. The guard plays
the attempt again with the same seeds. If the search succeeds this time, the episode is the same as
without the fault. If every repetition fails, the attempt is recorded as `retriever_failed`. It has
no reward, and groups, means and thresholds leave it out (`Trajectory.is_rewarded`).

If too many attempts in a row fail, the guard ends the program, because nothing is left to learn
from.
"""

from mujica_jax.agents.agent import Agent, Attempt, Policy
from mujica_jax.config.schema import FaultConfig
from mujica_jax.errors import UserError
from mujica_jax.records import Trajectory
from mujica_jax.tasks.task import Environment


class EnvironmentLostError(UserError):
    """The retriever has failed so often in a row that nothing can be learnt or measured."""


class FaultGuard:
    """A player of attempts that repeats failed attempts and counts failures in a row.

    A program uses one guard for all of its attempts.
    """

    def __init__(self, config: FaultConfig | None = None) -> None:
        self._config = FaultConfig() if config is None else config
        self._failed_in_a_row = 0

    async def play(
        self, agent: Agent, attempt: Attempt, environment: Environment, policy: Policy
    ) -> Trajectory:
        """Play one attempt, and repeat it up to `faults.repeats` times if a search fails.

        Raises EnvironmentLostError after too many failures in a row.
        """
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
            # An episode without a search does not prove that the retriever works.
            if trajectory.searches:
                self._failed_in_a_row = 0
            return

        self._failed_in_a_row += 1
        if self._failed_in_a_row > self._config.max_in_a_row:
            raise EnvironmentLostError(
                f"a search failed in {self._failed_in_a_row} attempts in a row (each was played "
                f"{self._config.repeats + 1} times), but faults.max_in_a_row is "
                f"{self._config.max_in_a_row}: start the retriever again or correct its address, "
                "then run the same command again; finished work is kept"
            )
