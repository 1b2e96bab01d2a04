"""GRPO and DAPO: policy gradients from groups of attempts, on any agent.

    1. sample   `group_attempts` attempts at each question of a batch, from the current policy;
    2. refill   (dynamic sampling) groups whose rewards are all equal are left out, and the next
                questions sampled, until the batch is full or `max_sampled_batches` are spent;
    3. compare  an attempt's advantage is its reward against its group
                (`losses.policy.group_advantages`);
    4. score    the trainer's log-probabilities of the sampled tokens, before it learns, for the
                importance weights, and the reference's for the KL term;
    5. learn    the clipped objective of all conversations of the attempts, in several updates.

These five are a round; every `rounds_per_phase` rounds the policy is committed and evaluated (a row
of the table). Sources: GRPO, DeepSeekMath (arXiv 2402.03300); DAPO, arXiv 2503.14476; both on
agents, "Learning When to Search", section 3.2, and Mujica-MyGO, section 3.2. What is ours:

- A planner's and its workers' conversations all carry the advantage of their trajectory.
- Without a group that teaches there is no update at all: with weight decay and momentum an update
  of zero gradient would still move the weights.
- Refilling asks for exactly as many questions as groups are missing, again and again; questions go
  on in the task's order, from the beginning again when all are used, and no question comes twice in
  one round.
- The learning rate falls along one cosine over all rounds, each on its stretch; Adam's moments live
  on.
- An attempt whose search or judge failed is no member of its group. A group with fewer than two
  members left is dropped and counted.
- A turn that a length limit cut is learnt like any other, so what punishes a long attempt reaches
  the turn itself.
- "Learning When to Search" lists a KL coefficient of 1e-4 in its table 5, and its text says that
  DAPO has none. DAPO has none by default (`kl_coefficient` 0); the configuration of the paper's 8B
  run takes the table's.
- The reference is the policy that the rounds began with, as it is committed (in the compute type).
- At a sampling temperature other than 1 the ratio is to the policy without temperature, as
  log-probabilities are.
- A conversation longer than a training row is left out, and counted.

A killed run goes on: a round's shards, its scores (`scores.npy`), its checkpoint and `LEARNT.json`,
which says that the round is over, are each found again.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence

from mujica_jax.agents.agent import OnEpisode
from mujica_jax.config.methods import PolicyGradientConfig
from mujica_jax.config.schema import TrainerConfig
from mujica_jax.learning.packing import PackedRows
from mujica_jax.learning.trainer import TrainState, steps_of_epochs
from mujica_jax.methods.rollouts import (
    Rollout,
    compared_groups,
    figures,
    is_learnt,
    loss_of,
    prepare,
    scored,
)
from mujica_jax.methods.supervised import begin, with_control
from mujica_jax.records import Question, Trajectory
from mujica_jax.report.progress import Stage
from mujica_jax.runs.learning import LearningPlan
from mujica_jax.runs.phases import GetState, Phase, PhaseResult, PhaseState, tokens_of
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
from mujica_jax.trajectories.select import mean_reward
from mujica_jax.trajectories.store import ShardEntry

POLICY_GRADIENT = "policy_gradient"  # lines of metrics.jsonl


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearntRound:
    """What a round left: `LEARNT.json`."""

    questions: int  # sampled: the next round begins behind them
    trajectories: int
    learnt: int  # trajectories of them
    steps: int  # updates
    forward_tokens: int  # that went through a model once: sampled, or scored
    trained_slots: int


def policy_gradient(run: Run) -> list[PhaseResult]:
    """Run the warm-up, or evaluate the checkpoint as it is; then all rounds, and the control if it
    is asked for.

    Finished rounds are read from the run directory."""
    state, warmed_up, demonstrations = begin(run)
    rounds = _run_rounds(run, state)
    return with_control(run, state, demonstrations, warmed_up, rounds)


def _run_rounds(run: Run, state: PhaseState) -> list[PhaseResult]:
    """Run all rounds, and return the result of each phase: of every `rounds_per_phase` rounds."""
    config = method_of(run, PolicyGradientConfig)

    @functools.cache
    def reference() -> TrainState:
        """Load the policy that the rounds began with, once."""
        return run.committed_state(0)

    results: list[PhaseResult] = []
    rounds_of_phase: list[LearntRound] = []
    first_question = 0
    start_time = time.monotonic()
    for number in range(1, config.rounds + 1):
        state, learnt = _run_round(run, state, number, first_question, reference)
        first_question += learnt.questions
        rounds_of_phase.append(learnt)
        if number % config.rounds_per_phase and number < config.rounds:
            continue

        # The phase is complete: commit the policy and evaluate it.
        run.commit_policy(state, number)
        result = run.finish_phase(
            Phase(name=f"round {number}", step=number),
            state,
            start_time=start_time,
            trajectories=sum(learnt.trajectories for learnt in rounds_of_phase),
            accepted=sum(learnt.learnt for learnt in rounds_of_phase),
            forward_tokens=sum(learnt.forward_tokens for learnt in rounds_of_phase),
            trained_slots=sum(learnt.trained_slots for learnt in rounds_of_phase),
        )
        results.append(result)
        rounds_of_phase = []
        start_time = time.monotonic()
    return results


class _RoundData:
    """The rollout of a round and its training rows, each made when it is first asked for.

    `state` is the policy before the round, `first_question` the place of its first question in the
    task's order, and `reference` the policy of the KL term.

    A state holds what made it, and so this too, as long as the run holds the state. `forget` frees
    the memory. What is asked for later is made again."""

    def __init__(
        self,
        run: Run,
        state: PhaseState,
        number: int,
        first_question: int,
        reference: GetState,
    ) -> None:
        self._run = run
        self._state = state
        self._number = number
        self._first_question = first_question
        self._reference = reference
        self._rollout: Rollout | None = None
        self._rows: PackedRows | None = None

    def rollout(self) -> Rollout:
        """Sample the round, or read it, and compare the attempts of each group."""
        if self._rollout is None:
            trajectories = _sample_round(self._run, self._state, self._number, self._first_question)
            config = method_of(self._run, PolicyGradientConfig)
            self._rollout = prepare(self._run, config, trajectories, self._number)
        return self._rollout

    def rows(self) -> PackedRows:
        """Return the scored rows, filled up with rows of padding to one update.

        So none is learnt twice."""
        if self._rows is None:
            scored_rows = scored(
                self._run,
                method_of(self._run, PolicyGradientConfig),
                self.rollout().rows,
                self._state,
                self._number,
                self._reference,
            )
            self._rows = scored_rows.with_empty_rows(_trainer_config(self._run).rows_per_step)
        return self._rows

    def forget(self) -> None:
        """Free the rollout and the rows."""
        self._rollout = None
        self._rows = None


def _run_round(
    run: Run, state: PhaseState, number: int, first_question: int, reference: GetState
) -> tuple[PhaseState, LearntRound]:
    """Run one round, whose questions begin with `first_question`.

    Of a round that is over, nothing is read before its state is called for."""
    config = method_of(run, PolicyGradientConfig)
    trainer = _trainer_config(run)
    end_file = f"rounds/{number:04d}/LEARNT.json"
    data = _RoundData(run, state, number, first_question, reference)

    # A round that is over: how it was learnt stands in its file.
    if distributed.broadcast(end_file, lambda: run.store.exists(end_file)):
        learnt = LearntRound(**run.store.read_json(end_file))
        if learnt.steps:
            state = _learn_round(run, state, number, data, learnt.steps, end_file=end_file)
        return state, learnt

    # Sample, refill and compare.
    rollout = data.rollout()
    run.compare(state, rollout.trajectories, number, number - 1)

    # Score and learn. Without a group that teaches nothing would be learnt.
    steps = 0
    if any(group.teaches for group in rollout.groups):
        num_rows = max(rollout.rows.num_rows, trainer.rows_per_step)
        steps = steps_of_epochs(num_rows, trainer.rows_per_step, config.epochs)
    next_state = state
    if steps:
        next_state = _learn_round(run, state, number, data, steps, end_file=end_file)

    # Write the round down.
    _print_problems(run, rollout, number)
    learnt = _summarise_round(run, rollout, steps)
    round_figures = figures(run, config, rollout, data.rows() if steps else None)
    run.metrics.write(POLICY_GRADIENT, number, round_figures | {"steps": steps})
    if distributed.is_primary():
        run.metrics.flush()  # before the round counts as over: a restart skips it
        run.store.write_json_once(end_file, dataclasses.asdict(learnt))
        if steps:
            run.remove_past_checkpoints()
    distributed.barrier(f"round {number} is learnt")
    data.forget()
    return next_state, learnt


def _learn_round(
    run: Run, state: PhaseState, number: int, data: _RoundData, steps: int, *, end_file: str
) -> PhaseState:
    """Train on the rows of a round, on its stretch of the cosine over all rounds."""
    config = method_of(run, PolicyGradientConfig)
    plan = LearningPlan(
        steps=steps,
        peak=config.learning_rate,
        end_value=config.end_learning_rate,
        stretch=((number - 1) / config.rounds, number / config.rounds),
    )
    return run.learn(
        f"round {number}",
        state,
        data.rows,
        plan=plan,
        loss=loss_of(config),
        config=_trainer_config(run),
        end_file=end_file,
    )


def _trainer_config(run: Run) -> TrainerConfig:
    """Return the trainer's configuration with the rows of an update of this method."""
    trainer = run.config.trainer
    rows_per_update = method_of(run, PolicyGradientConfig).rows_per_update
    return dataclasses.replace(trainer, rows_per_step=rows_per_update or trainer.rows_per_step)


