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
import time
from collections.abc import Sequence

import numpy as np

from mujica_jax.config.methods import MygoConfig
from mujica_jax.learning.packing import PackedRows, pack, too_long
from mujica_jax.learning.trainer import steps_of_epochs
from mujica_jax.methods.mygo_rounds import SampledRound, plan_round, sample_round
from mujica_jax.methods.supervised import begin, with_control
from mujica_jax.records import Conversation, Trajectory
from mujica_jax.runs.learning import LearningPlan
from mujica_jax.runs.phases import Phase, PhaseResult, PhaseState, tokens_of
from mujica_jax.runs.round_statistics import advice, in_words, round_statistics
from mujica_jax.runs.run import Run
from mujica_jax.runs.sampling import method_of
from mujica_jax.trajectories.select import select, training_rows

# Rounds that are sampled before one is learnt. Offline samples all of them.
ROUNDS_AHEAD = {"online": 0, "asynchronous": 1}


def mygo(run: Run) -> list[PhaseResult]:
    """Run the warm-up, all rounds, and the control if it is asked for.

    Finished phases are read from the run directory."""
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
    stored result, so calling this function again resumes the run."""
    config = method_of(run, MygoConfig)
    trainer = run.config.trainer
    rounds_ahead = ROUNDS_AHEAD.get(config.schedule, config.rounds)
    states = [warm_state]  # by the version of their policies
    sampler = _RoundSampler(run, states, rounds_ahead=rounds_ahead)
    replay = list(rewarded)
    results: list[PhaseResult] = []

    for number in range(1, config.rounds + 1):
        start_time = time.monotonic()
        phase = Phase(name=f"round {number}", step=number)

        # Sample: play each question until enough trajectories beat K or the attempts run out.
        sampled = sampler.sample(number)
        trajectories = sampled.trajectories
        k = sampled.threshold

        # Select: keep the trajectories above K, at most `keep_per_question` of each question.
        policy_lag = min(rounds_ahead, number - 1)
        kept_trajectories, statistics = _select(run, number, sampled, policy_lag=policy_lag)

        # Learn: maximise the likelihood of the rows that fit, mixed with replayed older ones.
        selected_rows = training_rows(kept_trajectories)
        rows = run.fitting(selected_rows)
        with run.clock.stage("packing"):
            packed = _mix_with_replay(run, rows, replay, number)
        steps = 0
        if kept_trajectories:
            steps = steps_of_epochs(packed.num_rows, trainer.rows_per_step, config.epochs)
        state = states[-1]
        if steps:
            state = _learn_round(run, number, state, packed, steps=steps)
        else:
            reason = why_nothing_is_learnt(
                trajectories, kept_trajectories, k=k, row_tokens=trainer.row_tokens
            )
            run.progress.line(f"{phase.name}: {reason}")
        replay += rows
        states.append(state)

        # Commit: save the policy, evaluate it, and log the round.
        run.commit_policy(state, number)
        result = run.finish_phase(
            phase,
            state,
            start_time=start_time,
            trajectories=len(trajectories),
            accepted=len(kept_trajectories),
            forward_tokens=tokens_of(trajectories),
            trained_slots=steps * trainer.rows_per_step * trainer.row_tokens,
        )
        results.append(result)
        row_counts = {
            "policy_lag": policy_lag,
            "rows": len(rows),
            "too_long": too_long(selected_rows, trainer.row_tokens),
            "steps": steps,
        }
        run.metrics.write("mygo", number, {"k": k, **statistics, **row_counts})

    return results


class _RoundSampler:
    """Samples rounds in their order, as far ahead of learning as the schedule says.

    It carries the threshold from round to round. `states` grows while rounds are learnt: its index
    is the version of a policy."""

    def __init__(self, run: Run, states: Sequence[PhaseState], *, rounds_ahead: int) -> None:
        self._run = run
        self._config = method_of(run, MygoConfig)
        self._states = states
        self._rounds_ahead = rounds_ahead
        self._threshold = self._config.initial_threshold
        self._waiting: collections.deque[SampledRound] = collections.deque()  # not yet learnt

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
        self._run.compare(state, sampled.trajectories, number, version)

    def _version(self, number: int) -> int:
        """Return the version of the policy that samples a round."""
        return max(0, number - 1 - self._rounds_ahead)


def _select(
    run: Run, number: int, sampled: SampledRound, *, policy_lag: int
) -> tuple[list[Trajectory], dict[str, float | int]]:
    """Return the trajectories that are learnt and the round's statistics, which are printed.

    `policy_lag` says how many versions the sampling policy is behind the newest one."""
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
    sampled_by = ""
    if config.schedule != "online":
        sampled_by = f", sampled by policy {number - 1 - policy_lag}, {policy_lag} behind"
    run.progress.line(
        f"round {number}: K {sampled.threshold:.3f}, {in_words(statistics)}{sampled_by}"
    )
    return kept_trajectories, statistics


def _learn_round(
    run: Run, number: int, state: PhaseState, packed: PackedRows, *, steps: int
) -> PhaseState:
    """Train on the packed rows of a round, on its stretch of the cosine over all rounds."""
    config = method_of(run, MygoConfig)
    plan = LearningPlan(
        steps=steps,
        peak=config.learning_rate,
        end_value=config.end_learning_rate,
        stretch=((number - 1) / config.rounds, number / config.rounds),
    )
    return run.learn(f"round {number}", state, lambda: packed, plan=plan)


def why_nothing_is_learnt(
    trajectories: Sequence[Trajectory],
    kept_trajectories: Sequence[Trajectory],
    *,
    k: float,
    row_tokens: int,
) -> str:
    """Return the sentence for a round without a training row.

    Either nothing beat K, or all conversations that were kept are too long."""
    if not kept_trajectories:
        return (
            f"no trajectory of {len(trajectories)} beat K = {k:.3f}; the policy stays as it is. "
            f"{advice(trajectories)}"
        )
    num_kept = len(kept_trajectories)
    lengths = [len(row.token_ids) for row in training_rows(kept_trajectories)]
    return (
        f"{num_kept} of {len(trajectories)} trajectories beat K = {k:.3f}, and none of their "
        f"{len(lengths)} conversations fits trainer.row_tokens {row_tokens}, the shortest has "
        f"{min(lengths)} tokens; the policy stays as it is. Raise trainer.row_tokens, or lower "
        "agent.max_trajectory_tokens"
    )


def _mix_with_replay(
    run: Run, rows: Sequence[Conversation], replay: Sequence[Conversation], number: int
) -> PackedRows:
    """Pack the round's rows with older ones.

    The older rows are `replay` times as many as the round's, drawn without replacement."""
    random = np.random.default_rng((run.config.seed, number))
    count = min(len(replay), round(method_of(run, MygoConfig).replay * len(rows)))
    older_rows: list[Conversation] = []
    if count:
        places = sorted(random.choice(len(replay), count, replace=False))
        older_rows = [replay[place] for place in places]
    return pack(
        [*rows, *older_rows],
        row_tokens=run.config.trainer.row_tokens,
        seed=run.config.seed + number,
    )
