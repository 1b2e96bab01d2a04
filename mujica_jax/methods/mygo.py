"""MyGO: minimalist policy gradient optimisation (Mujica-MyGO paper, section 3.3 and appendix D).

A round samples trajectories for its questions from the current policy, keeps those whose reward
beats a threshold, and maximises their likelihood: no advantages, no ratios, no reference model. The
threshold follows the policy:

    K := max(K', (r_mean / r_sup + 1) / 2 * r_sup)

with r_mean the mean reward of the round's first attempts and r_sup the best reward there is
(`trajectories.select` says how the printed formula is read). A question is tried until m
trajectories are kept or `max_attempts` are spent; each kept planner conversation brings the
conversations of its workers along as rows of their own.

`schedule` says which policy samples a round. Online: the newest one. Asynchronous: round n + 1 is
sampled before round n is learnt, by the policy that round n - 1 left, so that both can go on at
once. Offline: the warm-up's, all rounds before the first is learnt. The stages and the units of
work are the same, in another order; each trajectory says which policy sampled it.

K begins at `initial_threshold`, which the paper chooses for each data set. Offline K stays there in
all rounds, as in appendix E of the paper's first version. `threshold` says otherwise: `rising` lets
K follow the policy offline too, `fixed` keeps it in every schedule. A K that is fixed at 0 is
rejection-sampling fine-tuning.

Differences from the paper, all of them:

- Its printed threshold lacks the factor one half and would accept nothing; a reward of r_sup passes
  where K = r_sup.
- The paper does not print the values at which K begins. Ours is 0 unless `initial_threshold` says
  otherwise.
- A trajectory whose planner conversation repeats one that is kept for its question is not kept, and
  does not count towards m.
- Attempts after the first come in waves of 1, 2, 4, ... for all questions of a shard that lack kept
  ones, so that the engine's batch stays full; what a wave samples beyond m is left out.
- The reward is the one that the configuration names (`rewards`); the paper's is F1.
- Rows of earlier rounds and of the warm-up's correct trajectories are replayed at a stated share,
  and a round may learn its rows in several epochs (`epochs`; the paper does not say how many).
- Conversations are packed and every trained token of a batch weighs the same, so a long
  conversation weighs more than a short one. The paper's objective sums over a trajectory; its SFT
  framework averages over tokens as well.
- Adam's moments live on from phase to phase; the learning rate falls along one cosine over all
  rounds, each round on its stretch of it.
- Questions are taken in the task's fixed order, from the beginning again when all are used; the
  paper draws 20,000 once.
- A turn that a length limit cut carries no loss. A turn ends at its closing tag or where the model
  begins to write an observation of its own (`agents/protocol.py`); the paper does not say how turns
  end.
- A conversation longer than a training row is left out, and counted.
"""

import collections
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence

import numpy as np

from mujica_jax.agents.agent import Attempt, OnEpisode
from mujica_jax.config.methods import MygoConfig
from mujica_jax.learning.packing import PackedRows, pack, too_long
from mujica_jax.learning.trainer import steps_of_epochs
from mujica_jax.methods.supervised import begin, with_control
from mujica_jax.records import Conversation, Question, Trajectory
from mujica_jax.report.progress import Stage
from mujica_jax.runs import evaluation, learning, mismatch, sampling
from mujica_jax.runs.learning import LearningPlan
from mujica_jax.runs.phases import Phase, PhaseCost, PhaseResult, PhaseState, tokens_of
from mujica_jax.runs.round_statistics import advice, in_words, round_statistics
from mujica_jax.runs.run import Run, method_of
from mujica_jax.runs.versions import commit_policy, use_policy
from mujica_jax.runtime import distributed
from mujica_jax.trajectories.select import (
    accepts,
    mean_first_attempt_reward,
    select,
    threshold,
    training_rows,
)
from mujica_jax.trajectories.store import SUMMARY, ShardEntry

# Rounds that are sampled before one is learnt. Offline samples all of them.
ROUNDS_AHEAD = {"online": 0, "asynchronous": 1}


def mygo(run: Run) -> list[PhaseResult]:
    """Run the warm-up, all rounds, and the control if it is asked for.

    Finished phases are read from the run directory.
    """
    state, warmed_up, demonstrations = begin(run, replayed=True)
    rounds = _run_rounds(run, state, demonstrations.rewarded)
    return with_control(run, state, demonstrations, warmed_up, rounds)


