"""A sampling worker for MyGO: it plays episodes for a trainer that runs in another process.

The trainer runs with `--sampling.workers external`. It writes the plan of each round into the run
directory and waits for the shards. Any number of workers may start and stop at any time, on any
machine. They communicate only through the run directory.

A worker claims a unit of work with a lease (`storage.leases`), plays it with the policy that the
plan names, and stores the result as one shard. The shard is the same whichever worker plays the
unit. If a worker dies, its lease expires, and another worker plays the unit.
"""

import dataclasses
import itertools
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

from mujica_jax.config.methods import MygoConfig
from mujica_jax.errors import UserError
from mujica_jax.methods.mygo import Unit, first_attempts, later_attempts, next_threshold
from mujica_jax.records import Question, Trajectory
from mujica_jax.runs.phases import PhaseState
from mujica_jax.runs.run import Run, method_of
from mujica_jax.runs.sampling import intact_shard
from mujica_jax.runs.versions import use_policy
from mujica_jax.storage.leases import Leases
from mujica_jax.trajectories.select import mean_first_attempt_reward
from mujica_jax.trajectories.store import DONE, SUMMARY, shard_name

# How long a worker waits if there is nothing to do, in seconds. Each wait is twice as long as the
# one before, up to the maximum.
POLL_SECONDS = 1.0
MAX_POLL_SECONDS = 8.0
# How many units of one listing a worker tries to claim. After these the listing is out of date.
TRIES = 3
# How many times a worker reads the leases of others during the lifetime of one lease.
LOOKS_A_LEASE = 4


@dataclasses.dataclass
class SamplerStatistics:
    """Counts of what a worker has done so far.

    Attributes:
        units: Number of units that it played.
        trajectories: Number of trajectories in these units.
        takeovers: Number of units that it took over from a worker whose lease had expired.
        takeover_seconds: The longest time for which such a worker had not renewed its lease.
        sampling_seconds: Time spent on playing units.
        idle_seconds: Time spent on waiting for work.
        store_operations: Number of reads and writes in the run directory.
    """

    units: int = 0
    trajectories: int = 0
    takeovers: int = 0
    takeover_seconds: float = 0.0
    sampling_seconds: float = 0.0
    idle_seconds: float = 0.0
    store_operations: int = 0

    def in_words(self) -> str:
        """Return the counts as one line for the console."""
        total_seconds = max(self.sampling_seconds + self.idle_seconds, 1e-9)
        operations_per_unit = self.store_operations / max(1, self.units)
        return (
            f"played {self.units} units with {self.trajectories} trajectories in "
            f"{total_seconds:.0f} s ({self.idle_seconds / total_seconds:.0%} idle); took over "
            f"{self.takeovers} units from workers that were silent for up to "
            f"{self.takeover_seconds:.0f} s; {operations_per_unit:.0f} store operations per unit"
        )


