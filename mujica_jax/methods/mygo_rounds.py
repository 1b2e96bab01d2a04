"""A round of MyGO's sampling: its questions in shards, first attempts, the threshold, later
attempts in waves.

Every unit of work is a function of its attempts and the policy, so a round can be read back, gone
on with, or sampled by several processes. The rule of the threshold and of what is kept stands in
`trajectories.select`. Called by `mygo`.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Sequence

from mujica_jax.agents.agent import Attempt, OnEpisode
from mujica_jax.config.schema import MygoConfig
from mujica_jax.records import Question, Trajectory
from mujica_jax.report.progress import Stage
from mujica_jax.runs.phases import PhaseState
from mujica_jax.runs.run import KEPT_SHARDS, Run
from mujica_jax.runs.sampling import (
    attempt,
    close_round,
    finished_round,
    method_of,
    questions_a_round,
    sampling,
)
from mujica_jax.runs.shares import play_share
from mujica_jax.runtime import distributed
from mujica_jax.trajectories.select import accepts, mean_first_attempt_reward, select, threshold
from mujica_jax.trajectories.store import SUMMARY, ShardEntry


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampledRound:
    """All trajectories of a round, and the threshold K that follows from its first attempts."""

    trajectories: list[Trajectory]
    threshold: float


def sample_round(
    run: Run, state: PhaseState, number: int, *, version: int, previous_k: float
) -> SampledRound:
    """Sample a round by the policy of this version, or read what an earlier start sampled.

    The first half of its shards holds first attempts, the second half later ones."""
    finished = finished_round(run, number)
    if finished is not None:
        assert finished.threshold is not None, "a MyGO round is closed with its threshold"
        return SampledRound(trajectories=finished.trajectories, threshold=finished.threshold)

    shards = plan_round(run, number, version, previous_k)
    name = f"round {number}: sampling"
    run.preemption.enter(name, kept=KEPT_SHARDS)
    # A finished run is left alone by workers: what is damaged there is sampled here.
    has_workers = run.config.sampling.workers == "external" and not run.store.exists(SUMMARY)
    if has_workers:
        run.progress.line(
            f"round {number} waits for workers: python -m mujica_jax.sample --run "
            f"{run.store.root}, on any machine"
        )
    else:
        run.use_policy(state, version)

    with sampling(run, name, number, total=2 * len(shards), unit="shards") as stage:
        player = _RoundPlayer(run, number, stage, k=previous_k, has_workers=has_workers)

        # First attempts: their mean reward gives the threshold.
        player.play("first attempts", first_attempts(run, number, shards))
        mean_reward = mean_first_attempt_reward(player.trajectories)
        k = next_threshold(
            method_of(run, MygoConfig), previous_k, mean_reward, best=run.reward.best
        )
        player.k = k

        # Later attempts: in waves, while a question lacks trajectories above the threshold.
        trajectory_of = {trajectory.question_id: trajectory for trajectory in player.trajectories}
        firsts_by_shard: list[list[Trajectory]] = []
        for shard in shards:
            firsts_by_shard.append([trajectory_of[question.id] for question in shard])
        player.play(
            "later attempts", later_attempts(run, number, shards, firsts_by_shard.__getitem__, k)
        )

    close_round(run, number, player.entries, mean_reward=mean_reward, threshold=k)
    return SampledRound(trajectories=player.trajectories, threshold=k)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unit:
    """One shard's worth of episodes."""

    index: int  # of its shard
    # Plays the episodes, or reads those that were played.
    play: Callable[[OnEpisode], tuple[ShardEntry | None, list[Trajectory]]]
    has_work: Callable[[], bool] = lambda: True


class _RoundPlayer:
    """Plays the units of a round, collects what they leave, and shows the acceptance meanwhile.

    With `has_workers` other programs play the units, and their shards are waited for."""

    def __init__(self, run: Run, number: int, stage: Stage, *, k: float, has_workers: bool) -> None:
        self._run = run
        self._number = number
        self._stage = stage
        self._has_workers = has_workers
        self._num_episodes = 0
        self._num_accepted = 0
        self._num_units = 0
        self.k = k  # the threshold that episodes are compared with
        self.entries: list[ShardEntry] = []
        self.trajectories: list[Trajectory] = []

    def play(self, name: str, units: Sequence[Unit]) -> None:
        """Play these units, in their order."""
        if not self._has_workers:
            play_share(
                self._run.progress,
                f"round {self._number}: {name}",
                [unit.play for unit in units],
            )
        for unit in units:
            if self._has_workers and unit.has_work():
                entry, trajectories = self._run.await_shard(
                    self._number, unit.index, self._on_episode
                )
            else:
                entry, trajectories = unit.play(self._on_episode)
            if entry is not None:
                self.entries.append(entry)
            self.trajectories.extend(trajectories)
            self._num_units += 1
            self._stage.update(self._num_units)

    def _on_episode(self, trajectory: Trajectory) -> None:
        """Count an episode, and show the share that the threshold accepts."""
        self._num_episodes += 1
        if trajectory.is_rewarded and accepts(
            trajectory.reward, k=self.k, best_reward=self._run.reward.best
        ):
            self._num_accepted += 1
        self._stage.update(
            self._num_units,
            k=self.k,
            acceptance=self._num_accepted / self._num_episodes,
            episodes=self._num_episodes,
        )