def _run_rounds(
    run: Run, warm_state: PhaseState, rewarded: Sequence[Conversation]
) -> list[PhaseResult]:
    """Run MyGO's rounds and return the result of each.

    `warm_state` is what the warm-up ends with. `rewarded` holds the warm-up's rows with the best
    reward, for the replay.

    A round has four steps: sample, select, learn and commit. After a restart each step finds its
    stored result, so calling this function again resumes the run.
    """
    config = method_of(run, MygoConfig)
    sampler = RoundSampler(run, warm_state)
    state = warm_state
    replay = list(rewarded)
    results: list[PhaseResult] = []

    for number in range(1, config.rounds + 1):
        phase = Phase(name=f"round {number}", step=number)
        cost = PhaseCost(start_time=time.monotonic())

        # Sample: play each question until enough trajectories beat K or the attempts run out.
        sampled = sampler.sample(number)
        cost.trajectories = len(sampled.trajectories)
        cost.forward_tokens = tokens_of(sampled.trajectories)

        # Select: keep the trajectories above K, at most `keep_per_question` of each question.
        selected = select_trajectories(run, number, sampled)
        cost.accepted = len(selected.trajectories)

        # Learn: maximise the likelihood of their rows, mixed with replayed older ones.
        steps = 0
        if selected.rows:
            packed = _pack_with_replay(run, number, selected.rows, replay)
            plan = _learning_plan(run, number, packed)
            state = learning.train(run, phase.name, state, packed, plan=plan)
            steps = plan.steps
        else:
            reason = _why_nothing_is_learnt(run, sampled, selected)
            run.progress.line(f"{phase.name}: {reason}")
        replay += selected.rows
        sampler.add_policy(state)

        # Commit: save the policy, evaluate it, and log the round.
        commit_policy(run, state, version=number)
        cost.trained_slots = steps * run.config.trainer.tokens_per_step
        results.append(evaluation.finish(run, phase, state, cost))
        run.metrics.write("mygo", number, {**selected.figures, "steps": steps})

    return results


# --- sample ---


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampledRound:
    """All trajectories of a round, and the threshold K that follows from its first attempts."""

    trajectories: list[Trajectory]
    threshold: float
    version: int  # of the policy that sampled


class RoundSampler:
    """Samples rounds in their order, as far ahead of learning as the schedule says.

    It carries the threshold from round to round, and knows the policy of every round learnt.
    """

    def __init__(self, run: Run, warm_state: PhaseState) -> None:
        self._run = run
        self._config = method_of(run, MygoConfig)
        self._states = [warm_state]  # by the version of their policies
        self._rounds_ahead = ROUNDS_AHEAD.get(self._config.schedule, self._config.rounds)
        self._threshold = self._config.initial_threshold
        self._waiting: collections.deque[SampledRound] = collections.deque()  # not yet learnt

    def add_policy(self, state: PhaseState) -> None:
        """Add the policy that the newest round leaves."""
        self._states.append(state)

    def sample(self, round_number: int) -> SampledRound:
        """Return a round, after it and the rounds that belong before its learning are sampled."""
        first = round_number + len(self._waiting)
        last = min(round_number + self._rounds_ahead, self._config.rounds)
        has_workers = self._run.config.sampling.workers == "external"

        for number in range(first, last + 1):
            # A round ahead is only planned where workers sample: they begin with it, and it is
            # waited for when its turn comes.
            if number > round_number and has_workers:
                plan_round(self._run, number, self._version(number), self._threshold)
                break
            self._sample_one(number)

        return self._waiting.popleft()

    def _sample_one(self, number: int) -> None:
        """Sample a round, carry its threshold on, and compare the engine with the trainer."""
        version = self._version(number)
        state = self._states[version]
        sampled = sample_round(
            self._run, state, number, version=version, previous_k=self._threshold
        )
        self._threshold = sampled.threshold
        self._waiting.append(sampled)
        mismatch.compare(self._run, state, sampled.trajectories, number, version)

    def _version(self, number: int) -> int:
        """Return the version of the policy that samples a round."""
        return max(0, number - 1 - self._rounds_ahead)


def sample_round(
    run: Run, state: PhaseState, number: int, *, version: int, previous_k: float
) -> SampledRound:
    """Sample a round by the policy of this version, or read what an earlier start sampled.

    The first half of its shards holds first attempts, the second half later ones.
    """
    finished = sampling.finished_round(run, number)
    if finished is not None:
        assert finished.threshold is not None, "a MyGO round is closed with its threshold"
        return SampledRound(
            trajectories=finished.trajectories, threshold=finished.threshold, version=version
        )

    shards = plan_round(run, number, version, previous_k)
    name = f"round {number}: sampling"
    run.preemption.enter(name, kept_text=sampling.KEPT_SHARDS)
    # A finished run is left alone by workers: what is damaged there is sampled here.
    has_workers = run.config.sampling.workers == "external" and not run.store.exists(SUMMARY)
    if has_workers:
        run.progress.line(
            f"round {number} waits for workers: python -m mujica_jax.sample --run "
            f"{run.store.root}, on any machine"
        )
    else:
        use_policy(run, state, version)

    with sampling.sampling_stage(run, name, number, total=2 * len(shards), unit="shards") as stage:
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

    sampling.close_round(run, number, player.entries, mean_reward=mean_reward, threshold=k)
    return SampledRound(trajectories=player.trajectories, threshold=k, version=version)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unit:
    """One shard's worth of episodes."""

    index: int  # of its shard
    # Plays the episodes, or reads those that were played.
    play: Callable[[OnEpisode], tuple[ShardEntry | None, list[Trajectory]]]
    has_work: Callable[[], bool] = lambda: True


