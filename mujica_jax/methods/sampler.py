"""A sampling worker: plays units of the rounds that a trainer plans in a run directory, beside any
number of others.

It claims a unit by a lease (`storage.leases`), plays it with the policy that the round's plan
names, and leaves its shard, which is created once and is the same whoever plays it. A worker that
is gone lets its lease expire, and another one takes the unit over. Workers come and go at any time
and know nothing of each other but what the run directory says. The trainer runs with
`--sampling.workers external` and waits for the shards.
"""

import dataclasses
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

from mujica_jax.config.methods import MygoConfig
from mujica_jax.errors import UserError
from mujica_jax.methods.mygo_rounds import Unit, first_attempts, later_attempts, next_threshold
from mujica_jax.methods.phases import PhaseState
from mujica_jax.methods.rounds import method_of
from mujica_jax.methods.run import Run
from mujica_jax.records import Question, Trajectory
from mujica_jax.storage.leases import Leases
from mujica_jax.trajectories.select import mean_first_attempt_reward
from mujica_jax.trajectories.store import DONE, SUMMARY, shard_name

POLL_SECONDS, MAX_POLL_SECONDS = (
    1.0,
    8.0,
)  # between two looks at a run that has nothing to do, twice as long each
TRIES = 3  # units of a listing, which is old by then
LOOKS_A_LEASE = 4  # how often leases of others are read while one lasts


@dataclasses.dataclass
class SamplerStatistics:
    """What a worker did, so far."""

    units: int = 0
    trajectories: int = 0
    takeovers: int = 0  # units whose worker had let its lease expire
    takeover_seconds: float = 0.0  # the longest time that such a worker had been silent
    sampling_seconds: float = 0.0
    idle_seconds: float = 0.0
    store_operations: int = 0

    def in_words(self) -> str:
        total = max(self.sampling_seconds + self.idle_seconds, 1e-9)
        return (
            f"{self.units} units ({self.trajectories} trajectories, {self.takeovers} taken over "
            f"after at most {self.takeover_seconds:.0f} s) in {total:.0f} s, idle "
            f"{self.idle_seconds / total:.0%}, {self.store_operations / max(1, self.units):.0f} "
            "store operations a unit"
        )


