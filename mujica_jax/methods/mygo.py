"""MyGO: minimalist policy gradient optimisation (Mujica-MyGO paper, section 3.3 and appendix D).

A round samples trajectories for its questions from the current policy, keeps those whose reward beats a threshold, and
maximises their likelihood: no advantages, no ratios, no reference model. The threshold follows the policy:

    K := max(K', (r_mean / r_sup + 1) / 2 * r_sup)

with r_mean the mean reward of the round's first attempts and r_sup the best reward there is (`trajectories.select` says
how the printed formula is read). A question is tried until m trajectories are kept or `max_attempts` are spent; each
kept planner conversation brings the conversations of its workers along as rows of their own.

Differences from the paper, all of them:

- Its printed threshold lacks the factor one half and would accept nothing; a reward of r_sup passes where K = r_sup. K
  begins at 0, not at a value chosen for the data set.
- A trajectory whose planner conversation repeats one that is kept for its question is not kept, and does not count
  towards m.
- Attempts after the first come in waves of 1, 2, 4, ... for all questions of a shard that lack kept ones, so that the
  engine's batch stays full; what a wave samples beyond m is left out.
- The reward is the one that the configuration names (`rewards.py`); the paper's is F1.
- Rows of earlier rounds and of the warm-up's correct trajectories are replayed at a stated share, and a round may learn
  its rows in several epochs (`epochs`; the paper does not say how many).
- Conversations are packed and every trained token of a batch weighs the same, so a long conversation weighs more than a
  short one. The paper's objective sums over a trajectory; its SFT framework averages over tokens as well.
- Adam's moments live on from phase to phase; the learning rate falls along one cosine over all rounds, each round on
  its stretch of it.
- Questions are taken in the task's fixed order, from the beginning again when all are used; the paper draws 20,000
  once.
- A turn that a length limit cut carries no loss. A turn ends at its closing tag or where the model begins to write an
  observation of its own (`agents/protocol.py`); the paper does not say how turns end.
- A conversation longer than a training row is left out, and counted.
"""

import collections
import functools
import time
from collections.abc import Callable, Sequence

import numpy as np

from mujica_jax.agents.agent import Attempt
from mujica_jax.config.schema import MygoConfig
from mujica_jax.learning.trainer import steps_of_epochs
from mujica_jax.methods.run import KEPT_SHARDS, SAMPLING, Phase, PhaseResult, PhaseState, Run, tokens_of
from mujica_jax.methods.shares import play_share
from mujica_jax.methods.supervised import run_control, warm_up
from mujica_jax.records import Conversation, Question, Trajectory
from mujica_jax.runtime import distributed
from mujica_jax.trajectories.packing import PackedRows, pack, too_long
from mujica_jax.trajectories.select import accepts, mean_first_attempt_reward, select, threshold, training_rows
from mujica_jax.trajectories.store import ShardEntry

OnEpisode = Callable[[Trajectory], None]


def mygo(run: Run) -> list[PhaseResult]:
    """The warm-up, all rounds, and the control if asked for. Finished phases are read from the run directory."""
    config = _config(run)
    state, warmed, demonstrations = warm_up(run)
    rounds = _run_rounds(run, state, demonstrations.rewarded)
    if not run.config.eval.control:
        return [warmed, *rounds]
    rates = {"peak": config.learning_rate, "end_value": config.end_learning_rate}
    return [warmed, run_control(run, state, demonstrations.rows, rounds, **rates), *rounds]


def _config(run: Run) -> MygoConfig:
    assert isinstance(run.config.method, MygoConfig), f"method {run.config.method.kind} is not run by this file"
    return run.config.method


