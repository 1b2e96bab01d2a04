"""Train any agent with GRPO or DAPO: policy gradients that compare attempts at the same question.

All attempts at one question are a group. A group teaches something if its rewards differ. One round
has five steps:

1. Sample: play `group_size` attempts at each question of a batch with the current policy.
2. Refill (only with `dynamic_sampling`): drop the groups whose rewards are all equal, and sample
   the next questions in their place. Stop when the batch is full, or when `max_sampled_batches`
   batches of questions were sampled.
3. Compare: compute the advantage of each attempt from its reward and the rewards of its group
   (`losses.policy.group_advantages`).
4. Score: before the policy learns, compute the log-probabilities of the sampled tokens. The
   trainer's values give the importance weights, and the reference policy's values the KL term.
5. Learn: maximise the clipped objective over all conversations of the attempts, in one or several
   updates.

DAPO differs from GRPO in three ways. It samples dynamically. Its upper clip bound is wider. Its
loss is a mean over tokens instead of a mean over conversations.

Every `rounds_per_evaluation` rounds the policy is committed and evaluated. Each evaluation is one
row of the table that the run prints at its end.

Sources: GRPO is from DeepSeekMath (arXiv 2402.03300), and DAPO from arXiv 2503.14476. Both are
applied to agents in "Learning When to Search" (section 3.2) and Mujica-MyGO (section 3.2).

Our own choices, where the papers differ or say nothing:

- All conversations of a trajectory, of the planner and of its workers, carry its advantage.
- If no group teaches anything, the round makes no update. With weight decay and momentum, even an
  update with zero gradient would move the weights.
- Refilling samples one question for each missing group, and repeats this until the batch is full.
  Questions come in the task's order and start again at the beginning when all are used. No question
  comes twice in one round.
- The learning rate follows one cosine over all rounds. Adam's moments carry over from round to
  round.
- If a search or the judge failed during an attempt, the attempt is left out of its group. A group
  with fewer than two attempts left is dropped and counted.
- A turn that a length limit cut off is learnt like any other. A penalty for a long attempt then
  reaches the turn that made it long.
- The KL coefficient is 0 by default, so DAPO has no KL term. "Learning When to Search" says the
  same in its text, but lists 1e-4 in its table 5. Our configuration of the paper's 8B run uses the
  value of the table.
- The reference policy is the policy before the first round. It is loaded from the run directory,
  in the compute type.
- Probability ratios are between policies at temperature 1, also when sampling uses another
  temperature.
- A conversation that is longer than a training row is left out and counted.

If a run is killed, it continues where it stopped. A round stores its shards, its scores
(`scores.npy`), its checkpoint and, when it is over, `LEARNT.json`.
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
from mujica_jax.runs.selection import record_selection
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

# The phase under which metrics.jsonl has one line for each round.
POLICY_GRADIENT = "policy_gradient"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearntRound:
    """The record of a round that is over, as stored in `LEARNT.json`.

    Attributes:
        questions: Number of sampled questions. The next round starts with the question after them.
        trajectories: Number of sampled trajectories.
        learnt: Number of these trajectories that were learnt.
        steps: Number of updates.
        forward_tokens: Number of tokens that went forward through a model, to sample or score them.
        trained_slots: Number of token positions that went forward and backward, padding included.
    """

    questions: int
    trajectories: int
    learnt: int
    steps: int
    forward_tokens: int
    trained_slots: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollout:
    """The samples of a round, ready for learning.

    Attributes:
        trajectories: All sampled trajectories.
        groups: All sampled groups.
        learnt: The groups that are learnt.
        too_long: Number of conversations of learnt groups that are left out because they are longer
            than a row.
        rows: The packed conversations of the learnt groups. The column `advantages` holds the
            advantage of each token's attempt, and `sampled_log_probs` the engine's log-probability
            of each token.
    """

    trajectories: list[Trajectory]
    groups: list[Group]
    learnt: list[Group]
    too_long: int
    rows: PackedRows


def policy_gradient(run: Run) -> list[PhaseResult]:
    """Run the warm-up, all rounds, and the control run if `eval.control` asks for it.

    Return one result for each evaluation. Without a warm-up, the first result is the evaluation of
    the checkpoint that the run starts from. Rounds that an earlier start finished are read from the
    run directory.
    """
    state, warmed_up, demonstrations = begin(run)
    rounds = _run_rounds(run, state)
    return with_control(run, state, demonstrations, warmed_up, rounds)


def _run_rounds(run: Run, state: PhaseState) -> list[PhaseResult]:
    """Run all rounds, and return the results of their evaluations.

    The policy is evaluated after every `rounds_per_evaluation` rounds, and after the last one.
    """
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

        # Commit: save the policy in the run directory, and evaluate it on held-out questions. The
        # phase covers all rounds since the last evaluation.
        commit_policy(run, state, version=number)
        phase = Phase(name=f"round {number}", step=number)
        results.append(evaluation.finish(run, phase, state, cost))
        cost = PhaseCost(start_time=time.monotonic())
    return results


def _run_round(
    run: Run, state: PhaseState, number: int, first_question: int, reference: GetState
) -> tuple[PhaseState, LearntRound]:
    """Run one round, and return the state after it with the record of the round.

    `first_question` is the number of training questions that earlier rounds sampled: the round
    starts with the question after them. `reference` returns the policy that the KL term compares
    with. If an earlier start finished the round, its result is read from the run directory.
    """
    end_file = _end_file(number)
    if distributed.broadcast(end_file, lambda: run.store.exists(end_file)):
        return _finished_round(run, state, number, first_question, reference)

    # Sample and refill: play groups of attempts, until enough groups can be learnt.
    trajectories = _sample_round(run, state, number, first_question)

    # Compare: give each attempt the advantage of its reward over its group. Then check that engine
    # and trainer compute the same log-probabilities for its tokens.
    rollout = compare_attempts(run, trajectories, number)
    learnt_trajectories = [
        trajectory for group in rollout.learnt for trajectory in group.trajectories
    ]
    record_selection(run, number, trajectories, learnt_trajectories)
    mismatch.compare(run, state, trajectories, number, number - 1)

    # Score and learn: weight the sampled tokens, and maximise the clipped objective. If all
    # advantages are zero, there is nothing to learn, and the state stays as it is.
    rows = None
    steps = 0
    next_state = state
    if any(group.teaches for group in rollout.groups):
        rows = _rows_to_learn(run, rollout, state, number, reference)
        plan = _learning_plan(run, rows.num_rows, number)
        next_state = learning.train(run, f"round {number}", state, rows, plan=plan)
        steps = plan.steps

    # Record the round: print what went wrong, log its statistics, and mark it as over.
    _print_problems(run, rollout, number)
    learnt = _summarise_round(run, rollout, steps)
    run.metrics.write(POLICY_GRADIENT, number, {**figures(run, rollout, rows), "steps": steps})
    if distributed.is_primary():
        # Write the metrics before the mark: a restart skips a round that is marked as over.
        run.metrics.flush()
        run.store.write_json_once(end_file, dataclasses.asdict(learnt))
        if steps:
            remove_past_checkpoints(run)
    distributed.barrier(f"round {number} is learnt")
    return next_state, learnt


def _finished_round(
    run: Run, state: PhaseState, number: int, first_question: int, reference: GetState
) -> tuple[PhaseState, LearntRound]:
    """Return the state and the record of a round that an earlier start of the run finished.

    Only the record is read here. The state is restored from the round's checkpoint when it is
    needed. If that checkpoint is damaged, the round's trajectories are read and learnt again.
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
    """Add the cost of a round to the cost of its phase."""
    cost.trajectories += learnt.trajectories
    cost.accepted += learnt.learnt
    cost.forward_tokens += learnt.forward_tokens
    cost.trained_slots += learnt.trained_slots