class _RoundPlayer:
    """Plays the units of a round, collects what they leave, and shows the acceptance meanwhile.

    With `has_workers` other programs play the units, and their shards are waited for.
    """

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
            sampling.play_share(
                self._run.progress,
                f"round {self._number}: {name}",
                [unit.play for unit in units],
            )
        for unit in units:
            if self._has_workers and unit.has_work():
                entry, trajectories = sampling.await_shard(
                    self._run, self._number, unit.index, self._on_episode
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
        attempts = [sampling.attempt(run, question, 0, number) for question in shards[index]]
        return sampling.play_attempts(run, number, index, attempts, on_episode)

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
    leaves nothing in the store.
    """

    def next_wave(index: int, earlier: Sequence[Trajectory]) -> list[Attempt]:
        pairs = next_attempts(
            method_of(run, MygoConfig),
            shards[index],
            [*first_attempts_of(index), *earlier],
            k=k,
            best_reward=run.reward.best,
        )
        return [sampling.attempt(run, question, place, number) for question, place in pairs]

    def play(index: int, on_episode: OnEpisode) -> tuple[ShardEntry | None, list[Trajectory]]:
        shard = len(shards) + index
        return sampling.play_waves(
            run, number, shard, functools.partial(next_wave, index), on_episode
        )

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
    shard_size = run.config.sampling.questions_per_shard
    questions = run.task.questions("train")
    count = sampling.questions_a_round(run, f"round {number}")

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
    (`trajectories.select`). Waves double: after n attempts, a question gets n more.
    """
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


# --- select ---


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selection:
    """The trajectories that a round keeps for learning."""

    trajectories: list[Trajectory]
    rows: list[Conversation]  # their conversations, as far as they fit a training row
    figures: dict[str, float | int]  # of the round, for metrics.jsonl


def select_trajectories(run: Run, number: int, sampled: SampledRound) -> Selection:
    """Keep the trajectories above the threshold, and print the statistics of the round."""
    config = method_of(run, MygoConfig)
    kept_trajectories = select(
        sampled.trajectories,
        k=sampled.threshold,
        keep_per_question=config.keep_per_question,
        best_reward=run.reward.best,
    )
    statistics = round_statistics(
        sampled.trajectories, kept_trajectories, best_reward=run.reward.best
    )
    policy_lag = number - 1 - sampled.version  # versions behind the newest policy
    sampled_by = ""
    if config.schedule != "online":
        sampled_by = f", sampled by policy {sampled.version}, {policy_lag} behind"
    run.progress.line(
        f"round {number}: K {sampled.threshold:.3f}, {in_words(statistics)}{sampled_by}"
    )

    conversations = training_rows(kept_trajectories)
    rows = learning.rows_that_fit(run, conversations)
    row_figures = {
        "policy_lag": policy_lag,
        "rows": len(rows),
        "too_long": too_long(conversations, run.config.trainer.sequence_length),
    }
    figures = {"k": sampled.threshold, **statistics, **row_figures}
    return Selection(trajectories=kept_trajectories, rows=rows, figures=figures)


def _why_nothing_is_learnt(run: Run, sampled: SampledRound, selected: Selection) -> str:
    """Return the sentence for a round without a training row.

    Either nothing beat K, or all conversations that were kept are too long.
    """
    num_sampled = len(sampled.trajectories)
    k = sampled.threshold
    if not selected.trajectories:
        return (
            f"no trajectory of {num_sampled} beat K = {k:.3f}; the policy stays as it is. "
            f"{advice(sampled.trajectories)}"
        )
    lengths = [len(row.token_ids) for row in training_rows(selected.trajectories)]
    return (
        f"{len(selected.trajectories)} of {num_sampled} trajectories beat K = {k:.3f}, and none of "
        f"their {len(lengths)} conversations fits trainer.sequence_length "
        f"{run.config.trainer.sequence_length}, the shortest has {min(lengths)} tokens; the policy "
        "stays as it is. Raise trainer.sequence_length, or lower agent.max_trajectory_tokens"
    )


# --- learn ---


def _pack_with_replay(
    run: Run, number: int, rows: Sequence[Conversation], replay: Sequence[Conversation]
) -> PackedRows:
    """Pack the round's rows with older ones.

    The older rows are `replay` times as many as the round's, drawn without replacement.
    """
    random = np.random.default_rng((run.config.seed, number))
    count = min(len(replay), round(method_of(run, MygoConfig).replay * len(rows)))
    older_rows: list[Conversation] = []
    if count:
        places = sorted(random.choice(len(replay), count, replace=False))
        older_rows = [replay[place] for place in places]
    with run.clock.stage("packing"):
        return pack(
            [*rows, *older_rows],
            sequence_length=run.config.trainer.sequence_length,
            seed=run.config.seed + number,
        )


def _learning_plan(run: Run, number: int, packed: PackedRows) -> LearningPlan:
    """Return the round's updates: its epochs, on its stretch of the cosine over all rounds."""
    config = method_of(run, MygoConfig)
    return LearningPlan(
        steps=steps_of_epochs(packed.num_rows, run.config.trainer.batch_size, config.epochs),
        peak=config.learning_rate,
        end_value=config.end_learning_rate,
        stretch=((number - 1) / config.rounds, number / config.rounds),
    )