def _run_rounds(run: Run, state: PhaseState, rewarded: Sequence[Conversation]) -> list[PhaseResult]:
    """From the warmed-up state. `rewarded`: rows of the warm-up with the best reward, for the replay."""
    config = _config(run)
    k = 0.0
    replay = list(rewarded)
    results: list[PhaseResult] = []
    for number in range(1, config.rounds + 1):
        began = time.monotonic()
        phase = Phase(name=f"round {number}", step=number)
        trajectories, k = _sample_round(run, state, number, k)
        run.compare(state, trajectories, number)
        kept = select(trajectories, k=k, keep_per_question=config.keep_per_question, best_reward=run.reward.best)
        selected = training_rows(kept)
        rows = run.fitting(selected)
        with run.clock.stage("packing"):
            packed = _mixture(run, rows, replay, number)
        steps = steps_of_epochs(packed.num_rows, run.config.trainer.rows_per_step, config.epochs) if kept else 0
        if steps:
            state = run.learn(
                phase.name,
                state,
                lambda packed=packed: packed,
                steps=steps,
                peak=config.learning_rate,
                end_value=config.end_learning_rate,
                stretch=((number - 1) / config.rounds, number / config.rounds),
            )
        else:
            run.progress.line(
                f"{phase.name}: no trajectory of {len(trajectories)} beat K = {k:.3f}; the policy stays as it is"
            )
        replay += rows
        run.commit_policy(state, number)
        results.append(
            run.finish_phase(
                phase,
                state,
                began=began,
                trajectories=len(trajectories),
                accepted=len(kept),
                forward_tokens=tokens_of(trajectories),
                trained_slots=steps * run.config.trainer.rows_per_step * run.config.trainer.row_tokens,
            )
        )
        run.metrics.write(
            "mygo",
            number,
            {
                "k": k,
                "mean_reward": mean_first_attempt_reward(trajectories),
                "trajectories": len(trajectories),
                "accepted": len(kept),
                "rows": len(rows),
                "too_long": too_long(selected, run.config.trainer.row_tokens),
                "steps": steps,
            },
        )
    return results


def _mixture(run: Run, rows: Sequence[Conversation], replay: Sequence[Conversation], number: int) -> PackedRows:
    """The round's rows and `replay` times as many older ones, drawn without replacement."""
    draw = np.random.default_rng((run.config.seed, number))
    count = min(len(replay), round(_config(run).replay * len(rows)))
    older = [replay[index] for index in sorted(draw.choice(len(replay), count, replace=False))] if count else []
    return pack([*rows, *older], row_tokens=run.config.trainer.row_tokens, seed=run.config.seed + number)


def _sample_round(run: Run, state: PhaseState, number: int, previous_k: float) -> tuple[list[Trajectory], float]:
    """All trajectories of a round and its threshold. The first half of its shards holds first attempts."""
    earlier = distributed.primary_first(f"round {number} is read", lambda: _finished_round(run, number))
    if earlier is not None:
        return earlier
    shards = _plan_round(run, number, previous_k)
    run.preemption.enter(f"round {number}: sampling", kept=KEPT_SHARDS)
    run.use_policy(state, number - 1)
    entries: list[ShardEntry] = []
    trajectories: list[Trajectory] = []
    episodes = accepted = played = 0
    k, best = previous_k, run.reward.best
    total = 2 * sum(map(len, shards))
    with (
        run.counted(SAMPLING, number),
        run.progress.stage(
            f"round {number}: sampling", total=total, unit="questions", live=run.counters.figures
        ) as stage,
    ):

        def on_episode(trajectory: Trajectory) -> None:
            nonlocal episodes, accepted
            episodes += 1
            accepted += accepts(trajectory.reward, k=k, best_reward=best)
            stage.update(played, k=k, acceptance=accepted / episodes, episodes=episodes)

        def play(name: str, unit: Callable[[int, OnEpisode], tuple[ShardEntry | None, list[Trajectory]]]) -> None:
            nonlocal played
            units = [functools.partial(unit, index) for index in range(len(shards))]
            play_share(run.progress, f"round {number}: {name}", units)
            for shard, played_shard in zip(shards, units, strict=True):
                entry, found = played_shard(on_episode)
                if entry is not None:
                    entries.append(entry)
                trajectories.extend(found)
                played += len(shard)
                stage.update(played)

        def first_attempts(index: int, callback: OnEpisode) -> tuple[ShardEntry, list[Trajectory]]:
            return run.sample(number, index, [_attempt(run, q, 0, number) for q in shards[index]], callback)

        play("first attempts", first_attempts)
        firsts = {trajectory.question_id: trajectory for trajectory in trajectories}
        mean_reward = mean_first_attempt_reward(trajectories)
        k = threshold(previous_k=previous_k, mean_first_attempt_reward=mean_reward, best_reward=best)

        def later_attempts(index: int, callback: OnEpisode) -> tuple[ShardEntry | None, list[Trajectory]]:
            def wave(earlier: Sequence[Trajectory]) -> list[Attempt]:
                tried = [*(firsts[question.id] for question in shards[index]), *earlier]
                following = next_attempts(_config(run), shards[index], tried, k=k, best_reward=best)
                return [_attempt(run, question, attempt, number) for question, attempt in following]

            return run.sample_waves(number, len(shards) + index, wave, callback)

        play("later attempts", later_attempts)
    if distributed.is_primary():
        run.metrics.flush()  # a resumed run finds the round closed and does not write its line again
        run.store.write_done(number, entries, mean_reward=mean_reward, threshold=k)
    return trajectories, k