def _end_file(number: int) -> str:
    """Return the name of the file that marks a round as over and holds its `LearntRound`."""
    return f"rounds/{number:04d}/LEARNT.json"


# --- sample and refill ---


def _sample_round(
    run: Run, state: PhaseState, number: int, first_question: int
) -> list[Trajectory]:
    """Return all trajectories of a round, also of groups that are not learnt.

    If an earlier start sampled the round, its trajectories are read from the run directory.
    """
    finished = sampling.finished_round(run, number)
    if finished is not None:
        return finished.trajectories

    # Plan the round. With dynamic sampling it may sample more questions than it needs groups.
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

    # Sample one question for each group that is missing, until the batch is full or the limit of
    # questions is reached.
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
    """Return one unit of work for each shard of questions: all attempts at these questions.

    A unit is a function that plays its attempts and stores them as one shard. `first_shard` is the
    number of the first of these shards in the round.
    """
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
    """The progress of sampling a round: groups that will be learnt, and episodes that ran."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._num_episodes = 0
        self.num_learnt_groups = 0

    def on_episode(self, trajectory: Trajectory) -> None:
        """Count a finished episode, and show the new number."""
        del trajectory
        self._num_episodes += 1
        self.show()

    def show(self) -> None:
        """Show both numbers."""
        self._stage.update(self.num_learnt_groups, episodes=self._num_episodes)


# --- compare ---


def compare_attempts(run: Run, trajectories: list[Trajectory], number: int) -> Rollout:
    """Turn a round's trajectories into training rows with advantages.

    With dynamic sampling, groups whose rewards are all equal are left out. Without it, as in GRPO,
    they stay: their advantages are zero, but they count in the mean of the loss. A group with fewer
    than two attempts is always left out. Turns that a length limit cut off are learnt like others.
    """
    config = method_of(run, PolicyGradientConfig)
    # Compare: all conversations of an attempt carry the advantage of the attempt over its group.
    groups = compared_groups(config, trajectories)
    learnt_groups = [group for group in groups if is_learnt(config, group)]
    selected: list[Conversation] = []
    # The advantage of each conversation, by the `id` of the conversation object.
    advantage_of: dict[int, float] = {}
    for group in learnt_groups:
        advantages = group_advantages(np.array([group.rewards]))[0]
        for trajectory, advantage in zip(group.trajectories, advantages, strict=True):
            for conversation in policy_gradient_rows(trajectory):
                advantage_of[id(conversation)] = float(advantage)
                selected.append(conversation)

    # Pack the conversations that fit into training rows.
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
    """Group the trajectories by question, with the rewards that learning compares.

    The compared reward is the trajectory's reward plus, if `method.overlong_tokens` is set, a
    negative amount for a trajectory that is too long (`trajectories.select.overlong_punishment`).
    """

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
    """Return whether a group is learnt.

    With dynamic sampling its rewards must differ. Without it, it needs at least two attempts.
    """
    return group.teaches if config.dynamic_sampling else group.is_comparable


# --- score ---


def scored(
    run: Run, rows: PackedRows, state: GetState, number: int, reference: GetState
) -> PackedRows:
    """Return the rows with the columns that the importance weights and the KL term need.

    Each column holds one number for each token. With importance weights, the column
    `importance_weights` is added. The log-probabilities that the trainer computes before the round
    then replace the engine's in `sampled_log_probs`. With a KL term, `reference_log_probs` is
    added.

    The log-probabilities are stored in the round's `scores.npy`, because after a restart in the
    middle of learning neither policy is in memory.
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
        f"{file} has scores of shape {scores.shape[1:]} for rows of shape {rows.tokens.shape}"
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
    """Return the scored rows of a round, with at least as many rows as one update takes.

    If there are fewer, rows of padding are added. Otherwise the update would use some rows twice.
    """
    rows = scored(run, rollout.rows, state, number, reference)
    return rows.with_empty_rows(_trainer_config(run).batch_size)


