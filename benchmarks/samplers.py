"""How far sampling scales: one trainer and up to a thousand workers over a store, simulated with
measured latencies.

    python benchmarks/samplers.py [--store DIRECTORY|gs://BUCKET/PREFIX] [--unit-seconds 60] [--units 4000]

First the store is measured: the median time of a read, of an object created, and of a listing by
the number of its objects. Then workers are simulated, each as the sequence of store operations that
`methods/mygo_worker.py` makes of a unit, with playing times of --unit-seconds in the mean (lognormal, a
deviation of 0.25) and a trainer that learns for --learn-seconds after each round. Nothing else is
simulated: a store that gets slower under many requests is not. One JSON line a number of workers:
units a minute, the share of the workers' time that is idle or spent on the store, operations a
second and a unit.
"""

import argparse
import dataclasses
import heapq
import json
import random
import statistics
import sys
import time
import uuid
from collections.abc import Callable, Iterator

import numpy as np

from mujica_jax.errors import UserError
from mujica_jax.methods.mygo_worker import LOOKS_A_LEASE, MAX_POLL_SECONDS, POLL_SECONDS, TRIES
from mujica_jax.storage.leases import RENEWALS_A_LEASE
from mujica_jax.storage.run_directory import RunDirectory

LEASE_SECONDS = 60.0
SHARD_BYTES = 400_000
MEASURED_OBJECTS = 200
REPEATS = 15
LATER_SHARE = 0.8  # of a round's shards that have later attempts


@dataclasses.dataclass(frozen=True)
class Latencies:
    """Seconds of each operation of a store."""

    read: float
    create: float
    list_empty: float
    list_object: float  # for each that is listed


def measured(store: RunDirectory) -> Latencies:
    place = f"latencies-{uuid.uuid4().hex[:8]}"

    def median(call: Callable[[int], object]) -> float:
        call_seconds = []
        for number in range(REPEATS):
            start_time = time.perf_counter()
            call(number)
            call_seconds.append(time.perf_counter() - start_time)
        return statistics.median(call_seconds)

    create = median(lambda number: store.create(f"{place}/shards/{number}", b"x" * SHARD_BYTES))
    read = median(lambda number: store.read(f"{place}/shards/{number}"))
    for number in range(MEASURED_OBJECTS):
        store.create(f"{place}/many/{number:04d}", b"{}")
    list_none = median(lambda _: store.names(f"{place}/none/"))
    list_all = median(lambda _: store.names(f"{place}/many/"))
    store.remove_folder(place)
    return Latencies(read, create, list_none, max(0.0, list_all - list_none) / MEASURED_OBJECTS)


@dataclasses.dataclass
class Simulated:
    """The run directory as the workers see it."""

    units: int  # shards of a round with first attempts
    free: list[int] = dataclasses.field(default_factory=list)  # what nobody has a lease on
    # without a shard: of first attempts or, when all of these are there, of later ones
    units_without_shard: int = 0
    later: bool = False
    shards: int = 0
    leased: set[int] = dataclasses.field(default_factory=set)
    # rounds whose threshold somebody wrote down
    thresholds: set[int] = dataclasses.field(default_factory=set)
    number: int = 0  # of the open round
    operations: int = 0
    played: int = 0
    now: float = 0.0  # seconds since the start

    def begin_round(self) -> None:
        self.number += 1
        self.shards = 0
        self.later = False
        self.leased.clear()
        self._begin(range(self.units))

    def lease(self, unit: int) -> None:
        self.leased.add(unit)
        self.free.remove(unit)

    def create_shard(self) -> None:
        self.shards += 1
        self.units_without_shard -= 1
        if not self.units_without_shard and not self.later:
            self.later = True
            self._begin(range(self.units, self.units + int(LATER_SHARE * self.units)))

    def _begin(self, units: range) -> None:
        self.free = list(units)
        self.units_without_shard = len(units)


class Player:
    """Draws the seconds that playing a unit takes, lognormal, and adds them up."""

    def __init__(self, draw: np.random.Generator, mean_seconds: float) -> None:
        self._draw = draw
        self._mean_seconds = mean_seconds
        self.seconds = 0.0

    def play(self) -> float:
        seconds = float(self._mean_seconds * self._draw.lognormal(-(0.25**2) / 2, 0.25))
        self.seconds += seconds
        return seconds


