"""Train with MyGO (Mujica-MyGO paper, section 3.3 and appendix D).

MyGO is short for minimalist policy gradient optimisation. In each round the policy samples
trajectories for a batch of training questions. The round keeps the trajectories whose reward is
above a threshold K, and the policy maximises their likelihood. There are no advantages, no
probability ratios and no reference model. The threshold rises with the policy:

    K := max(K', (r_mean / r_sup + 1) / 2 * r_sup)

K' is the threshold of the round before. r_mean is the mean reward of the round's first attempts.
r_sup is the best possible reward. `trajectories.select` explains how we read the printed formula.

The policy tries a question until m trajectories are kept (`keep_per_question`) or `max_attempts`
attempts are used up. In the agent Mujica a planner asks sub-questions, and a worker answers each of
them from search results. A kept trajectory therefore becomes several conversations to learn: the
planner's, and one for each worker.

Variables with the name `rows` hold these conversations, each as one object. `PackedRows` are what
the trainer reads: rows of `trainer.sequence_length` tokens. Each packed row holds several whole
conversations.

`schedule` decides which policy samples a round:

- `online`: the newest policy, which has learnt all rounds before.
- `asynchronous`: the policy one round older. Round n + 1 is sampled before round n is learnt, so
  that sampling and learning can run at the same time.
- `offline`: the policy after the warm-up. It samples all rounds before the first one is learnt.

The schedules run the same stages in a different order. Each trajectory records the version of the
policy that sampled it.

`threshold` decides how K moves from its start at `initial_threshold`. With `rising` it follows the
formula. With `fixed` it never changes; a K fixed at 0 turns MyGO into rejection-sampling
fine-tuning. The default `auto` means `fixed` for the offline schedule, as in appendix E of the
paper's first version, and `rising` for the others.

All differences from the paper:

- The paper prints the threshold without the factor one half. With that formula K would exceed
  r_sup, and no trajectory would be kept. A trajectory that earns r_sup is always kept, also when
  K = r_sup.
- The paper chooses a starting value of K for each data set and does not print these values. Ours
  is 0 unless `initial_threshold` sets another value.
- A trajectory is dropped if another kept trajectory of the question has the same planner
  conversation. It does not count towards m.
- After the first attempts, the questions of a shard that still need trajectories are tried in waves
  of 1, 2, 4, ... attempts. Waves keep the engine's batch full. Good trajectories beyond m are
  dropped.
- The paper's reward is F1. Ours is the reward that the configuration names (`rewards`).
- A round also replays conversations of earlier rounds and of the warm-up's correct trajectories
  (`replay`).
- A round may learn its rows in several epochs (`epochs`). The paper does not say how many it uses.
- Conversations are packed into rows, and every trained token of a batch has the same weight. A long
  conversation therefore weighs more than a short one. The paper's objective sums over a trajectory,
  but its SFT framework averages over tokens as well.
- Adam's moments carry over from phase to phase. The learning rate follows one cosine over all
  rounds.
- The paper draws 20,000 questions once. We take questions in the task's fixed order and start again
  at the beginning when all are used.
- The paper does not say how turns end. Ours end at their closing tag, or where the model begins to
  write an observation itself (`agents/protocol.py`). A turn that a length limit cut off carries no
  loss.
- A conversation that is longer than a training row is left out and counted.
"""

import collections
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence

import numpy as np

from mujica_jax.agents.agent import Attempt, OnEpisode
from mujica_jax.config.methods import MygoConfig
from mujica_jax.learning.losses.loss import named_loss
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
from mujica_jax.runs.selection import record_selection
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

# How many rounds beyond the current one are sampled before it is learnt. The offline schedule
# samples all rounds first.
ROUNDS_AHEAD = {"online": 0, "asynchronous": 1}


def mygo(run: Run) -> list[PhaseResult]:
    """Run the warm-up, all rounds, and the control run if `eval.control` asks for it.

    Return one result for each of these phases. Phases that an earlier start of this run finished
    are read from the run directory.
    """
    # Rounds replay demonstrations. `replayed` therefore asks for them even if `warmup.steps` is 0,
    # provided that a script can play them.
    state, warmed_up, demonstrations = begin(run, replayed=True)
    # `rewarded` are the demonstrations with the best reward. Rounds replay no others, because some
    # demonstrations fail on purpose (`warmup.miss_rate`).
    rounds = _run_rounds(run, state, demonstrations.rewarded)
    return with_control(run, state, demonstrations, warmed_up, rounds)