class Sampler:
    """One worker over one run."""

    def __init__(self, run: Run, leases: Leases) -> None:
        self._run, self._leases = run, leases
        self._questions = {question.id: question for question in run.task.questions("train")}
        self._version: int | None = None  # of the policy that the engine holds
        self._oldest = 1  # round that is not known to be done
        self._draw = random.Random(leases.owner)
        self._looked = time.monotonic()  # when leases of others were read last
        self.statistics = SamplerStatistics()

    def work(self) -> None:
        """Until the run is finished. Raises Preempted when asked to end; the unit under way is free
        for others then."""
        with self._run.progress.stage("sampling for others", unit="units", live=dict) as stage:
            wait = POLL_SECONDS
            while not self._run.store.exists(SUMMARY):
                began = time.monotonic()
                if any(self._work_on(number) for number in self._open_rounds()):
                    wait = POLL_SECONDS
                else:
                    self._run.preemption.check()
                    time.sleep(wait)
                    if wait >= MAX_POLL_SECONDS:
                        self._oldest = 1  # a round whose shard was set aside is open again
                    wait = min(2 * wait, MAX_POLL_SECONDS)
                    self.statistics.idle_seconds += time.monotonic() - began
                self._count()
                stage.update(self.statistics.units, trajectories=self.statistics.trajectories)

    def _open_rounds(self) -> Iterator[int]:
        """Planned and not done, the oldest first."""
        store, number = self._run.store, self._oldest
        while store.exists(f"rounds/{number:04d}/plan.json"):
            if not store.exists(f"rounds/{number:04d}/{DONE}"):
                yield number
            elif number == self._oldest:
                self._oldest += 1
            number += 1

    def _work_on(self, number: int) -> bool:
        """Play one unit of this round, if one is left that nobody plays."""
        run, store = self._run, self._run.store
        plan = store.read_json(f"rounds/{number:04d}/plan.json")
        if plan["policy_version"] not in store.policies():
            return False
        shards = self._shards(plan)
        firsts = first_attempts(run, number, shards)
        names = store.names(f"rounds/{number:04d}/")
        there = {name for name in names if name.endswith(".parquet")}
        leased = {int(name.split("/")[3]) for name in names if "/leases/" in name}
        units = [unit for unit in firsts if shard_name(number, unit.index) not in there]
        if not units:
            later = self._later(number, plan, shards, firsts)
            units = [unit for unit in later if shard_name(number, unit.index) not in there]
        free = [unit for unit in units if unit.index not in leased]
        if self._play_one(number, free, plan["policy_version"], fresh=True):
            return True
        # Whether others still live is read from time to time, of some of them: all workers together
        # look at all.
        if time.monotonic() - self._looked < self._leases.seconds / LOOKS_A_LEASE:
            return False
        taken = [unit for unit in units if unit.index in leased]
        played = self._play_one(number, taken, plan["policy_version"], fresh=False)
        if not played:
            self._looked = time.monotonic()
        return played

    def _later(
        self, number: int, plan: dict[str, Any], shards: list[list[Question]], firsts: list[Unit]
    ) -> list[Unit]:
        """The units of later attempts that have work. The first worker that comes here reads all
        first attempts and writes down what follows from them, for the others."""
        run, name = self._run, f"rounds/{number:04d}/threshold.json"
        if not run.store.exists(name):
            of_shard = [_read(run, number, unit) for unit in firsts]
            if not all(of_shard):
                return []
            mean_reward = mean_first_attempt_reward(
                [trajectory for shard in of_shard for trajectory in shard]
            )
            k = next_threshold(
                method_of(run, MygoConfig), plan["previous_threshold"], mean_reward, run.reward.best
            )
            later = later_attempts(run, number, shards, of_shard.__getitem__, k)
            run.store.write_json_once(
                name, {"k": k, "units": [unit.index for unit in later if unit.has_work()]}
            )
        found = run.store.read_json(name)
        later = later_attempts(
            run, number, shards, lambda index: _read(run, number, firsts[index]), found["k"]
        )
        return [unit for unit in later if unit.index in set(found["units"])]

    def _shards(self, plan: dict[str, Any]) -> list[list[Question]]:
        unknown = [
            name for shard in plan["shards"] for name in shard if name not in self._questions
        ]
        if unknown:
            raise UserError(
                f"the round's plan names the question {unknown[0]}, which the task "
                f"{self._run.task.name} does not have here: give this worker the data that the "
                "trainer has"
            )
        return [[self._questions[name] for name in shard] for shard in plan["shards"]]

    def _play_one(self, number: int, units: Sequence[Unit], version: int, *, fresh: bool) -> bool:
        """Each worker asks in an order of its own, and looks again where others were faster."""
        for unit in self._draw.sample(units, min(TRIES, len(units))):
            lease = self._leases.claim(f"rounds/{number:04d}/leases/{unit.index:05d}", fresh=fresh)
            if lease is None:
                continue
            began = time.monotonic()
            self._run.preemption.enter(
                f"round {number}: sampling unit {unit.index}", kept="finished units are kept"
            )
            self._run.on_poll = lease.renew
            try:
                if version != self._version:  # the committed policy is read from the run directory
                    self._run.use_policy(PhaseState(_nothing), version)
                    self._version = version
                lease.renew()
                found = unit.play(lambda trajectory: None)[1]
            except BaseException:
                lease.release()
                raise
            finally:
                self._run.on_poll = lambda: None
            self.statistics.units += 1
            self.statistics.trajectories += len(found)
            self.statistics.sampling_seconds += time.monotonic() - began
            return True
        return False

    def _count(self) -> None:
        counted = self._run.store.io_statistics.summary()
        self.statistics.store_operations = int(counted["reads"] + counted["writes"])
        self.statistics.takeovers = self._leases.takeovers
        self.statistics.takeover_seconds = self._leases.takeover_seconds


def _read(run: Run, number: int, unit: Unit) -> list[Trajectory]:
    """Nothing where it is damaged: it is set aside then, and played again."""
    entry = run.intact_shard(number, unit.index)
    return run.store.read_shard(entry) if entry else []


def _nothing() -> Any:
    raise AssertionError("a worker has no state to train: its policies are committed ones")
