"""GRPO and DAPO: policy gradients from groups of attempts, on any agent.

    1. sample   `group_size` attempts at each question of a batch, from the current policy;
    2. refill   (dynamic sampling) groups whose rewards are all equal are left out, and the next
                questions sampled, until the batch is full or `max_sampled_batches` are spent;
    3. compare  an attempt's advantage is its reward against its group
                (`losses.policy.group_advantages`);
    4. score    the trainer's log-probabilities of the sampled tokens, before it learns, for the
                importance weights, and the reference's for the KL term;
    5. learn    the clipped objective of all conversations of the attempts, in several updates.

These five are a round; every `rounds_per_evaluation` rounds the policy is committed and evaluated
(a row of the table). Sources: GRPO, DeepSeekMath (arXiv 2402.03300); DAPO, arXiv 2503.14476; both
on agents, "Learning When to Search", section 3.2, and Mujica-MyGO, section 3.2. What is ours:

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

import numpy as np

from mujica_jax.agents.agent import OnEpisode
from mujica_jax.config.methods import GrpoConfig, PolicyGradientConfig
from mujica_jax.config.schema import TrainerConfig
from mujica_jax.learning.losses.loss import Loss
from mujica_jax.learning.losses.policy import DAPO, GRPO, group_advantages, importance_weights
from mujica_jax.learning.packing import PackedRows, pack, sampled_log_probs, too_long
from mujica_jax.learning.trainer import TrainState, steps_of_epochs
from mujica_jax.methods.supervised import begin, with_control
from mujica_jax.records import Conversation, Question, Trajectory, generated_tokens, rewarded
from mujica_jax.report.progress import Stage
from mujica_jax.runs import evaluation, learning, mismatch, sampling
from mujica_jax.runs.evaluation import right_ones
from mujica_jax.runs.learning import LearningPlan
from mujica_jax.runs.phases import GetState, Phase, PhaseCost, PhaseResult, PhaseState, tokens_of
from mujica_jax.runs.round_statistics import entropy
from mujica_jax.runs.run import Run, method_of
from mujica_jax.runs.versions import (
    commit_policy,
    committed_state,
    remove_past_checkpoints,
    use_policy,
)
from mujica_jax.runtime import distributed
from mujica_jax.trajectories.select import (
    Group,
    groups_of,
    mean_reward,
    overlong_punishment,
    policy_gradient_rows,
)
from mujica_jax.trajectories.store import ShardEntry

POLICY_GRADIENT = "policy_gradient"  # lines of metrics.jsonl


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearntRound:
    """The record of a learnt round: `LEARNT.json`."""

    questions: int  # sampled: the next round begins behind them
    trajectories: int
    learnt: int  # trajectories of them
    steps: int  # updates
    forward_tokens: int  # that went through a model once: sampled, or scored
    trained_slots: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollout:
    """The samples of a round, ready for learning."""

    trajectories: list[Trajectory]
    groups: list[Group]  # all that were sampled
    learnt: list[Group]
    too_long: int  # conversations of those that are learnt, left out because they exceed a row
    rows: PackedRows  # with the columns `advantages` and `sampled_log_probs`, the engine's


def policy_gradient(run: Run) -> list[PhaseResult]:
    """Run the warm-up and all rounds, then the control if it is asked for.

    Without a warm-up, the checkpoint is evaluated as it is. Finished rounds are read from the run
    directory.
    """
    state, warmed_up, demonstrations = begin(run)
    rounds = _run_rounds(run, state)
    return with_control(run, state, demonstrations, warmed_up, rounds)


def _run_rounds(run: Run, state: PhaseState) -> list[PhaseResult]:
    """Run all rounds, and return the result of every `rounds_per_evaluation` rounds."""
    config = method_of(run, PolicyGradientConfig)
    reference = _Reference(run)
    results: list[PhaseResult] = []
    cost = PhaseCost(start_time=time.monotonic())
    first_question = 0

    for number in range(1, config.rounds + 1):
        state, learnt = _run_round(run, state, number, first_question, reference)
        first_question += learnt.questions
        _add_cost(cost, learnt)
        if number % config.rounds_per_evaluation and number < config.rounds:
            continue

        # The phase is complete: commit the policy and evaluate it.
        commit_policy(run, state, version=number)
        phase = Phase(name=f"round {number}", step=number)
        results.append(evaluation.finish(run, phase, state, cost))
        cost = PhaseCost(start_time=time.monotonic())
    return results


def _run_round(
    run: Run, state: PhaseState, number: int, first_question: int, reference: GetState
) -> tuple[PhaseState, LearntRound]:
    """Run one round, whose questions begin with `first_question`.

    `reference` is the policy of the KL term.
    """
    end_file = _end_file(number)
    if distributed.broadcast(end_file, lambda: run.store.exists(end_file)):
        return _finished_round(run, state, number, first_question, reference)

    # Sample, refill and compare.
    trajectories = _sample_round(run, state, number, first_question)
    rollout = compare_attempts(run, trajectories, number)
    mismatch.compare(run, state, trajectories, number, number - 1)

    # Score and learn. Without a group that teaches nothing would be learnt.
    rows = None
    steps = 0
    next_state = state
    if any(group.teaches for group in rollout.groups):
        rows = _rows_to_learn(run, rollout, state, number, reference)
        plan = _learning_plan(run, rows.num_rows, number)
        next_state = learning.train(run, f"round {number}", state, rows, plan=plan)
        steps = plan.steps

    # Write the round down.
    _print_problems(run, rollout, number)
    learnt = _summarise_round(run, rollout, steps)
    run.metrics.write(POLICY_GRADIENT, number, {**figures(run, rollout, rows), "steps": steps})
    if distributed.is_primary():
        run.metrics.flush()  # before the round counts as over: a restart skips it
        run.store.write_json_once(end_file, dataclasses.asdict(learnt))
        if steps:
            remove_past_checkpoints(run)
    distributed.barrier(f"round {number} is learnt")
    return next_state, learnt


def _finished_round(
    run: Run, state: PhaseState, number: int, first_question: int, reference: GetState
) -> tuple[PhaseState, LearntRound]:
    """Return what a round left that an earlier start has finished.

    Nothing else is read of it before its state is called for. Its checkpoint has that state. Only
    where the checkpoint is damaged are its trajectories read, and learnt again.
    """
    learnt = LearntRound(**run.store.read_json(_end_file(number)))
    if not learnt.steps:
        return state, learnt

    def restore() -> TrainState:
        name = f"round {number}"
        plan = _learning_plan_of_steps(run, learnt.steps, number)
        finished_state = learning.finished_state(run, name, plan=plan)
        if finished_state is not None:
            return finished_state
        trajectories = _sample_round(run, state, number, first_question)
        rollout = compare_attempts(run, trajectories, number)
        rows = _rows_to_learn(run, rollout, state, number, reference)
        return learning.train_phase(run, name, state, rows, plan=plan)

    return PhaseState(restore), learnt


def _add_cost(cost: PhaseCost, learnt: LearntRound) -> None:
    """Add what a round took to what its phase took."""
    cost.trajectories += learnt.trajectories
    cost.accepted += learnt.learnt
    cost.forward_tokens += learnt.forward_tokens
    cost.trained_slots += learnt.trained_slots


def _end_file(number: int) -> str:
    """Return the file that says that a round is over, and how it was learnt."""
    return f"rounds/{number:04d}/LEARNT.json"


# --- sample and refill ---


def _sample_round(
    run: Run, state: PhaseState, number: int, first_question: int
) -> list[Trajectory]:
    """Return all trajectories of a round, including those of groups that teach nothing.

    They are sampled, or read where an earlier start sampled them.
    """
    finished = sampling.finished_round(run, number)
    if finished is not None:
        return finished.trajectories

    # Plan the round.
    config = method_of(run, PolicyGradientConfig)
    questions = run.task.questions("train")
    num_groups = sampling.questions_a_round(run, f"round {number}")
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
    run.preemption.enter(name, kept_text=sampling.KEPT_SHARDS)
    use_policy(run, state, number - 1)

    # Sample as many questions as groups are missing, until the batch is full.
    entries: list[ShardEntry] = []
    trajectories: list[Trajectory] = []
    num_asked = 0
    with sampling.sampling_stage(run, name, number, total=num_groups, unit="groups") as stage:
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
            sampling.play_share(
                run.progress, f"round {number}: questions {num_asked} to {end}", units
            )
            for unit in units:
                entry, unit_trajectories = unit(progress.on_episode)
                entries.append(entry)
                trajectories.extend(unit_trajectories)

            groups = compared_groups(config, trajectories)
            progress.num_learnt_groups = sum(is_learnt(config, group) for group in groups)
            progress.show()
            num_asked = end
    sampling.close_round(run, number, entries, mean_reward=mean_reward(trajectories))
    return trajectories


def _group_units(
    run: Run, number: int, questions: Sequence[Question], *, first_shard: int
) -> list[Callable[[OnEpisode], tuple[ShardEntry, list[Trajectory]]]]:
    """Return a unit of work for each shard of questions: all attempts of their groups."""
    group_size = method_of(run, PolicyGradientConfig).group_size
    shard_size = run.config.sampling.questions_per_shard
    units = []
    for start in range(0, len(questions), shard_size):
        attempts = [
            sampling.attempt(run, question, place, number)
            for question in questions[start : start + shard_size]
            for place in range(group_size)
        ]
        units.append(
            functools.partial(
                sampling.play_attempts, run, number, first_shard + len(units), attempts
            )
        )
    return units


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


# --- compare ---


def compare_attempts(run: Run, trajectories: list[Trajectory], number: int) -> Rollout:
    """Turn a round's trajectories into training rows with advantages.

    Groups that teach nothing are left out under dynamic sampling alone: in GRPO they count in its
    mean. A group of fewer than two members is always left out. Turns that a length limit cut are
    learnt like others.
    """
    config = method_of(run, PolicyGradientConfig)
    # Compare: the conversations of an attempt all carry its advantage over its group.
    groups = compared_groups(config, trajectories)
    learnt_groups = [group for group in groups if is_learnt(config, group)]
    selected: list[Conversation] = []
    advantage_of: dict[int, float] = {}  # by the identity of the conversation
    for group in learnt_groups:
        advantages = group_advantages(np.array([group.rewards]))[0]
        for trajectory, advantage in zip(group.trajectories, advantages, strict=True):
            for conversation in policy_gradient_rows(trajectory):
                advantage_of[id(conversation)] = float(advantage)
                selected.append(conversation)

    # Pack the conversations that fit a row.
    conversations = learning.rows_that_fit(run, selected)
    with run.clock.stage("packing"):
        rows = pack(
            conversations,
            sequence_length=run.config.trainer.sequence_length,
            seed=run.config.seed + number,
            columns={
                "advantages": [advantage_of[id(conversation)] for conversation in conversations],
                "sampled_log_probs": sampled_log_probs(conversations),
            },
        )
    return Rollout(
        trajectories=trajectories,
        groups=groups,
        learnt=learnt_groups,
        too_long=too_long(selected, run.config.trainer.sequence_length),
        rows=rows,
    )


def compared_groups(
    config: PolicyGradientConfig, trajectories: Sequence[Trajectory]
) -> list[Group]:
    """Return the groups with the rewards that are compared: overlong trajectories are punished."""

    def reward(trajectory: Trajectory) -> float:
        if not config.overlong_tokens:
            return trajectory.reward
        punishment = overlong_punishment(
            generated_tokens([trajectory]),
            limit_tokens=config.overlong_tokens,
            cache_tokens=config.overlong_cache_tokens,
        )
        return trajectory.reward + punishment

    return groups_of(trajectories, reward)


def is_learnt(config: PolicyGradientConfig, group: Group) -> bool:
    """Return whether a group is learnt: under dynamic sampling only if it teaches something."""
    return group.teaches if config.dynamic_sampling else group.is_comparable


# --- score ---


def scored(
    run: Run, rows: PackedRows, state: GetState, number: int, reference: GetState
) -> PackedRows:
    """Return the rows with the columns that the importance weights and the KL term need.

    They hold what the trainer's policy before the round, and the reference, say of the same tokens.
    Both are stored in the round's `scores.npy`: a restart in the middle of learning has neither
    policy at hand.
    """
    config = method_of(run, PolicyGradientConfig)
    needs_weights = config.importance_cap > 0
    needs_reference = config.kl_coefficient > 0
    policies: list[GetState] = []
    if needs_weights:
        policies.append(state)
    if needs_reference:
        policies.append(reference)
    if not policies:
        return rows

    file = f"rounds/{number:04d}/scores.npy"
    scores = learning.score_once(
        run, file, lambda: np.stack([run.trainer.score(policy(), rows) for policy in policies])
    )
    assert scores.shape[1:] == rows.tokens.shape, (
        f"{file} scores rows {scores.shape[1:]}, not {rows.tokens.shape}"
    )
    if needs_reference:
        rows = rows.with_columns(reference_log_probs=scores[-1])
    if needs_weights:
        trainer_log_probs = scores[0]
        engine_log_probs = rows.columns["sampled_log_probs"]
        weights = importance_weights(trainer_log_probs, engine_log_probs, cap=config.importance_cap)
        rows = rows.with_columns(sampled_log_probs=trainer_log_probs, importance_weights=weights)
    return rows


def _rows_to_learn(
    run: Run, rollout: Rollout, state: GetState, number: int, reference: GetState
) -> PackedRows:
    """Return the scored rows of a round, filled up with rows of padding to one update.

    So none is learnt twice.
    """
    rows = scored(run, rollout.rows, state, number, reference)
    return rows.with_empty_rows(_trainer_config(run).batch_size)


class _Reference:
    """The policy that the rounds began with, loaded once when it is first asked for."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._state: TrainState | None = None

    def __call__(self) -> TrainState:
        if self._state is None:
            self._state = committed_state(self._run, 0)
        return self._state


