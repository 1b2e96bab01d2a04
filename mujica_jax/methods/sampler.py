"""A sampling worker: plays units of the rounds that a trainer plans in a run directory, beside any number of others.

It claims a unit by a lease (`storage.leases`), plays it with the policy that the round's plan names, and leaves its
shard, which is created once and is the same whoever plays it. A worker that is gone lets its lease expire, and another
one takes the unit over. Workers come and go at any time and know nothing of each other but what the run directory says.
The trainer runs with `--sampling.workers external` and waits for the shards.
"""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from mujica_jax.errors import UserError
from mujica_jax.methods.mygo_rounds import Unit, config_of, first_attempts, later_attempts, next_threshold
from mujica_jax.methods.run import PhaseState, Run
from mujica_jax.records import Question, Trajectory
from mujica_jax.storage.leases import Leases
from mujica_jax.trajectories.select import mean_first_attempt_reward
from mujica_jax.trajectories.store import DONE, shard_name

POLL_SECONDS = 1.0  # between two looks at a run that has nothing to do
FINISHED = "summary.json"


@dataclasses.dataclass
class SamplerStatistics:
    """What a worker did, so far."""

    units: int = 0
    trajectories: int = 0
    takeovers: int = 0  # units whose worker had let its lease expire
    sampling_seconds: float = 0.0
    idle_seconds: float = 0.0
    store_operations: int = 0

    def in_words(self) -> str:
        total = max(self.sampling_seconds + self.idle_seconds, 1e-9)
        return (
            f"{self.units} units ({self.trajectories} trajectories, {self.takeovers} taken over) in {total:.0f} s, "
            f"idle {self.idle_seconds / total:.0%}, {self.store_operations / max(1, self.units):.0f} store operations "
            "a unit"
        )


class Sampler:
    """One worker over one run."""

    def __init__(self, run: Run, leases: Leases, *, poll_seconds: float = POLL_SECONDS) -> None:
        self._run, self._leases, self._poll_seconds = run, leases, poll_seconds
        self._questions = {question.id: question for question in run.task.questions("train")}
        self._version: int | None = None  # of the policy that the engine holds
        self._firsts: tuple[int, list[Trajectory]] = (0, [])  # a round and its first attempts
        self.statistics = SamplerStatistics()

    def work(self) -> None:
        """Until the run is finished. Raises Preempted when asked to end; the unit under way is free for others then."""
        with self._run.progress.stage("sampling for others", unit="units", live=dict) as stage:
            while not self._run.store.exists(FINISHED):
                began = time.monotonic()
                if not any(self._work_on(number) for number in self._open_rounds()):
                    self._run.preemption.check()
                    time.sleep(self._poll_seconds)
                    self.statistics.idle_seconds += time.monotonic() - began
                self._count()
                stage.update(self.statistics.units, trajectories=self.statistics.trajectories)

    def _open_rounds(self) -> list[int]:
        names = self._run.store.names("rounds/")
        rounds = {int(name.split("/")[1]): set() for name in names}
        for name in names:
            rounds[int(name.split("/")[1])].add(name.rpartition("/")[2])
        return sorted(number for number, files in rounds.items() if "plan.json" in files and DONE not in files)

    def _work_on(self, number: int) -> bool:
        """Play one unit of this round, if one is left that nobody plays."""
        run, store = self._run, self._run.store
        plan = store.read_json(f"rounds/{number:04d}/plan.json")
        if plan["policy_version"] not in store.policies():
            return False
        shards = self._shards(plan)
        firsts = first_attempts(run, number, shards)
        there = {name for name in store.names(f"rounds/{number:04d}/") if name.endswith(".parquet")}
        if missing := [unit for unit in firsts if shard_name(number, unit.index) not in there]:
            return self._play_one(number, missing, plan["policy_version"])
        if self._firsts[0] != number:
            self._firsts = number, [trajectory for unit in firsts for trajectory in _read(run, number, unit)]
        sampled = self._firsts[1]
        k = next_threshold(
            config_of(run), plan["previous_threshold"], mean_first_attempt_reward(sampled), run.reward.best
        )
        later = later_attempts(run, number, shards, sampled, k)
        missing = [unit for unit in later if shard_name(number, unit.index) not in there and unit.has_work()]
        return self._play_one(number, missing, plan["policy_version"])

    def _shards(self, plan: dict[str, Any]) -> list[list[Question]]:
        unknown = [name for shard in plan["shards"] for name in shard if name not in self._questions]
        if unknown:
            raise UserError(
                f"the round's plan names the question {unknown[0]}, which the task {self._run.task.name} does not have "
                "here: give this worker the data that the trainer has"
            )
        return [[self._questions[name] for name in shard] for shard in plan["shards"]]

    def _play_one(self, number: int, units: Sequence[Unit], version: int) -> bool:
        """Each worker begins its search elsewhere, so that they do not all ask for the same one."""
        start = hash(self._leases.owner) % max(1, len(units))
        for unit in [*units[start:], *units[:start]]:
            lease = self._leases.claim(f"rounds/{number:04d}/leases/{unit.index:05d}")
            if lease is None:
                continue
            began = time.monotonic()
            self._run.preemption.enter(f"round {number}: sampling unit {unit.index}", kept="finished units are kept")
            self._run.on_poll = lease.renew
            try:
                self._use(version)
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

    def _use(self, version: int) -> None:
        """The committed policy of this version, read from the run directory."""
        if version != self._version:
            self._run.use_policy(PhaseState(_nothing), version)
            self._version = version

    def _count(self) -> None:
        counted = self._run.store.io_statistics.summary()
        self.statistics.store_operations = int(counted["reads"] + counted["writes"])
        self.statistics.takeovers = self._leases.takeovers


def _read(run: Run, number: int, unit: Unit) -> list[Trajectory]:
    entry = run.store.find_shard(number, unit.index)
    assert entry is not None, "an object that exists stays"
    return run.store.read_shard(entry)


def _nothing() -> Any:
    raise AssertionError("a worker has no state to train: its policies are committed ones")