class Sampler:
    """One worker for one run."""

    def __init__(self, run: Run, leases: Leases) -> None:
        self._run = run
        self._leases = leases
        self._questions = {question.id: question for question in run.task.questions("train")}
        # The version of the policy that is loaded in the engine.
        self._policy_version: int | None = None
        # The first round that is not known to be finished.
        self._first_open_round = 1
        self._random = random.Random(leases.owner)
        # When this worker last read the leases of others.
        self._last_look_time = time.monotonic()
        self.statistics = SamplerStatistics()

    def work(self) -> None:
        """Play units of work until the run is finished.

        Raises PreemptedError if the worker was asked to stop. Its current unit is then free for
        other workers.
        """
        with self._run.progress.stage("sampling for the trainer", unit="units", live=dict) as stage:
            wait_seconds = POLL_SECONDS
            while not self._run.store.exists(SUMMARY):
                start_time = time.monotonic()
                if any(self._work_on(number) for number in self._open_rounds()):
                    wait_seconds = POLL_SECONDS
                else:
                    self._run.preemption.check()
                    time.sleep(wait_seconds)
                    if wait_seconds >= MAX_POLL_SECONDS:
                        # Look at all rounds again: if a damaged shard was set aside, its round is
                        # open again.
                        self._first_open_round = 1
                    wait_seconds = min(2 * wait_seconds, MAX_POLL_SECONDS)
                    self.statistics.idle_seconds += time.monotonic() - start_time
                self._count()
                stage.update(self.statistics.units, trajectories=self.statistics.trajectories)

    def _open_rounds(self) -> Iterator[int]:
        """Yield the numbers of rounds that are planned and not finished, the oldest first."""
        store = self._run.store
        number = self._first_open_round
        while store.exists(f"rounds/{number:04d}/plan.json"):
            if not store.exists(f"rounds/{number:04d}/{DONE}"):
                yield number
            elif number == self._first_open_round:
                self._first_open_round += 1
            number += 1

    def _work_on(self, number: int) -> bool:
        """Play one unit of this round that no other worker plays.

        Returns whether there was such a unit. There is none if the round's policy is not committed
        yet.
        """
        store = self._run.store
        plan = store.read_json(f"rounds/{number:04d}/plan.json")
        version = plan["policy_version"]
        if version not in store.policies():
            return False

        # List the units that have no shard yet. Later attempts can only be listed when all first
        # attempts are stored, because these determine the threshold.
        shards = self._shards(plan)
        first_units = first_attempts(self._run, number, shards)
        names = store.names(f"rounds/{number:04d}/")
        stored_names = {name for name in names if name.endswith(".parquet")}
        leased = {int(name.split("/")[3]) for name in names if "/leases/" in name}
        units = _without_shard(first_units, number, stored_names)
        if not units:
            later_units = self._later_units(number, plan, shards, first_units)
            units = _without_shard(later_units, number, stored_names)

        # Play a unit that no worker has leased.
        free_units = [unit for unit in units if unit.index not in leased]
        if self._play_one(number, free_units, version, fresh=True):
            return True

        # From time to time, check whether the leases of other workers have expired. Each worker
        # checks a few random units. Together the workers check all of them.
        seconds_since_look = time.monotonic() - self._last_look_time
        if seconds_since_look < self._leases.seconds / LOOKS_A_LEASE:
            return False
        leased_units = [unit for unit in units if unit.index in leased]
        has_played = self._play_one(number, leased_units, version, fresh=False)
        if not has_played:
            self._last_look_time = time.monotonic()
        return has_played

    def _later_units(
        self,
        number: int,
        plan: dict[str, Any],
        shards: list[list[Question]],
        first_units: list[Unit],
    ) -> list[Unit]:
        """Return the units of later attempts that have any episode to play.

        The first worker that gets here reads all first attempts. It computes the threshold and the
        list of these units, and stores both for the other workers.
        """
        run = self._run
        name = f"rounds/{number:04d}/threshold.json"
        if not run.store.exists(name):
            trajectories_by_shard = [_read(run, number, unit) for unit in first_units]
            if not all(trajectories_by_shard):
                return []
            mean_reward = mean_first_attempt_reward(
                list(itertools.chain.from_iterable(trajectories_by_shard))
            )
            k = next_threshold(
                method_of(run, MygoConfig), plan["previous_threshold"], mean_reward, run.reward.best
            )
            later = later_attempts(run, number, shards, trajectories_by_shard.__getitem__, k)
            indexes = [unit.index for unit in later if unit.has_work()]
            run.store.write_json_once(name, {"k": k, "units": indexes})

        threshold = run.store.read_json(name)
        later = later_attempts(
            run,
            number,
            shards,
            lambda index: _read(run, number, first_units[index]),
            threshold["k"],
        )
        indexes_with_work = set(threshold["units"])
        return [unit for unit in later if unit.index in indexes_with_work]

    def _shards(self, plan: dict[str, Any]) -> list[list[Question]]:
        """Return the questions of a plan, by shard.

        Raises UserError if this worker's task does not have one of the questions.
        """
        shards = []
        for question_ids in plan["shards"]:
            for question_id in question_ids:
                if question_id not in self._questions:
                    raise UserError(
                        f"the round's plan contains the question {question_id}, but this worker's "
                        f"task {self._run.task.name} does not have it: give this worker the same "
                        "data as the trainer"
                    )
            shards.append([self._questions[question_id] for question_id in question_ids])
        return shards

    def _play_one(self, number: int, units: Sequence[Unit], version: int, *, fresh: bool) -> bool:
        """Try to lease a few of these units in random order, and play the first that is free.

        Returns whether a unit was played. `fresh` says that no process has leased these units yet.
        Otherwise a unit is free if its lease has expired.
        """
        for unit in self._random.sample(units, min(TRIES, len(units))):
            lease = self._leases.claim(f"rounds/{number:04d}/leases/{unit.index:05d}", fresh=fresh)
            if lease is None:
                continue
            start_time = time.monotonic()
            self._run.preemption.enter(
                f"round {number}: sampling unit {unit.index}", kept_text="finished units are kept"
            )
            self._run.on_poll = lease.renew
            try:
                if version != self._policy_version:
                    # Load the committed policy from the run directory.
                    use_policy(self._run, PhaseState(_no_state), version)
                    self._policy_version = version
                lease.renew()
                _, trajectories = unit.play(lambda trajectory: None)
            except BaseException:
                lease.release()
                raise
            finally:
                self._run.on_poll = lambda: None
            self.statistics.units += 1
            self.statistics.trajectories += len(trajectories)
            self.statistics.sampling_seconds += time.monotonic() - start_time
            return True
        return False

    def _count(self) -> None:
        """Copy the counts of the store and of the leases into the statistics."""
        counts = self._run.store.io_statistics.summary()
        self.statistics.store_operations = int(counts["reads"] + counts["writes"])
        self.statistics.takeovers = self._leases.takeovers
        self.statistics.takeover_seconds = self._leases.takeover_seconds


def _without_shard(units: Sequence[Unit], number: int, stored_names: set[str]) -> list[Unit]:
    """Return the units whose shards are not stored yet."""
    return [unit for unit in units if shard_name(number, unit.index) not in stored_names]


def _read(run: Run, number: int, unit: Unit) -> list[Trajectory]:
    """Return the trajectories of a unit's shard.

    If the shard is damaged, it is set aside to be played again, and the result is empty.
    """
    entry = intact_shard(run, number, unit.index)
    return run.store.read_shard(entry) if entry else []


def _no_state() -> Any:
    """Stand in for a training state, which a worker does not have."""
    raise AssertionError("a worker has no training state; it only uses committed policies")
