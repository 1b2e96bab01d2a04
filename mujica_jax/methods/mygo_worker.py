"""A sampling worker: plays units of the rounds that a trainer plans in a run directory.

It claims a unit by a lease (`storage.leases`) and plays it with the policy that the round's plan
names. It leaves a shard, which is created once and is the same whoever plays the unit. If a worker
dies, its lease expires and another worker takes the unit. Any number of workers may come and go at
any time; they know of each other only what the run directory says. The trainer runs with
`--sampling.workers external` and waits for the shards.
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

# Between two looks at a run that has nothing to do. Each wait is twice as long as the one before.
POLL_SECONDS = 1.0
MAX_POLL_SECONDS = 8.0
TRIES = 3  # units of a listing, which is old by then
LOOKS_A_LEASE = 4  # how often leases of others are read while one lasts


@dataclasses.dataclass
class SamplerStatistics:
    """Counts of what a worker has done so far."""

    units: int = 0
    trajectories: int = 0
    takeovers: int = 0  # units whose worker had let its lease expire
    takeover_seconds: float = 0.0  # the longest time that such a worker had been silent
    sampling_seconds: float = 0.0
    idle_seconds: float = 0.0
    store_operations: int = 0

    def in_words(self) -> str:
        """Return the numbers as one line."""
        total_seconds = max(self.sampling_seconds + self.idle_seconds, 1e-9)
        operations_per_unit = self.store_operations / max(1, self.units)
        return (
            f"{self.units} units ({self.trajectories} trajectories, {self.takeovers} taken over "
            f"after at most {self.takeover_seconds:.0f} s) in {total_seconds:.0f} s, idle "
            f"{self.idle_seconds / total_seconds:.0%}, {operations_per_unit:.0f} store operations "
            "a unit"
        )


class Sampler:
    """One worker over one run."""

    def __init__(self, run: Run, leases: Leases) -> None:
        self._run = run
        self._leases = leases
        self._questions = {question.id: question for question in run.task.questions("train")}
        self._policy_version: int | None = None  # of the policy that the engine holds
        self._first_open_round = 1  # first round that is not known to be done
        self._random = random.Random(leases.owner)
        self._last_look_time = time.monotonic()  # when leases of others were read last
        self.statistics = SamplerStatistics()

    def work(self) -> None:
        """Play units of work until the run is finished.

        Raises PreemptedError when asked to end; the unit under way is free for others then.
        """
        with self._run.progress.stage("sampling for others", unit="units", live=dict) as stage:
            wait_seconds = POLL_SECONDS
            while not self._run.store.exists(SUMMARY):
                start_time = time.monotonic()
                if any(self._work_on(number) for number in self._open_rounds()):
                    wait_seconds = POLL_SECONDS
                else:
                    self._run.preemption.check()
                    time.sleep(wait_seconds)
                    if wait_seconds >= MAX_POLL_SECONDS:
                        # A round whose shard was set aside is open again.
                        self._first_open_round = 1
                    wait_seconds = min(2 * wait_seconds, MAX_POLL_SECONDS)
                    self.statistics.idle_seconds += time.monotonic() - start_time
                self._count()
                stage.update(self.statistics.units, trajectories=self.statistics.trajectories)

    def _open_rounds(self) -> Iterator[int]:
        """Yield the rounds that are planned and not done, the oldest first."""
        store = self._run.store
        number = self._first_open_round
        while store.exists(f"rounds/{number:04d}/plan.json"):
            if not store.exists(f"rounds/{number:04d}/{DONE}"):
                yield number
            elif number == self._first_open_round:
                self._first_open_round += 1
            number += 1

    def _work_on(self, number: int) -> bool:
        """Play one unit of this round, if there is one that no other worker plays."""
        store = self._run.store
        plan = store.read_json(f"rounds/{number:04d}/plan.json")
        version = plan["policy_version"]
        if version not in store.policies():
            return False

        # List the units that have no shard yet: first attempts, and later ones when these are done.
        shards = self._shards(plan)
        first_units = first_attempts(self._run, number, shards)
        names = store.names(f"rounds/{number:04d}/")
        stored_names = {name for name in names if name.endswith(".parquet")}
        leased = {int(name.split("/")[3]) for name in names if "/leases/" in name}
        units = _without_shard(first_units, number, stored_names)
        if not units:
            later_units = self._later_units(number, plan, shards, first_units)
            units = _without_shard(later_units, number, stored_names)

        # Play a unit that no worker leases.
        free_units = [unit for unit in units if unit.index not in leased]
        if self._play_one(number, free_units, version, fresh=True):
            return True

        # Whether others still live is read from time to time, of some of them: all workers together
        # look at all.
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
        """Return the units of later attempts that have work.

        The first worker that comes here reads all first attempts and writes down what follows from
        them, for the others.
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
        """Return the questions of a plan, by shard. Raises UserError where the task lacks one."""
        shards = []
        for question_ids in plan["shards"]:
            for question_id in question_ids:
                if question_id not in self._questions:
                    raise UserError(
                        f"the round's plan names the question {question_id}, which the task "
                        f"{self._run.task.name} does not have here: give this worker the data that "
                        "the trainer has"
                    )
            shards.append([self._questions[question_id] for question_id in question_ids])
        return shards

    def _play_one(self, number: int, units: Sequence[Unit], version: int, *, fresh: bool) -> bool:
        """Play the first of some units that can be leased, and return whether there was one.

        Each worker asks in an order of its own, and looks again where others were faster.
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
                    # The committed policy is read from the run directory.
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
        """Take over what store and leases have counted."""
        counts = self._run.store.io_statistics.summary()
        self.statistics.store_operations = int(counts["reads"] + counts["writes"])
        self.statistics.takeovers = self._leases.takeovers
        self.statistics.takeover_seconds = self._leases.takeover_seconds


def _without_shard(units: Sequence[Unit], number: int, stored_names: set[str]) -> list[Unit]:
    """Return the units whose shard is not stored."""
    return [unit for unit in units if shard_name(number, unit.index) not in stored_names]


def _read(run: Run, number: int, unit: Unit) -> list[Trajectory]:
    """Read the shard of a unit.

    Returns nothing where it is damaged: it is set aside then, and played again.
    """
    entry = intact_shard(run, number, unit.index)
    return run.store.read_shard(entry) if entry else []


def _no_state() -> Any:
    raise AssertionError("a worker has no state to train: its policies are committed ones")