def _run_rounds(
    run: Run, warm_state: PhaseState, rewarded: Sequence[Conversation]
) -> list[PhaseResult]:
    """Run MyGO's rounds and return the result of each.

    `warm_state` is the training state after the warm-up. `rewarded` holds the conversations of the
    warm-up's demonstrations that earn the best reward. Every round may replay some of them.

    A round has four steps: sample, select, learn and commit. Each step stores its result in the run
    directory. After a restart this function is called again, and each step reads the result that is
    already there.
    """
    config = method_of(run, MygoConfig)
    sampler = RoundSampler(run, warm_state)
    # Calling `state` returns the weights and the optimizer's moments after the newest phase.
    state = warm_state
    replay = list(rewarded)
    results: list[PhaseResult] = []

    for number in range(1, config.rounds + 1):
        phase = Phase(name=f"round {number}", step=number)
        cost = PhaseCost(start_time=time.monotonic())

        # Sample: try each question until enough of its trajectories beat the threshold K, or its
        # attempts run out. Each trajectory arrives with its reward.
        sampled = sampler.sample(number)
        cost.trajectories = len(sampled.trajectories)
        # These tokens and `trained_slots` decide how much computation the control run gets.
        cost.forward_tokens = tokens_of(sampled.trajectories)

        # Select: keep the trajectories that beat K, at most `keep_per_question` for each question.
        # `selected.rows` are their conversations.
        selected = select_trajectories(run, number, sampled)
        record_selection(run, number, sampled.trajectories, selected.trajectories)
        cost.accepted = len(selected.trajectories)

        # Learn: pack these conversations and replayed older ones into training rows, and maximise
        # their likelihood. If no trajectory was kept, the policy does not change in this round.
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

        # Commit: save the policy in the run directory, evaluate it on held-out questions, and log
        # the round.
        commit_policy(run, state, version=number)
        cost.trained_slots = steps * run.config.trainer.tokens_per_step
        results.append(evaluation.finish(run, phase, state, cost))
        run.metrics.write("mygo", number, {**selected.figures, "steps": steps})

    return results


# --- sample ---


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampledRound:
    """All trajectories of a round, and the threshold K computed from its first attempts.

    `version` is the version of the policy that sampled the round.
    """

    trajectories: list[Trajectory]
    threshold: float
    version: int


class RoundSampler:
    """The sampler of the rounds, in order. The schedule decides how far it runs ahead of learning.

    The sampler passes the threshold K on from round to round, and keeps the states of all policies
    so far.
    """

    def __init__(self, run: Run, warm_state: PhaseState) -> None:
        self._run = run
        self._config = method_of(run, MygoConfig)
        # The state with index n holds policy version n, the policy after round n. The list takes
        # little memory, because training reuses the buffers of the state that it starts from. If a
        # round is sampled from such a state, `use_policy` loads the committed policy instead.
        self._states = [warm_state]
        self._rounds_ahead = ROUNDS_AHEAD.get(self._config.schedule, self._config.rounds)
        self._threshold = self._config.initial_threshold
        # Rounds that are sampled and not yet learnt, the oldest first.
        self._waiting: collections.deque[SampledRound] = collections.deque()

    def add_policy(self, state: PhaseState) -> None:
        """Add the state after the newest round, so that later rounds can be sampled from it."""
        self._states.append(state)

    def sample(self, round_number: int) -> SampledRound:
        """Return the trajectories of this round.

        If the schedule runs ahead of learning, this call also samples the later rounds that must
        exist before this round is learnt.
        """
        first = round_number + len(self._waiting)
        last = min(round_number + self._rounds_ahead, self._config.rounds)
        has_workers = self._run.config.sampling.workers == "external"

        for number in range(first, last + 1):
            # If external workers sample, a later round is only planned here, so that the workers
            # can begin with it. We wait for its shards when its turn comes.
            if number > round_number and has_workers:
                plan_round(self._run, number, self._version(number), self._threshold)
                break
            self._sample_one(number)

        return self._waiting.popleft()

    def _sample_one(self, number: int) -> None:
        """Sample one round, and remember its threshold for the next one.

        Then check that engine and trainer compute the same log-probabilities for its tokens.
        """
        version = self._version(number)
        state = self._states[version]
        sampled = sample_round(
            self._run, state, number, version=version, previous_k=self._threshold
        )
        self._threshold = sampled.threshold
        self._waiting.append(sampled)
        mismatch.compare(self._run, state, sampled.trajectories, number, version)

    def _version(self, number: int) -> int:
        """Return the version of the policy that samples this round; 0 is the warm-up's policy.

        Version n is the policy after round n. With `online`, round n is sampled by version n - 1,
        and with `asynchronous` by version n - 2, or by 0 if that is negative. With `offline`,
        `_rounds_ahead` is the number of all rounds, so version 0 samples every round.
        """
        return max(0, number - 1 - self._rounds_ahead)


