"""Sample: play episodes in units of work, and keep what they give in the run directory.

A unit of work is a shard's worth of episodes. It is a function of its attempts and the policy, so
it does not matter who plays it: this start or an earlier one, this host or another one. A shard is
played once, and read wherever it is needed later. `DONE.json` lists the shards of a round that is
over.
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

AWAIT_SECONDS = 0.5  # between two looks for what other programs sample
KEPT_SHARDS = "finished shards are kept and the one under way is sampled again"

# Plays its episodes, passes each on, and leaves a shard.
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
    """Play a unit of work and write its shard, or read the shard that an earlier run left.

    `concurrency` is the number of episodes at a time, where another model than the engine's
    writes.
    """

    def next_wave(played: Sequence[Trajectory]) -> Sequence[Attempt]:
        """Return all attempts, once."""
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
    assert entry is not None, "a unit of work has attempts"
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
    """Play a unit of work whose attempts depend on those before.

    `wave(trajectories so far)` returns the next attempts, or none at the end.

    The engine's slots are emptied first, so that a unit is a function of its attempts and the
    policy alone. For the same reason a preemption keeps nothing of the unit under way: its
    rest, played without the others, would be rounded differently. What is returned is what the
    store holds, because another process may have been first. The entry is None if there was
    nothing to play.
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
    """Read the unit of work that an earlier run left, or play it and return what is stored.

    Each trajectory that is read is passed to `on_read`.
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
    """Wait for a unit of work that another program plays, and read it.

    A damaged one is waited for again.
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

    If a shard is damaged or missing, return None: the round is open again.
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
    """Find a shard in the store. A damaged one is set aside and counts as missing."""
    try:
        return run.store.find_shard(round_number, shard)
    except StoreError as damage:
        _set_aside(run, shard_name(round_number, shard), damage)
        return None


def _set_aside(run: Run, name: str, damage: StoreError) -> None:
    reason = run.store.quarantine(name, str(damage))
    run.progress.line(
        f"{name} is damaged and sampled again; it is kept in {reason.parent}. {damage}"
    )


# --- units that the hosts of a job share ---


def play_share(progress: Progress, name: str, units: Sequence[Unit]) -> None:
    """Play this process's part of the units, and wait for the parts of the others.

    All units are in the store then. With one process nothing is played here.
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
    """Return the trajectories of all processes.

    They come in the order in which `distributed.shard_for_process` dealt them out.
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
    """The samples of a round that an earlier start finished."""

    trajectories: list[Trajectory]
    threshold: float | None  # K, of a method that has one


def attempt(run: Run, question: Question, number: int, round_number: int) -> Attempt:
    """Return one try at a question in a round, with the seed of the round."""
    return Attempt(
        question=question,
        number=number,
        seed=1000 * run.config.seed + round_number,
        temperature=run.config.sampling.temperature,
    )


def questions_a_round(run: Run, name: str) -> int:
    """Return how many questions a round samples.

    It is the configured number. Where there are fewer training questions, it is all of them, and a
    line says so.
    """
    configured = run.config.sampling.questions_per_round
    available = len(run.task.questions("train"))
    if available < configured:
        run.progress.line(
            f"{name}: all {available} training questions; sampling.questions_per_round is "
            f"{configured}"
        )
    return min(configured, available)


@contextlib.contextmanager
def sampling_stage(run: Run, name: str, number: int, *, total: int, unit: str) -> Iterator[Stage]:
    """Show the progress of a round's sampling, in `unit`s, and write its line of metrics."""
    stage = run.progress.stage(name, total=total, unit=unit, live=run.counters.figures)
    with run.counted(SAMPLING, number), stage as shown:
        yield shown


def finished_round(run: Run, number: int) -> FinishedRound | None:
    """Return what an earlier start sampled; None where the round is open."""

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
    """Write down that a round is sampled, and which shards it has."""
    if not distributed.is_primary():
        return
    # A resumed run finds the round closed and does not write its line of metrics again.
    run.metrics.flush()
    run.store.write_done(number, entries, mean_reward=mean_reward, threshold=threshold)
