"""Work that the hosts of a job share: each plays a part with its own engine and leaves it in the
store.

What a unit of work gives does not depend on who plays it (`run.Run.sample_waves`), so the number of
hosts changes only who does what. With one process nothing of this happens.
"""

import itertools
from collections.abc import Callable, Sequence

from mujica_jax.agents.agent import OnEpisode
from mujica_jax.records import Trajectory
from mujica_jax.report.progress import Progress
from mujica_jax.runtime import distributed
from mujica_jax.storage.run_directory import RunDirectory
from mujica_jax.trajectories import shards

Unit = Callable[[OnEpisode], object]  # plays its episodes, passes each on and leaves a shard


def play_share(progress: Progress, name: str, units: Sequence[Unit]) -> None:
    """Returns when all units are in the store: this process has played its part of them, and the
    others theirs."""
    if distributed.processes() == 1:
        return
    own = distributed.shard_for_process(units)
    with progress.stage(f"{name}, the share of this host", total=len(own), unit="shards") as stage:
        for number, unit in enumerate(own, start=1):
            unit(lambda trajectory: None)
            stage.update(number)
    distributed.barrier(name)


def gather(store: RunDirectory, name: str, own: Sequence[Trajectory]) -> Sequence[Trajectory]:
    """The trajectories of all processes, in the order in which `distributed.shard_for_process`
    dealt them out."""
    if distributed.processes() == 1:
        return own
    count = distributed.processes()
    files = [
        f"eval/parts/{name.replace(' ', '-')}-{number}-of-{count}.parquet"
        for number in range(count)
    ]
    store.create(files[distributed.process()], shards.encode(own))
    distributed.barrier(f"{name} is evaluated")
    parts = [shards.decode(store.read(file), file) for file in files]
    return [t for dealt in itertools.zip_longest(*parts) for t in dealt if t is not None]