def first_attempts(run: Run, number: int, shards: Sequence[Sequence[Question]]) -> list[Unit]:
    """Return a unit for each shard: the first attempts at its questions."""

    def play(index: int, on_episode: OnEpisode) -> tuple[ShardEntry, list[Trajectory]]:
        attempts = [attempt(run, question, 0, number) for question in shards[index]]
        return run.sample(number, index, attempts, on_episode)

    return [Unit(index=index, play=functools.partial(play, index)) for index in range(len(shards))]


def later_attempts(
    run: Run,
    number: int,
    shards: Sequence[Sequence[Question]],
    first_attempts_of: Callable[[int], Sequence[Trajectory]],
    k: float,
) -> list[Unit]:
    """Return a unit for each shard: the later attempts at its questions, in waves.

    `first_attempts_of` returns the first attempts of a shard. A shard that needs no later attempts
    leaves nothing in the store."""

    def next_wave(index: int, earlier: Sequence[Trajectory]) -> list[Attempt]:
        pairs = next_attempts(
            method_of(run, MygoConfig),
            shards[index],
            [*first_attempts_of(index), *earlier],
            k=k,
            best_reward=run.reward.best,
        )
        return [attempt(run, question, place, number) for question, place in pairs]

    def play(index: int, on_episode: OnEpisode) -> tuple[ShardEntry | None, list[Trajectory]]:
        shard = len(shards) + index
        return run.sample_waves(number, shard, functools.partial(next_wave, index), on_episode)

    def has_work(index: int) -> bool:
        return bool(next_wave(index, []))

    return [
        Unit(
            index=len(shards) + index,
            play=functools.partial(play, index),
            has_work=functools.partial(has_work, index),
        )
        for index in range(len(shards))
    ]


def next_threshold(config: MygoConfig, previous_k: float, mean_reward: float, best: float) -> float:
    """Return the threshold of a round, from the one before and the mean of the first attempts."""
    if config.keeps_threshold:
        return config.initial_threshold
    return threshold(previous_k=previous_k, mean_first_attempt_reward=mean_reward, best_reward=best)


def plan_round(run: Run, number: int, version: int, previous_k: float) -> list[list[Question]]:
    """Return the round's questions by shard, and write them down."""
    config = method_of(run, MygoConfig)
    shard_size = run.config.sampling.shard_questions
    questions = run.task.questions("train")
    count = questions_a_round(run, f"round {number}")

    # The next ones in the task's order, from the beginning again when they are used up.
    chosen = [
        questions[index % len(questions)] for index in range((number - 1) * count, number * count)
    ]
    shards = [chosen[start : start + shard_size] for start in range(0, count, shard_size)]

    if distributed.is_primary():
        question_ids = []
        for shard in shards:
            question_ids.append([question.id for question in shard])
        plan = {
            "policy_version": version,
            "shards": question_ids,
            "previous_threshold": previous_k,
            "max_attempts": config.max_attempts,
            "keep_per_question": config.keep_per_question,
        }
        run.store.write_plan(number, plan)
    return shards


def next_attempts(
    config: MygoConfig,
    questions: Sequence[Question],
    trajectories: Sequence[Trajectory],
    *,
    k: float,
    best_reward: float,
) -> list[tuple[Question, int]]:
    """Return questions with the numbers of their next attempts.

    These are the questions with fewer than m kept trajectories, while attempts are left. A
    trajectory counts if it would be kept, so one that repeats another does not count
    (`trajectories.select`). Waves double: after n attempts, a question gets n more."""
    m = config.keep_per_question
    num_tried = 1 + max(trajectory.attempt for trajectory in trajectories)
    kept_trajectories = select(trajectories, k=k, keep_per_question=m, best_reward=best_reward)
    num_kept = collections.Counter(trajectory.question_id for trajectory in kept_trajectories)
    numbers = range(num_tried, min(2 * num_tried, config.max_attempts))
    return [
        (question, number)
        for question in questions
        if num_kept[question.id] < m
        for number in numbers
    ]
