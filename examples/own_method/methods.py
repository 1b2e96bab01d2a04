"""Best-of-n sampling (RAFT, arXiv 2304.06767): learn the best of n attempts at each question.

Each round samples n attempts at each question, selects the one with the highest reward, and
maximises the likelihood of the selected ones. Unlike MyGO, the method has no threshold: whether an
attempt is learnt depends only on the other attempts at the same question.
"""

import dataclasses
import time
from typing import ClassVar, Literal

from mujica_jax.config.bounds import NonNegativeFloat, PositiveFloat, PositiveInt
from mujica_jax.learning.packing import pack
from mujica_jax.learning.trainer import steps_of_epochs
from mujica_jax.methods.supervised import begin, with_control
from mujica_jax.records import Trajectory, rewarded
from mujica_jax.runs import evaluation, learning, sampling
from mujica_jax.runs.learning import LearningPlan
from mujica_jax.runs.phases import Phase, PhaseCost, PhaseResult, tokens_of
from mujica_jax.runs.run import Run, method_of
from mujica_jax.runs.versions import commit_policy, use_policy
from mujica_jax.trajectories.select import training_rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class BestOfNConfig:
    """Best-of-n sampling: learn the best of several attempts at each question."""

    # Method.
    kind: Literal["best_of_n"] = "best_of_n"
    implementation: ClassVar[str] = "examples.own_method.methods:best_of_n"
    # Number of rounds of sampling and learning.
    rounds: PositiveInt = 2
    # Number of attempts at each question (n).
    attempts: PositiveInt = 4
    # Attempts with a lower reward are not learnt, even if they are the best at their question.
    min_reward: NonNegativeFloat = 0.5
    # Learning rate at the start of the first round. It falls along one cosine over all rounds.
    learning_rate: PositiveFloat = 1e-4
    # Learning rate at the end of the last round.
    end_learning_rate: NonNegativeFloat = 1e-5
    # Number of passes over the selected attempts of a round.
    epochs: PositiveInt = 2


def best_of_n(run: Run) -> list[PhaseResult]:
    """Run the warm-up, the rounds and, with `eval.control`, the control run.

    Each function that is called here stores its result in the run directory. After a restart it
    reads that result, so a killed run continues where it stopped.
    """
    config = method_of(run, BestOfNConfig)
    warm_state, first_result, demonstrations = begin(run)
    state = warm_state
    results: list[PhaseResult] = []

    for number in range(1, config.rounds + 1):
        phase = Phase(name=f"round {number}", step=number)
        cost = PhaseCost(start_time=time.monotonic())

        # Sample: play n attempts at each question with the newest policy.
        use_policy(run, state, version=number - 1)
        trajectories = sample_round(run, number, config.attempts)
        cost.trajectories = len(trajectories)
        cost.forward_tokens = tokens_of(trajectories)

        # Select: keep the best attempt at each question.
        best = best_attempts(trajectories, min_reward=config.min_reward)
        rows = learning.rows_that_fit(run, training_rows(best))
        cost.accepted = len(best)

        # Learn: maximise the likelihood of the selected attempts.
        if rows:
            packed = pack(
                rows,
                sequence_length=run.config.trainer.sequence_length,
                seed=run.config.seed + number,
            )
            plan = LearningPlan(
                steps=steps_of_epochs(
                    packed.num_rows, run.config.trainer.batch_size, config.epochs
                ),
                peak=config.learning_rate,
                end_value=config.end_learning_rate,
                stretch=((number - 1) / config.rounds, number / config.rounds),
            )
            state = learning.train(run, phase.name, state, packed, plan=plan)
            cost.trained_slots = plan.steps * run.config.trainer.tokens_per_step
        else:
            run.progress.line(f"{phase.name}: no attempt has a reward of {config.min_reward:g}")

        # Commit: save the policy, and evaluate it on held-out questions.
        commit_policy(run, state, version=number)
        results.append(evaluation.finish(run, phase, state, cost))

    return with_control(run, warm_state, demonstrations, first_result, results)


def sample_round(run: Run, number: int, num_attempts: int) -> list[Trajectory]:
    """Play the attempts of a round, shard by shard. A shard that is stored already is only read."""
    num_questions = sampling.questions_a_round(run, f"round {number}")
    questions = run.task.questions("train")
    start = (number - 1) * num_questions
    chosen = [questions[place % len(questions)] for place in range(start, start + num_questions)]

    shard_size = run.config.sampling.questions_per_shard
    trajectories: list[Trajectory] = []
    for shard, first in enumerate(range(0, num_questions, shard_size)):
        attempts = [
            sampling.attempt(run, question, attempt_number, number)
            for question in chosen[first : first + shard_size]
            for attempt_number in range(num_attempts)
        ]
        _, played = sampling.play_attempts(run, number, shard, attempts, lambda _: None)
        trajectories += played
    return trajectories


def best_attempts(trajectories: list[Trajectory], *, min_reward: float) -> list[Trajectory]:
    """Return the attempt with the highest reward at each question; the first one of equal ones."""
    best: dict[str, Trajectory] = {}
    for trajectory in rewarded(trajectories):
        rival = best.get(trajectory.question_id)
        is_better = rival is None or trajectory.reward > rival.reward
        if trajectory.reward >= min_reward and is_better:
            best[trajectory.question_id] = trajectory
    return list(best.values())