# --- learn ---


def _learning_plan(run: Run, num_rows: int, number: int) -> LearningPlan:
    """Return the updates of a round with this many rows."""
    config = method_of(run, PolicyGradientConfig)
    steps = steps_of_epochs(num_rows, _trainer_config(run).batch_size, config.epochs)
    return _learning_plan_of_steps(run, steps, number)


def _learning_plan_of_steps(run: Run, steps: int, number: int) -> LearningPlan:
    """Return this many updates, on the round's stretch of the cosine over all rounds."""
    config = method_of(run, PolicyGradientConfig)
    return LearningPlan(
        steps=steps,
        peak=config.learning_rate,
        end_value=config.end_learning_rate,
        stretch=((number - 1) / config.rounds, number / config.rounds),
        loss=loss_of(config),
        trainer=_trainer_config(run),
    )


def loss_of(config: PolicyGradientConfig) -> Loss:
    """Return the loss of a method, with the configured coefficients."""
    loss = GRPO if isinstance(config, GrpoConfig) else DAPO
    return loss(
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        importance_weighted=config.importance_cap > 0,
        kl_coefficient=config.kl_coefficient,
    )


def _trainer_config(run: Run) -> TrainerConfig:
    """Return the trainer's configuration with the rows of an update of this method."""
    trainer = run.config.trainer
    mini_batch_size = method_of(run, PolicyGradientConfig).mini_batch_size
    return dataclasses.replace(trainer, batch_size=mini_batch_size or trainer.batch_size)


