"""Sample: play episodes in units of work, and store their trajectories in the run directory.

A unit of work is the set of episodes that are stored together in one shard. Its result depends only
on its attempts and on the policy. It therefore does not matter which process plays the unit, on
which host, or after how many restarts. A unit is played once. A process that needs its
trajectories later reads the shard. When all units of a round are played, `DONE.json` lists the
round's shards.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence

from mujica_jax.agents.agent import (
    Agent,
    Attempt,
    EnginePolicy,
    EpisodeHooks,
    OnEpisode,
    run_episodes,
)
from mujica_jax.errors import StoreError
from mujica_jax.records import Question, Trajectory
from mujica_jax.report.progress import Progress, Stage
from mujica_jax.runs.phases import SAMPLING
from mujica_jax.runs.run import Run
from mujica_jax.runtime import distributed
from mujica_jax.storage.run_directory import RunDirectory
from mujica_jax.trajectories import shards
from mujica_jax.trajectories.store import ShardEntry, shard_name

# Seconds between two checks for a shard that another program samples.
AWAIT_SECONDS = 0.5
KEPT_SHARDS = "finished shards are kept, and the current shard is sampled again"

# A function that plays the episodes of a unit, calls its argument with each trajectory, and stores
# the shard.
Unit = Callable[[OnEpisode], object]


# --- units of work ---


def play_attempts(
    run: Run,
    round_number: int,
    shard: int,
    attempts: Sequence[Attempt],
    on_episode: OnEpisode,
    *,
    agent: Agent | None = None,
    concurrency: int | None = None,
) -> tuple[ShardEntry, list[Trajectory]]:
    """Play a unit of work and store its shard, or read the shard if it is already stored.

    `on_episode` is called with each trajectory. `agent` plays the episodes (None: the run's agent).
    `concurrency` is the number of episodes that are played at the same time (None:
    `engine.max_num_seqs`).
    """

    def next_wave(played: Sequence[Trajectory]) -> Sequence[Attempt]:
        """Return all attempts at the first call, and none at the second."""
        return () if played else attempts

    entry, trajectories = play_waves(
        run,
        round_number,
        shard,
        next_wave,
        on_episode,
        agent=agent,
        concurrency=concurrency,
    )
    assert entry is not None, "a unit of work needs at least one attempt"
    return entry, trajectories


def play_waves(
    run: Run,
    round_number: int,
    shard: int,
    wave: Callable[[Sequence[Trajectory]], Sequence[Attempt]],
    on_episode: OnEpisode,
    *,
    agent: Agent | None = None,
    concurrency: int | None = None,
) -> tuple[ShardEntry | None, list[Trajectory]]:
    """Play a unit of work in waves, where later attempts depend on the results of earlier ones.

    `wave` takes the unit's trajectories so far and returns the attempts of the next wave. If it
    returns none, the unit is over. For the other arguments see `play_attempts`.

    The engine's cache is cleared first, so that the result depends only on the attempts and the
    policy. For the same reason a preempted unit is played again from its beginning. The missing
    episodes alone would run in other batches, where floating-point rounding differs.

    Returns the shard's entry and its trajectories as they are stored, because another process may
    have stored the shard first. The entry is None if there was nothing to play.
    """

    def play() -> list[Trajectory]:
        trajectories: list[Trajectory] = []
        while attempts := wave(trajectories):
            trajectories += asyncio.run(
                run_episodes(
                    agent or run.agent,
                    attempts,
                    run.task.environment,
                    EnginePolicy(run.generator),
                    reward=run.reward.at(round_number),
                    concurrency=concurrency or run.config.engine.max_num_seqs,
                    hooks=EpisodeHooks(play=run.faults.play, on_episode=on_episode, poll=run.poll),
                )
            )
        return trajectories

    return read_or_play(run, round_number, shard, play, on_episode)


def read_or_play(
    run: Run,
    round_number: int,
    shard: int,
    play: Callable[[], list[Trajectory]],
    on_read: OnEpisode = lambda trajectory: None,
) -> tuple[ShardEntry | None, list[Trajectory]]:
    """Read a unit of work from its shard, or call `play` and store the shard.

    Returns the shard's entry with the stored trajectories. `on_read` is called with each trajectory
    that was read instead of played.
    """
    entry = intact_shard(run, round_number, shard)
    if entry is not None:
        trajectories = run.store.read_shard(entry)
        for trajectory in trajectories:
            on_read(trajectory)
        return entry, trajectories
    run.generator.reset_cache()
    trajectories = play()
    if not trajectories:
        return None, []
    with run.clock.stage("saving"):
        entry = run.store.write_shard(round_number, shard, trajectories)
        return entry, run.store.read_shard(entry)


def await_shard(
    run: Run, round_number: int, shard: int, on_episode: OnEpisode
) -> tuple[ShardEntry, list[Trajectory]]:
    """Wait until another program has stored a unit of work, and return its entry and trajectories.

    A damaged shard is set aside, and the wait continues.
    """
    entry = intact_shard(run, round_number, shard)
    while entry is None:
        run.preemption.check()
        time.sleep(AWAIT_SECONDS)
        entry = intact_shard(run, round_number, shard)
    trajectories = run.store.read_shard(entry)
    for trajectory in trajectories:
        on_episode(trajectory)
    return entry, trajectories


def read_shards(run: Run, entries: Sequence[ShardEntry]) -> list[Trajectory] | None:
    """Return the trajectories of a finished round.

    Returns None if a shard is damaged or missing: the round has to be sampled again in part.
    """
    trajectories: list[Trajectory] = []
    is_intact = True
    for entry in entries:
        try:
            trajectories += run.store.read_shard(entry)
        except StoreError as damage:
            _set_aside(run, entry.name, damage)
            is_intact = False
    return trajectories if is_intact else None


def intact_shard(run: Run, round_number: int, shard: int) -> ShardEntry | None:
    """Return the entry of a stored shard; None if it is missing or damaged.

    A damaged shard is set aside.
    """
    try:
        return run.store.find_shard(round_number, shard)
    except StoreError as damage:
        _set_aside(run, shard_name(round_number, shard), damage)
        return None


def _set_aside(run: Run, name: str, damage: StoreError) -> None:
    """Move a damaged shard out of its round, and say so on the console."""
    reason = run.store.quarantine(name, str(damage))
    run.progress.line(
        f"{name} is damaged and will be sampled again; the damaged file is kept in "
        f"{reason.parent}. {damage}"
    )


# --- units of a job with several hosts ---


def play_share(progress: Progress, name: str, units: Sequence[Unit]) -> None:
    """Play this process's part of the units, and wait until all processes have played theirs.

    Afterwards all units are in the store. If the job has only one process, this does nothing: the
    caller plays the units.
    """
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
    """Return the trajectories of all processes, in the order that the work had at first.

    `distributed.shard_for_process` divided the work among the processes. Each process stores its
    own trajectories in a file, waits for the others, and reads all files. `name` is part of the
    files' names.
    """
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


# --- rounds ---


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinishedRound:
    """The trajectories of a round that an earlier start of the run finished sampling.

    `threshold` is the round's K; None if the method has no threshold.
    """

    trajectories: list[Trajectory]
    threshold: float | None


def attempt(run: Run, question: Question, number: int, round_number: int) -> Attempt:
    """Return an attempt at a question, with the round's seed and the sampling temperature.

    `number` counts the attempts at this question in the round, from 0.
    """
    return Attempt(
        question=question,
        number=number,
        seed=1000 * run.config.seed + round_number,
        temperature=run.config.sampling.temperature,
    )


def questions_a_round(run: Run, name: str) -> int:
    """Return how many questions a round samples.

    This is `sampling.questions_per_round`, or the number of training questions if that is smaller.
    In the second case a line on the console says so. It begins with `name`.
    """
    configured = run.config.sampling.questions_per_round
    available = len(run.task.questions("train"))
    if available < configured:
        run.progress.line(
            f"{name}: sampling.questions_per_round is {configured}, but there are only {available} "
            "training questions; the round uses all of them"
        )
    return min(configured, available)


@contextlib.contextmanager
def sampling_stage(run: Run, name: str, number: int, *, total: int, unit: str) -> Iterator[Stage]:
    """Show the progress of sampling a round, and write the round's line of sampling metrics.

    `total` is the number of units to do, and `unit` is what they are called on the console.
    """
    stage = run.progress.stage(name, total=total, unit=unit, live=run.counters.figures)
    with run.counted(SAMPLING, number), stage as shown:
        yield shown


def finished_round(run: Run, number: int) -> FinishedRound | None:
    """Return the trajectories of a round that was already sampled.

    Returns None if the round is not finished, or if one of its shards is damaged.
    """

    def read() -> FinishedRound | None:
        done = run.store.read_done(number)
        if done is None:
            return None
        trajectories = read_shards(run, done.shards)
        if trajectories is None:
            return None
        return FinishedRound(trajectories=trajectories, threshold=done.threshold)

    return distributed.primary_first(f"round {number} is read", read)


def close_round(
    run: Run,
    number: int,
    entries: Sequence[ShardEntry],
    *,
    mean_reward: float,
    threshold: float | None = None,
) -> None:
    """Mark a round as sampled. The mark lists its shards, mean reward and threshold."""
    if not distributed.is_primary():
        return
    # Write the metrics first: a restart skips a marked round, and would not write them again.
    run.metrics.flush()
    run.store.write_done(number, entries, mean_reward=mean_reward, threshold=threshold)