def sample_round(
    run: Run, state: PhaseState, number: int, *, version: int, previous_k: float
) -> SampledRound:
    """Sample a round with the policy in `state`, or read the round if it was sampled before.

    `version` is the version of that policy. `previous_k` is the threshold of the round before. The
    questions of a round are divided into n groups. Shards 0 to n - 1 hold the first attempts, one
    shard for each group. Shards n to 2n - 1 hold the later attempts at the same questions.
    """
    finished = sampling.finished_round(run, number)
    if finished is not None:
        assert finished.threshold is not None, "a finished MyGO round stores its threshold"
        return SampledRound(
            trajectories=finished.trajectories, threshold=finished.threshold, version=version
        )

    shards = plan_round(run, number, version, previous_k)
    name = f"round {number}: sampling"
    run.preemption.enter(name, kept_text=sampling.KEPT_SHARDS)
    # Workers do not touch a finished run. If one of its shards is damaged, this process samples it
    # again.
    has_workers = run.config.sampling.workers == "external" and not run.store.exists(SUMMARY)
    if has_workers:
        run.progress.line(
            f"round {number} waits for sampling workers. Start one or more, on any machine: "
            f"python -m mujica_jax.sample --run {run.store.root}"
        )
    else:
        use_policy(run, state, version)

    with sampling.sampling_stage(run, name, number, total=2 * len(shards), unit="shards") as stage:
        player = _RoundPlayer(run, number, stage, k=previous_k, has_workers=has_workers)

        # First attempts: try every question once. The mean reward gives the round's threshold.
        player.play("first attempts", first_attempts(run, number, shards))
        mean_reward = mean_first_attempt_reward(player.trajectories)
        k = next_threshold(
            method_of(run, MygoConfig), previous_k, mean_reward, best=run.reward.best
        )
        player.k = k

        # Later attempts: try questions again, in waves, until enough of their trajectories beat the
        # threshold.
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
    """A unit of work: the episodes that are stored together in one shard.

    Attributes:
        index: The number of the shard in its round.
        play: Plays the episodes and stores the shard, or reads the shard if it is already stored.
        has_work: Returns whether the unit has any episode to play.
    """

    index: int
    play: Callable[[OnEpisode], tuple[ShardEntry | None, list[Trajectory]]]
    has_work: Callable[[], bool] = lambda: True


