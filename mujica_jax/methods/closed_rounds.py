"""Rounds whose sampling is over: `DONE.json` lists their shards, and a restart reads these."""

from collections.abc import Sequence

from mujica_jax.methods.run import Run
from mujica_jax.records import Trajectory
from mujica_jax.runtime import distributed
from mujica_jax.trajectories.store import ShardEntry


def finished_round(run: Run, number: int) -> tuple[list[Trajectory], float | None] | None:
    """What an earlier start sampled, and its threshold; None where the round is open."""

    def read() -> tuple[list[Trajectory], float | None] | None:
        done = run.store.read_done(number)
        found = None if done is None else run.read_shards(done.shards)
        return None if done is None or found is None else (found, done.threshold)

    return distributed.primary_first(f"round {number} is read", read)


def close_round(
    run: Run, number: int, entries: Sequence[ShardEntry], *, mean_reward: float, threshold: float | None = None
) -> None:
    if distributed.is_primary():
        run.metrics.flush()  # a resumed run finds the round closed and does not write its line again
        run.store.write_done(number, entries, mean_reward=mean_reward, threshold=threshold)