def _plan_round(run: Run, number: int, previous_k: float) -> list[list[Question]]:
    """The round's questions by shard, written down."""
    config, size = _config(run), run.config.sampling.shard_questions
    questions = _questions_of(run, number)
    shards = [questions[at : at + size] for at in range(0, len(questions), size)]
    plan = {
        "policy_version": number - 1,
        "shards": [[question.id for question in shard] for shard in shards],
        "previous_threshold": previous_k,
        "max_attempts": config.max_attempts,
        "keep_per_question": config.keep_per_question,
    }
    if distributed.is_primary():
        run.store.write_plan(number, plan)
    return shards


def _finished_round(run: Run, number: int) -> tuple[list[Trajectory], float] | None:
    """What an earlier run sampled; None where the round is open."""
    done = run.store.read_done(number)
    found = None if done is None else run.read_shards(done.shards)
    if done is None or found is None:
        return None
    assert done.threshold is not None, "a MyGO round is closed with its threshold"
    return found, done.threshold


def next_attempts(
    config: MygoConfig,
    questions: Sequence[Question],
    trajectories: Sequence[Trajectory],
    *,
    k: float,
    best_reward: float,
) -> list[tuple[Question, int]]:
    """Questions with the numbers of their next attempts: those with fewer than m kept trajectories, while attempts are
    left.

    A trajectory counts if it would be kept, so one that repeats another does not (`trajectories.select`). Waves double:
    with `tried` attempts behind them, questions get as many again.
    """
    m = config.keep_per_question
    tried = 1 + max(trajectory.attempt for trajectory in trajectories)
    kept = collections.Counter(
        trajectory.question_id for trajectory in select(trajectories, k=k, keep_per_question=m, best_reward=best_reward)
    )
    return [
        (question, number)
        for question in questions
        if kept[question.id] < m
        for number in range(tried, min(2 * tried, config.max_attempts))
    ]


def _attempt(run: Run, question: Question, attempt: int, number: int) -> Attempt:
    return Attempt(
        question=question,
        number=attempt,
        seed=1000 * run.config.seed + number,
        temperature=run.config.sampling.temperature,
    )


def _questions_of(run: Run, number: int) -> list[Question]:
    """The questions of a round: the next ones in the task's order, from the beginning again when they are used up."""
    questions = run.task.questions("train")
    per_round = min(run.config.sampling.questions_per_round, len(questions))
    if per_round < run.config.sampling.questions_per_round:
        run.progress.line(
            f"round {number}: all {per_round} training questions; sampling.questions_per_round is "
            f"{run.config.sampling.questions_per_round}"
        )
    start = (number - 1) * per_round
    return [questions[index % len(questions)] for index in range(start, start + per_round)]