def worker(
    number: int,
    run: Simulated,
    store: Latencies,
    player: Player,
) -> Iterator[float]:
    """Yield the seconds that each next thing takes.

    Operations are those of `Sampler`, in their order.
    """

    def operation(seconds: float, count: int = 1) -> float:
        run.operations += count
        return seconds

    def listing(objects: int) -> float:
        return store.list_empty + objects * store.list_object

    looked = 0.0
    wait = POLL_SECONDS
    draw = random.Random(number)
    while True:
        began_round = run.number
        objects = run.shards + len(run.leased)
        # Read summary.json, the plan and the end of the open round.
        yield operation(3 * store.read, 3)
        # its plan, the policies, its shards
        yield operation(store.read + listing(1) + listing(objects), 3)
        missing = run.units_without_shard
        candidates = draw.sample(run.free, min(TRIES, len(run.free)))
        if missing and run.later:
            if run.number not in run.thresholds:
                run.thresholds.add(run.number)
                # all first attempts
                yield operation(2 * run.units * store.read + store.create, 2 * run.units + 1)
            # Read the threshold.
            yield operation(2 * store.read, 2)
        claimed = None
        for unit in candidates:
            yield operation(store.create)
            # Otherwise another worker was faster.
            if unit not in run.leased and run.number == began_round:
                run.lease(unit)
                claimed = unit
                break
        if claimed is None and missing and run.now - looked > LEASE_SECONDS / LOOKS_A_LEASE:
            looked = run.now
            count = min(TRIES, missing)
            yield operation(count * (store.read + listing(1)), 2 * count)
        if claimed is None:
            yield wait
            wait = min(2 * wait, MAX_POLL_SECONDS)
            continue
        wait = POLL_SECONDS
        seconds = player.play()
        renewals = int(seconds / (LEASE_SECONDS / RENEWALS_A_LEASE))
        yield operation(seconds + renewals * store.create, renewals)
        yield operation(store.create + store.read, 2)
        if run.number == began_round:
            run.create_shard()
        run.played += 1


def simulated(
    workers: int,
    store: Latencies,
    *,
    units: int,
    unit_seconds: float,
    learn_seconds: float,
    rounds: int,
) -> dict[str, float | int]:
    run = Simulated(units)
    run.begin_round()
    player = Player(np.random.default_rng(workers), unit_seconds)
    agents = [worker(number, run, store, player) for number in range(workers)]
    events = [(0.001 * number, number) for number in range(workers)]
    heapq.heapify(events)
    learnt_at = None
    while run.number <= rounds:
        run.now, number = heapq.heappop(events)
        if learnt_at is None and not run.units_without_shard:
            learnt_at = run.now + learn_seconds
        if learnt_at is not None and run.now >= learnt_at:
            learnt_at = None
            run.begin_round()
        heapq.heappush(events, (run.now + next(agents[number]), number))
    return {
        "workers": workers,
        "units_a_minute": round(60 * run.played / run.now, 1),
        "share_of_linear": round(run.played * unit_seconds / (run.now * workers), 3),
        "idle_share": round(1 - player.seconds / (run.now * workers), 3),
        "operations_a_second": round(run.operations / run.now, 1),
        "operations_a_unit": round(run.operations / max(1, run.played), 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="How far sampling by many workers scales.")
    parser.add_argument(
        "--store", default="runs/latencies", help="a directory, or gs://BUCKET/PREFIX"
    )
    parser.add_argument(
        "--latency", type=float, help="seconds of every operation, in the place of measured ones"
    )
    parser.add_argument("--unit-seconds", type=float, default=60.0)
    parser.add_argument(
        "--learn-seconds", type=float, default=0.0, help="between two rounds; 0: asynchronous"
    )
    parser.add_argument(
        "--units", type=int, default=4000, help="shards with first attempts in a round"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 10, 30, 100, 300, 1000])
    arguments = parser.parse_args()
    try:
        latency = arguments.latency
        if latency is None:
            store = measured(RunDirectory(arguments.store))
        else:
            store = Latencies(latency, latency, latency, latency / 1000)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps({name: round(value, 6) for name, value in dataclasses.asdict(store).items()}))
    for workers in arguments.workers:
        figures = simulated(
            workers,
            store,
            units=arguments.units,
            unit_seconds=arguments.unit_seconds,
            learn_seconds=arguments.learn_seconds,
            rounds=arguments.rounds,
        )
        print(json.dumps(figures), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