class _Reference:
    """The reference policy, which is the policy before the first round.

    A call returns its training state. The first call loads it, and it stays in memory.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._state: TrainState | None = None

    def __call__(self) -> TrainState:
        if self._state is None:
            self._state = committed_state(self._run, 0)
        return self._state


# --- learn ---


def _learning_plan(run: Run, num_rows: int, number: int) -> LearningPlan:
    """Return how a round with this many rows is learnt: updates, learning rates and loss."""
    config = method_of(run, PolicyGradientConfig)
    steps = steps_of_epochs(num_rows, _trainer_config(run).batch_size, config.epochs)
    return _learning_plan_of_steps(run, steps, number)


def _learning_plan_of_steps(run: Run, steps: int, number: int) -> LearningPlan:
    """Return how a round with this many updates is learnt: learning rates and loss.

    All rounds share one cosine schedule. Each round covers an equal part of it.
    """
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
    """Return the loss of the configured method, with its coefficients."""
    loss = GRPO if isinstance(config, GrpoConfig) else DAPO
    return loss(
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        importance_weighted=config.importance_cap > 0,
        kl_coefficient=config.kl_coefficient,
    )


def _trainer_config(run: Run) -> TrainerConfig:
    """Return the trainer's configuration, with the batch size of this method.

    The batch size is the number of rows of one update: `method.mini_batch_size` if it is not 0, and
    otherwise `trainer.batch_size`.
    """
    trainer = run.config.trainer
    mini_batch_size = method_of(run, PolicyGradientConfig).mini_batch_size
    return dataclasses.replace(trainer, batch_size=mini_batch_size or trainer.batch_size)


# --- record ---


def _summarise_round(run: Run, rollout: Rollout, steps: int) -> LearntRound:
    """Return the record of a round, with the number of tokens that it cost."""
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
    """Print what went wrong in a round, and which settings to change."""
    config = method_of(run, PolicyGradientConfig)
    num_groups = len(rollout.groups)
    num_teaching = sum(group.teaches for group in rollout.groups)
    num_degenerate = sum(not group.is_comparable for group in rollout.groups)
    num_left_out = sum(group.left_out for group in rollout.groups)
    if num_left_out:
        run.progress.line(
            f"round {number}: a search or the judge failed in {num_left_out} of "
            f"{len(rollout.trajectories)} attempts, which are left out; {num_degenerate} of "
            f"{num_groups} groups have fewer than two attempts left and are dropped"
        )
    if not num_teaching:
        mean = mean_reward(rollout.trajectories)
        run.progress.line(
            f"round {number}: no update, because all attempts at a question earned the same "
            f"reward, at each of {num_groups} questions (mean reward {mean:.3f}). Raise "
            f"method.group_size (now {config.group_size}) or sampling.temperature (now "
            f"{run.config.sampling.temperature}), or start from a policy that sometimes answers "
            "correctly"
        )
    elif config.dynamic_sampling and num_teaching < run.config.sampling.questions_per_round:
        run.progress.line(
            f"round {number}: only {num_teaching} groups have different rewards, and "
            f"sampling.questions_per_round asks for {run.config.sampling.questions_per_round}. "
            f"After {num_groups} questions, the limit of method.max_sampled_batches "
            f"{config.max_sampled_batches} or of the task is reached. The round learns from "
            "these groups"
        )


def figures(run: Run, rollout: Rollout, rows: PackedRows | None) -> dict[str, float | int]:
    """Return the statistics of a round, for its line of metrics.jsonl.

    `rows` are the rows that were learnt; None if the round made no update.
    """
    config = method_of(run, PolicyGradientConfig)
    groups = rollout.groups
    trajectories = rewarded(rollout.trajectories)

    # Find out which attempts of each group answered correctly.
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

    # Add the mean of each part, if the reward consists of several parts.
    part_names: set[str] = set()
    for trajectory in trajectories:
        part_names.update(trajectory.rewards_by_part)
    for name in sorted(part_names):
        rewards = [trajectory.rewards_by_part.get(name, 0.0) for trajectory in trajectories]
        values[f"reward_{name}"] = _mean(rewards)

    # Add the mean of the importance weights, and the share of them that the cap truncated.
    if rows is not None and "importance_weights" in rows.columns:
        weights = rows.columns["importance_weights"][rows.loss_mask]
        is_truncated = weights >= np.float32(config.importance_cap)
        values["mean_importance_weight"] = _mean(weights.tolist())
        values["truncated_share"] = _mean(is_truncated.tolist())
    return values


def _mean(values: Sequence[float]) -> float:
    """Return the mean of the values; 0 if there are none."""
    return float(np.mean(values)) if len(values) else 0.0
