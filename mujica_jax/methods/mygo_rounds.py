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
from mujica_jax.methods.phases import PhaseState
from mujica_jax.methods.rounds import (
    attempt,
    close_round,
    finished_round,
    method_of,
    questions_a_round,
    sampling,
)
from mujica_jax.methods.run import KEPT_SHARDS, Run
from mujica_jax.methods.shares import play_share
from mujica_jax.records import Question, Trajectory
from mujica_jax.runtime import distributed
from mujica_jax.trajectories.select import accepts, mean_first_attempt_reward, select, threshold
from mujica_jax.trajectories.store import SUMMARY, ShardEntry


def sample_round(
    run: Run, state: PhaseState, number: int, *, version: int, previous_k: float
) -> tuple[list[Trajectory], float]:
    """All trajectories of a round, by the policy of this version, and its threshold. The first half
    of its shards holds first attempts."""
    earlier = finished_round(run, number)
    if earlier is not None:
        sampled, threshold = earlier
        assert threshold is not None, "a MyGO round is closed with its threshold"
        return sampled, threshold
    shards = plan_round(run, number, version, previous_k)
    run.preemption.enter(f"round {number}: sampling", kept=KEPT_SHARDS)
    # A finished run is left alone by workers: what is damaged there is sampled here.
    external = run.config.sampling.workers == "external" and not run.store.exists(SUMMARY)
    if external:
        run.progress.line(
            f"round {number} waits for workers: python -m mujica_jax.sample --run "
            f"{run.store.root}, on any machine"
        )
    if not external:
        run.use_policy(state, version)
    entries: list[ShardEntry] = []
    trajectories: list[Trajectory] = []
    episodes = accepted = played = 0
    k, best = previous_k, run.reward.best
    with sampling(
        run, f"round {number}: sampling", number, total=2 * len(shards), unit="shards"
    ) as stage:

        def on_episode(trajectory: Trajectory) -> None:
            nonlocal episodes, accepted
            episodes += 1
            accepted += trajectory.is_rewarded and accepts(trajectory.reward, k=k, best_reward=best)
            stage.update(played, k=k, acceptance=accepted / episodes, episodes=episodes)

        def play(name: str, units: Sequence[Unit]) -> None:
            nonlocal played
            if not external:
                play_share(run.progress, f"round {number}: {name}", [unit.play for unit in units])
            for unit in units:
                if external and unit.has_work():
                    entry, found = run.await_shard(number, unit.index, on_episode)
                else:
                    entry, found = unit.play(on_episode)
                if entry is not None:
                    entries.append(entry)
                trajectories.extend(found)
                played += 1
                stage.update(played)

        play("first attempts", first_attempts(run, number, shards))
        mean_reward = mean_first_attempt_reward(trajectories)
        k = next_threshold(method_of(run, MygoConfig), previous_k, mean_reward, best)
        firsts = {trajectory.question_id: trajectory for trajectory in trajectories}
        of_shard = [[firsts[question.id] for question in shard] for shard in shards]
        play("later attempts", later_attempts(run, number, shards, of_shard.__getitem__, k))
    close_round(run, number, entries, mean_reward=mean_reward, threshold=k)
    return trajectories, k


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unit:
    """One shard's worth of episodes."""

    index: int  # of its shard
    play: Callable[
        [OnEpisode], tuple[ShardEntry | None, list[Trajectory]]
    ]  # or read what was played
    has_work: Callable[[], bool] = lambda: True


def first_attempts(run: Run, number: int, shards: Sequence[Sequence[Question]]) -> list[Unit]:
    def play(index: int, callback: OnEpisode) -> tuple[ShardEntry, list[Trajectory]]:
        return run.sample(
            number, index, [attempt(run, q, 0, number) for q in shards[index]], callback
        )

    return [Unit(index=index, play=functools.partial(play, index)) for index in range(len(shards))]


def later_attempts(
    run: Run,
    number: int,
    shards: Sequence[Sequence[Question]],
    first_attempts_of: Callable[[int], Sequence[Trajectory]],
    k: float,
) -> list[Unit]:
    """`first_attempts_of`: those at the questions of a shard. Of a shard that needs no others
    nothing is left in the store."""

    def wave(index: int, earlier: Sequence[Trajectory]) -> list[Attempt]:
        tried = [*first_attempts_of(index), *earlier]
        following = next_attempts(
            method_of(run, MygoConfig), shards[index], tried, k=k, best_reward=run.reward.best
        )
        return [attempt(run, question, place, number) for question, place in following]

    def play(index: int, callback: OnEpisode) -> tuple[ShardEntry | None, list[Trajectory]]:
        return run.sample_waves(
            number, len(shards) + index, functools.partial(wave, index), callback
        )

    def unit(index: int) -> Unit:
        played = functools.partial(play, index)
        return Unit(index=len(shards) + index, play=played, has_work=lambda: bool(wave(index, [])))

    return [unit(index) for index in range(len(shards))]


def next_threshold(config: MygoConfig, previous_k: float, mean_reward: float, best: float) -> float:
    if config.keeps_threshold:
        return config.initial_threshold
    return threshold(previous_k=previous_k, mean_first_attempt_reward=mean_reward, best_reward=best)


def plan_round(run: Run, number: int, version: int, previous_k: float) -> list[list[Question]]:
    """The round's questions by shard, written down."""
    config, size = method_of(run, MygoConfig), run.config.sampling.shard_questions
    questions, count = run.task.questions("train"), questions_a_round(run, f"round {number}")
    # The next ones in the task's order, from the beginning again when they are used up.
    chosen = [
        questions[index % len(questions)] for index in range((number - 1) * count, number * count)
    ]
    shards = [chosen[at : at + size] for at in range(0, count, size)]
    plan = {
        "policy_version": version,
        "shards": [[question.id for question in shard] for shard in shards],
        "previous_threshold": previous_k,
        "max_attempts": config.max_attempts,
        "keep_per_question": config.keep_per_question,
    }
    if distributed.is_primary():
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
    """Questions with the numbers of their next attempts: those with fewer than m kept trajectories,
    while attempts are left.

    A trajectory counts if it would be kept, so one that repeats another does not
    (`trajectories.select`). Waves double: with `tried` attempts behind them, questions get as many
    again."""
    m = config.keep_per_question
    tried = 1 + max(trajectory.attempt for trajectory in trajectories)
    kept = collections.Counter(
        trajectory.question_id
        for trajectory in select(trajectories, k=k, keep_per_question=m, best_reward=best_reward)
    )
    return [
        (question, number)
        for question in questions
        if kept[question.id] < m
        for number in range(tried, min(2 * tried, config.max_attempts))
    ]