class _RoundPlayer:
    """A player of the units of a round, which collects trajectories and counts the accepted ones.

    If `has_workers` is true, other programs play the units, and this one waits for their shards.
    """

    def __init__(self, run: Run, number: int, stage: Stage, *, k: float, has_workers: bool) -> None:
        self._run = run
        self._number = number
        self._stage = stage
        self._has_workers = has_workers
        self._num_episodes = 0
        self._num_accepted = 0
        self._num_units = 0
        # The threshold that the display of accepted episodes uses. It starts as the threshold of
        # the round before, and is replaced after the first attempts.
        self.k = k
        self.entries: list[ShardEntry] = []
        self.trajectories: list[Trajectory] = []

    def play(self, name: str, units: Sequence[Unit]) -> None:
        """Play these units in order. `name` is shown with the progress."""
        # In a job of several hosts, each host plays its share of the units here and stores their
        # shards. In a job of one host, this call does nothing.
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
                # Read the shard if it is already stored, by `play_share` or by an earlier start.
                # Otherwise play the episodes and store it.
                entry, trajectories = unit.play(self._on_episode)
            if entry is not None:
                self.entries.append(entry)
            self.trajectories.extend(trajectories)
            self._num_units += 1
            self._stage.update(self._num_units)

    def _on_episode(self, trajectory: Trajectory) -> None:
        """Count a finished episode, and show the share of episodes that the threshold accepts."""
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
    """Return one unit for each shard of questions: the first attempts at these questions."""

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
    """Return one unit for each shard of questions: the later attempts at these questions, in waves.

    `first_attempts_of` takes the index of a shard and returns the first attempts at its questions.
    `k` is the round's threshold. If no question of a shard needs later attempts, its unit stores
    nothing.
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
    """Return the threshold K of a round.

    `previous_k` is the threshold of the round before, `mean_reward` the mean reward of the round's
    first attempts, and `best` the best possible reward.
    """
    if config.keeps_threshold:
        return config.initial_threshold
    return threshold(previous_k=previous_k, mean_first_attempt_reward=mean_reward, best_reward=best)


def plan_round(run: Run, number: int, version: int, previous_k: float) -> list[list[Question]]:
    """Choose the round's questions, store the plan of the round, and return the questions by shard.

    Sampling workers read the plan. `version` is the version of the policy that samples the round.
    """
    config = method_of(run, MygoConfig)
    shard_size = run.config.sampling.questions_per_shard
    questions = run.task.questions("train")
    count = sampling.questions_a_round(run, f"round {number}")

    # Take the next questions in the task's order. Start again at the beginning when all are used.
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
    """Return the attempts of the next wave, as pairs of a question and the attempt's number.

    A question is tried again if fewer than m of its trajectories would be kept and it has attempts
    left. A trajectory that repeats another one would not be kept (`trajectories.select`). The waves
    double: a question that was tried n times is tried n more times.
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
    """The trajectories that a round keeps for learning.

    Attributes:
        trajectories: The kept trajectories.
        rows: Their conversations, not packed yet, without those that are longer than a packed row.
        figures: The statistics of the round, for its line of metrics.jsonl.
    """

    trajectories: list[Trajectory]
    rows: list[Conversation]
    figures: dict[str, float | int]


def select_trajectories(run: Run, number: int, sampled: SampledRound) -> Selection:
    """Keep the trajectories that beat the threshold, and print the statistics of the round."""
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
    # How many versions the policy that sampled is behind the newest one.
    policy_lag = number - 1 - sampled.version
    sampled_by = ""
    if config.schedule != "online":
        sampled_by = (
            f"; sampled by policy {sampled.version} (versions behind the newest: {policy_lag})"
        )
    run.progress.line(
        f"round {number}: threshold K {sampled.threshold:.3f}; {in_words(statistics)}{sampled_by}"
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
    """Return the sentence that explains why a round has nothing to learn.

    Either no trajectory beat K, or all conversations of the kept trajectories are too long.
    """
    num_sampled = len(sampled.trajectories)
    k = sampled.threshold
    if not selected.trajectories:
        return (
            f"none of {num_sampled} trajectories beat the threshold K = {k:.3f}, so the policy "
            f"does not change. {advice(sampled.trajectories)}"
        )
    lengths = [len(row.token_ids) for row in training_rows(selected.trajectories)]
    return (
        f"{len(selected.trajectories)} of {num_sampled} trajectories beat the threshold "
        f"K = {k:.3f}, but none of their {len(lengths)} conversations fits "
        f"trainer.sequence_length {run.config.trainer.sequence_length}: the shortest has "
        f"{min(lengths)} tokens. The policy does not change. Raise trainer.sequence_length, or "
        "lower agent.max_trajectory_tokens"
    )


# --- learn ---


def _pack_with_replay(
    run: Run, number: int, rows: Sequence[Conversation], replay: Sequence[Conversation]
) -> PackedRows:
    """Pack the round's conversations, together with replayed older ones, into training rows.

    The number of replayed conversations is `method.replay` times the number of the round's own, if
    there are enough. They are drawn at random without replacement.
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
    """Return how many updates the round makes, and with which learning rates.

    All rounds share one cosine schedule. Each round covers an equal part of it.
    """
    config = method_of(run, MygoConfig)
    return LearningPlan(
        steps=steps_of_epochs(packed.num_rows, run.config.trainer.batch_size, config.epochs),
        peak=config.learning_rate,
        end_value=config.end_learning_rate,
        stretch=((number - 1) / config.rounds, number / config.rounds),
        loss=named_loss(config.loss),
    )