# --- write down ---


def _summarise_round(run: Run, rollout: Rollout, steps: int) -> LearntRound:
    """Return what is written down of a round."""
    config = method_of(run, PolicyGradientConfig)
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
        trained_slots=steps * _trainer_config(run).tokens_per_step,
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
            f"the same (on average {mean:.3f}): raise method.group_size "
            f"{config.group_size} or sampling.temperature {run.config.sampling.temperature}, "
            "or begin with a policy that is right now and then"
        )
    elif config.dynamic_sampling and num_teaching < run.config.sampling.questions_per_round:
        run.progress.line(
            f"round {number}: {num_teaching} groups of {run.config.sampling.questions_per_round} "
            f"wanted teach anything after {num_groups} questions, as many as "
            f"method.max_sampled_batches {config.max_sampled_batches} and the task allow; it "
            "learns from these"
        )


def figures(run: Run, rollout: Rollout, rows: PackedRows | None) -> dict[str, float | int]:
    """Return the round's line of metrics.jsonl. `rows` are those that were learnt."""
    config = method_of(run, PolicyGradientConfig)
    groups = rollout.groups
    trajectories = rewarded(rollout.trajectories)

    # Which attempts of each group are right.
    right = right_ones(run.task.questions("train"), trajectories, run.task.rule)
    right_ids = {id(trajectory) for trajectory in right}
    is_right_by_group: list[list[bool]] = []
    for group in groups:
        if group.trajectories:
            is_right_by_group.append(
                [id(trajectory) in right_ids for trajectory in group.trajectories]
            )

    values: dict[str, float | int] = {
        "mean_reward": _mean([trajectory.reward for trajectory in trajectories]),
        "mean_compared_reward": _mean([reward for group in groups for reward in group.rewards]),
        "mean_searches": _mean([len(trajectory.searches) for trajectory in trajectories]),
        "trajectories": len(rollout.trajectories),
        "left_out": len(rollout.trajectories) - len(trajectories),
        "sampled_groups": len(groups),
        "learnt_groups": len(rollout.learnt) if rows else 0,
        "dropped_groups": len(groups) - len(rollout.learnt),
        "equal_groups": sum(group.is_comparable and not group.teaches for group in groups),
        "degenerate_groups": sum(not group.is_comparable for group in groups),
        "all_right_share": _mean([all(is_right) for is_right in is_right_by_group]),
        "all_wrong_share": _mean([not any(is_right) for is_right in is_right_by_group]),
        "entropy_estimate": entropy(trajectories),
        "too_long": rollout.too_long,
    }

    # The parts of a reward, where it has some.
    part_names: set[str] = set()
    for trajectory in trajectories:
        part_names.update(trajectory.rewards_by_part)
    for name in sorted(part_names):
        rewards = [trajectory.rewards_by_part.get(name, 0.0) for trajectory in trajectories]
        values[f"reward_{name}"] = _mean(rewards)

    # The importance weights, where they are used.
    if rows is not None and "importance_weights" in rows.columns:
        weights = rows.columns["importance_weights"][rows.loss_mask]
        is_truncated = weights >= np.float32(config.importance_cap)
        values["mean_importance_weight"] = _mean(weights.tolist())
        values["truncated_share"] = _mean(is_truncated.tolist())
    return values


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0