def _summarise_round(run: Run, rollout: Rollout, steps: int) -> LearntRound:
    """Return what is written down of a round."""
    config = method_of(run, PolicyGradientConfig)
    trainer = _trainer_config(run)
    num_learnt = 0
    num_scored_tokens = 0
    if steps:
        num_learnt = sum(len(group.trajectories) for group in rollout.learnt)
        num_scorings = bool(config.importance_cap) + bool(config.kl_coefficient)
        num_scored_tokens = num_scorings * rollout.rows.tokens.size
    return LearntRound(
        questions=len(rollout.groups),
        trajectories=len(rollout.trajectories),
        learnt=num_learnt,
        steps=steps,
        forward_tokens=tokens_of(rollout.trajectories) + num_scored_tokens,
        trained_slots=steps * trainer.rows_per_step * trainer.row_tokens,
    )


def _print_problems(run: Run, rollout: Rollout, number: int) -> None:
    """Print what went wrong in a round, and what to change."""
    config = method_of(run, PolicyGradientConfig)
    num_groups = len(rollout.groups)
    num_teaching = sum(group.teaches for group in rollout.groups)
    num_degenerate = sum(not group.is_comparable for group in rollout.groups)
    num_left_out = sum(group.left_out for group in rollout.groups)
    if num_left_out:
        run.progress.line(
            f"round {number}: {num_left_out} of {len(rollout.trajectories)} attempts are left out "
            f"because a search or the judge failed; {num_degenerate} of {num_groups} groups have "
            "fewer than two attempts left and are dropped"
        )
    if not num_teaching:
        mean = mean_reward(rollout.trajectories)
        run.progress.line(
            f"round {number}: no update, for at each of {num_groups} questions all attempts earned "
            f"the same (on average {mean:.3f}): raise method.group_attempts "
            f"{config.group_attempts} or sampling.temperature {run.config.sampling.temperature}, "
            "or begin with a policy that is right now and then"
        )
    elif config.dynamic_sampling and num_teaching < run.config.sampling.questions_per_round:
        run.progress.line(
            f"round {number}: {num_teaching} groups of {run.config.sampling.questions_per_round} "
            f"wanted teach anything after {num_groups} questions, as many as "
            f"method.max_sampled_batches {config.max_sampled_batches} and the task allow; it "
            "learns from these"
        )


