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
    """Play this process's part of the units, and wait for the parts of the others.

    All units are in the store then. With one process nothing is played here."""
    if distributed.processes() == 1:
        return
    own_units = distributed.shard_for_process(units)
    with progress.stage(
        f"{name}, the share of this host", total=len(own_units), unit="shards"
    ) as stage:
        for number, unit in enumerate(own_units, start=1):
            unit(lambda trajectory: None)
            stage.update(number)
    distributed.barrier(name)


def gather(
    store: RunDirectory, name: str, own_trajectories: Sequence[Trajectory]
) -> Sequence[Trajectory]:
    """Return the trajectories of all processes.

    They come in the order in which `distributed.shard_for_process` dealt them out."""
    num_processes = distributed.processes()
    if num_processes == 1:
        return own_trajectories
    files = [
        f"eval/parts/{name.replace(' ', '-')}-{process}-of-{num_processes}.parquet"
        for process in range(num_processes)
    ]
    store.create(files[distributed.process()], shards.encode(own_trajectories))
    distributed.barrier(f"{name} is evaluated")

    trajectories_by_process = [shards.decode(store.read(file), file) for file in files]
    trajectories: list[Trajectory] = []
    for dealt in itertools.zip_longest(*trajectories_by_process):
        trajectories += [trajectory for trajectory in dealt if trajectory is not None]
    return trajectories
