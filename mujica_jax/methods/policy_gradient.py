"""GRPO and DAPO: policy gradients from groups of attempts, on any agent.

    1. sample   `group_attempts` attempts at each question of a batch, from the current policy;
    2. refill   (dynamic sampling) groups whose rewards are all equal are left out, and the next questions sampled,
                until the batch is full or `max_sampled_batches` are spent;
    3. compare  an attempt's advantage is its reward against its group (`losses.policy.group_advantages`);
    4. score    the trainer's log-probabilities of the sampled tokens, before it learns, for the importance weights,
                and the reference's for the KL term;
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

from mujica_jax.config.methods import PolicyGradientConfig
from mujica_jax.config.schema import TrainerConfig
from mujica_jax.learning.trainer import steps_of_epochs
from mujica_jax.methods.phases import GetState, Phase, PhaseResult, PhaseState, tokens_of
from mujica_jax.methods.rollouts import (
    Rollout,
    compared_groups,
    figures,
    is_learnt,
    loss_of,
    prepare,
    scored,
)
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
from mujica_jax.methods.supervised import begin, with_control
from mujica_jax.records import Trajectory
from mujica_jax.runtime import distributed
from mujica_jax.trajectories.packing import PackedRows
from mujica_jax.trajectories.select import mean_reward
from mujica_jax.trajectories.store import ShardEntry

POLICY_GRADIENT = "policy_gradient"  # lines of metrics.jsonl


@dataclasses.dataclass(frozen=True, kw_only=True)
class Left:
    """What a round left: `LEARNT.json`."""

    questions: int  # sampled: the next round begins behind them
    trajectories: int
    learnt: int  # trajectories of them
    steps: int  # updates
    forward_tokens: int  # that went through a model once: sampled, or scored
    trained_slots: int


def policy_gradient(run: Run) -> list[PhaseResult]:
    """The warm-up, or the checkpoint as it is; all rounds; the control if asked for. Finished
    rounds are read from the run directory."""
    state, warmed, demonstrations = begin(run)
    return with_control(run, state, demonstrations, warmed, _run_rounds(run, state))


def _run_rounds(run: Run, state: PhaseState) -> list[PhaseResult]:
    config = method_of(run, PolicyGradientConfig)
    reference = functools.cache(lambda: run.committed_state(0))
    results: list[PhaseResult] = []
    since: list[Left] = []  # rounds since the last evaluation
    first, began = 0, time.monotonic()
    for number in range(1, config.rounds + 1):
        state, left = _one_round(run, state, number, first, reference)
        first += left.questions
        since.append(left)
        if number % config.rounds_per_phase and number < config.rounds:
            continue
        run.commit_policy(state, number)
        phase = Phase(name=f"round {number}", step=number)
        spent = {
            "trajectories": sum(each.trajectories for each in since),
            "accepted": sum(each.learnt for each in since),
            "forward_tokens": sum(each.forward_tokens for each in since),
            "trained_slots": sum(each.trained_slots for each in since),
        }
        results.append(run.finish_phase(phase, state, began=began, **spent))
        since, began = [], time.monotonic()
    return results


def _one_round(
    run: Run, state: PhaseState, number: int, first: int, reference: GetState
) -> tuple[PhaseState, Left]:
    """Questions from the `first` one on. Of a round that is over, nothing is read before its state
    is called for."""
    config, file = method_of(run, PolicyGradientConfig), f"rounds/{number:04d}/LEARNT.json"
    is_over = distributed.broadcast(file, lambda: run.store.exists(file))
    left = Left(**run.store.read_json(file)) if is_over else None

    @functools.cache
    def rollout() -> Rollout:
        return prepare(run, config, _sample_round(run, state, number, first), number)

    @functools.cache
    def rows() -> PackedRows:
        """Return the round's rows, filled up with rows of padding to one update: none is learnt
        twice."""
        compared = scored(run, config, rollout().rows, state, number, reference)
        return compared.with_empty_rows(_trainer(run).rows_per_step)

    if left is None:
        run.compare(state, rollout().trajectories, number, number - 1)
        teaches = any(group.teaches for group in rollout().groups)  # else nothing would be learnt
        rows_per_step = _trainer(run).rows_per_step
        num_rows = max(rollout().rows.num_rows, rows_per_step)
        steps = steps_of_epochs(num_rows, rows_per_step, config.epochs) if teaches else 0
    else:
        steps = left.steps
    after = state
    if steps:
        after = run.learn(
            f"round {number}",
            state,
            rows,
            steps=steps,
            peak=config.learning_rate,
            end_value=config.end_learning_rate,
            stretch=((number - 1) / config.rounds, number / config.rounds),
            loss=loss_of(config),
            config=_trainer(run),
            over=file,
        )
    if left is None:
        _say(run, rollout(), number)
        left = _left(run, rollout(), steps)
        of_round = figures(run, config, rollout(), rows() if steps else None)
        run.metrics.write(POLICY_GRADIENT, number, of_round | {"steps": steps})
        if distributed.is_primary():
            run.metrics.flush()  # before the round counts as over: a restart skips it
            run.store.write_json_once(file, dataclasses.asdict(left))
            if steps:
                run.remove_past_checkpoints()
        distributed.barrier(f"round {number} is learnt")
    for cached in (
        rollout,
        rows,
    ):  # states that are kept know how to be made again, and so keep these
        cached.cache_clear()
    return after, left


def _trainer(run: Run) -> TrainerConfig:
    """With the rows of an update of this method."""
    rows, trainer = method_of(run, PolicyGradientConfig).rows_per_update, run.config.trainer
    return dataclasses.replace(trainer, rows_per_step=rows or trainer.rows_per_step)


def _left(run: Run, rollout: Rollout, steps: int) -> Left:
    config, trainer = method_of(run, PolicyGradientConfig), _trainer(run)
    scores = bool(config.importance_cap) + bool(config.kl_coefficient)
    return Left(
        questions=len(rollout.groups),
        trajectories=len(rollout.trajectories),
        learnt=sum(len(group.trajectories) for group in rollout.learnt) if steps else 0,
        steps=steps,
        forward_tokens=tokens_of(rollout.trajectories)
        + (scores * rollout.rows.tokens.size if steps else 0),
        trained_slots=steps * trainer.rows_per_step * trainer.row_tokens,
    )


def _say(run: Run, rollout: Rollout, number: int) -> None:
    """What went wrong in a round, and what to change."""
    config, sampled = method_of(run, PolicyGradientConfig), len(rollout.groups)
    teaching = sum(group.teaches for group in rollout.groups)
    degenerate = sum(not group.is_comparable for group in rollout.groups)
    if left_out := sum(group.left_out for group in rollout.groups):
        run.progress.line(
            f"round {number}: {left_out} of {len(rollout.trajectories)} attempts are left out "
            f"because a search or the judge failed; {degenerate} of {sampled} groups have fewer "
            "than two attempts left and are dropped"
        )
    if not teaching:
        mean = mean_reward(rollout.trajectories)
        run.progress.line(
            f"round {number}: no update, for at each of {sampled} questions all attempts earned "
            f"the same (on average {mean:.3f}): raise method.group_attempts "
            f"{config.group_attempts} or sampling.temperature {run.config.sampling.temperature}, "
            "or begin with a policy that is right now and then"
        )
    elif config.dynamic_sampling and teaching < run.config.sampling.questions_per_round:
        run.progress.line(
            f"round {number}: {teaching} groups of {run.config.sampling.questions_per_round} "
            f"wanted teach anything after {sampled} questions, as many as "
            f"method.max_sampled_batches {config.max_sampled_batches} and the task allow; it "
            "learns from these"
        )


def _sample_round(run: Run, state: PhaseState, number: int, first: int) -> list[Trajectory]:
    """All trajectories of a round, those of groups that teach nothing among them."""
    earlier = finished_round(run, number)
    if earlier is not None:
        return earlier[0]
    config, size = method_of(run, PolicyGradientConfig), run.config.sampling.shard_questions
    questions, wanted = run.task.questions("train"), questions_a_round(run, f"round {number}")
    most = min(
        wanted * (config.max_sampled_batches if config.dynamic_sampling else 1), len(questions)
    )
    if distributed.is_primary():
        plan = {
            "policy_version": number - 1,
            "first_question": first,
            "groups": wanted,
            "max_questions": most,
        }
        run.store.write_plan(number, plan)
    run.preemption.enter(f"round {number}: sampling", kept=KEPT_SHARDS)
    run.use_policy(state, number - 1)
    entries: list[ShardEntry] = []
    trajectories: list[Trajectory] = []
    asked = teaching = episodes = 0
    with sampling(run, f"round {number}: sampling", number, total=wanted, unit="groups") as stage:

        def on_episode(trajectory: Trajectory) -> None:
            nonlocal episodes
            episodes += 1
            stage.update(teaching, episodes=episodes)

        while more := max(0, min(wanted - teaching, most - asked)):
            chosen = [
                questions[(first + place) % len(questions)] for place in range(asked, asked + more)
            ]
            shards = [chosen[at : at + size] for at in range(0, more, size)]
            units = []
            for index, shard in enumerate(shards, start=len(entries)):
                tries = [
                    attempt(run, one, place, number)
                    for one in shard
                    for place in range(config.group_attempts)
                ]
                units.append(functools.partial(run.sample, number, index, tries))
            play_share(run.progress, f"round {number}: questions {asked} to {asked + more}", units)
            for unit in units:
                entry, found = unit(on_episode)
                entries.append(entry)
                trajectories.extend(found)
            groups = compared_groups(config, trajectories)
            teaching = sum(is_learnt(config, group) for group in groups)
            stage.update(teaching, episodes=episodes)
            asked += more
    close_round(run, number, entries, mean_reward=mean_reward(trajectories))
    return trajectories