class _SamplingProgress:
    """Shows the groups that are learnt and the episodes of a round while it is sampled."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._num_episodes = 0
        self.num_learnt_groups = 0

    def on_episode(self, trajectory: Trajectory) -> None:
        """Count an episode."""
        del trajectory
        self._num_episodes += 1
        self.show()

    def show(self) -> None:
        """Show both numbers."""
        self._stage.update(self.num_learnt_groups, episodes=self._num_episodes)


def _group_units(
    run: Run, number: int, questions: Sequence[Question], *, first_shard: int
) -> list[Callable[[OnEpisode], tuple[ShardEntry, list[Trajectory]]]]:
    """Return a unit of work for each shard of questions: all attempts of their groups."""
    group_size = method_of(run, PolicyGradientConfig).group_attempts
    shard_size = run.config.sampling.shard_questions
    units = []
    for start in range(0, len(questions), shard_size):
        attempts = [
            attempt(run, question, place, number)
            for question in questions[start : start + shard_size]
            for place in range(group_size)
        ]
        units.append(functools.partial(run.sample, number, first_shard + len(units), attempts))
    return units


def _sample_round(
    run: Run, state: PhaseState, number: int, first_question: int
) -> list[Trajectory]:
    """Return all trajectories of a round, with those of groups that teach nothing.

    They are sampled, or read where an earlier start sampled them."""
    finished = finished_round(run, number)
    if finished is not None:
        return finished.trajectories

    # Plan the round.
    config = method_of(run, PolicyGradientConfig)
    questions = run.task.questions("train")
    num_groups = questions_a_round(run, f"round {number}")
    max_batches = config.max_sampled_batches if config.dynamic_sampling else 1
    max_questions = min(num_groups * max_batches, len(questions))
    if distributed.is_primary():
        plan = {
            "policy_version": number - 1,
            "first_question": first_question,
            "groups": num_groups,
            "max_questions": max_questions,
        }
        run.store.write_plan(number, plan)
    name = f"round {number}: sampling"
    run.preemption.enter(name, kept=KEPT_SHARDS)
    run.use_policy(state, number - 1)

    # Sample as many questions as groups are missing, until the batch is full.
    entries: list[ShardEntry] = []
    trajectories: list[Trajectory] = []
    num_asked = 0
    with sampling(run, name, number, total=num_groups, unit="groups") as stage:
        progress = _SamplingProgress(stage)
        while True:
            num_missing = num_groups - progress.num_learnt_groups
            num_questions = min(num_missing, max_questions - num_asked)
            if num_questions <= 0:
                break
            end = num_asked + num_questions
            batch = [
                questions[(first_question + place) % len(questions)]
                for place in range(num_asked, end)
            ]
            units = _group_units(run, number, batch, first_shard=len(entries))
            play_share(run.progress, f"round {number}: questions {num_asked} to {end}", units)
            for unit in units:
                entry, unit_trajectories = unit(progress.on_episode)
                entries.append(entry)
                trajectories.extend(unit_trajectories)

            groups = compared_groups(config, trajectories)
            progress.num_learnt_groups = sum(is_learnt(config, group) for group in groups)
            progress.show()
            num_asked = end
    close_round(run, number, entries, mean_reward=mean_reward(trajectories))
    return trajectories
