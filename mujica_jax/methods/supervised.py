"""Plain maximum likelihood around a method: its warm-up and its equal-compute control.

Warm-up: it makes a policy that knows the format. The policy learns a fixed set of demonstrations.
They are scripted, or they are trajectories with EM = 1 that a checkpoint samples under worked
examples, learnt without the examples (appendix D.3 of the Mujica-MyGO paper). A model from scratch
first learns plain text about the training side of the task, in place of pre-training.

Control: it shows what a method's computation gives when it is spent on the warm-up's own
demonstrations. From the warmed-up state, training goes on over the same rows with the method's
learning rates. It ends when it has spent as many floating-point operations as the method used for
sampling and learning together. A token that goes forward counts one, a trained slot three (the
backward pass costs twice the forward).
"""

import asyncio
import dataclasses
import functools
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from mujica_jax import metrics
from mujica_jax.agents.agent import Attempt, OnEpisode
from mujica_jax.agents.dialogue import with_opening
from mujica_jax.agents.mujica import contract_of
from mujica_jax.config.checks import has_script
from mujica_jax.demonstrations.mujica_text import without_silent_workers
from mujica_jax.demonstrations.policy import ScriptedPolicy
from mujica_jax.errors import UserError
from mujica_jax.learning.packing import pack
from mujica_jax.learning.trainer import TrainState, steps_of_epochs
from mujica_jax.records import Conversation, Question, StopReason, Trajectory, Turn
from mujica_jax.runs import evaluation, learning, sampling
from mujica_jax.runs.evaluation import right_ones
from mujica_jax.runs.learning import LearningPlan
from mujica_jax.runs.parts import make_agent
from mujica_jax.runs.phases import (
    WARM_UP,
    GetState,
    Phase,
    PhaseCost,
    PhaseResult,
    PhaseState,
    tokens_of,
)
from mujica_jax.runs.run import Run
from mujica_jax.runs.versions import commit_policy, use_policy
from mujica_jax.runtime import distributed
from mujica_jax.tasks.checks import from_scratch
from mujica_jax.tasks.environment import WrittenPassages
from mujica_jax.tasks.task import FromScratchTask
from mujica_jax.trajectories.select import accepts, training_rows

PRETRAINING = "pretraining"
CONTROL = "control"
FORWARD_AND_BACKWARD = 3

MoreRows = Callable[[], Sequence[Conversation]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Demonstrations:
    """The demonstrations that the warm-up learnt from."""

    rows: list[Conversation]  # all of it
    rewarded: list[Conversation]  # the rows of those trajectories that earned the best reward


def warm_up(
    run: Run, more_rows: MoreRows = lambda: ()
) -> tuple[PhaseState, PhaseResult, Demonstrations]:
    """Return the warmed-up state, its phase, and what it was trained on.

    `more_rows` returns conversations that a method wants learnt beside the demonstrations.
    """
    cost = PhaseCost(start_time=time.monotonic())
    config = run.config.warmup
    trainer = run.config.trainer
    is_few_shot = config.source == "few_shot"

    # Demonstrate: play scripts, or sample with worked examples.
    trajectories, kept_trajectories = _few_shot(run) if is_few_shot else _scripted(run)
    conversations = learning.rows_that_fit(run, training_rows(kept_trajectories))
    if not conversations:
        raise UserError(_why_nothing_to_learn(run, len(trajectories), kept_trajectories))
    conversations += learning.rows_that_fit(run, more_rows(), "conversations with a teacher")

    # Pack the demonstrations with documents.
    with run.clock.stage("packing"):
        mixed = conversations + _mixed_documents(run, conversations)
        packed = pack(mixed, sequence_length=trainer.sequence_length, seed=run.config.seed)

    # Learn: make the configured steps or epochs, whichever is less.
    steps = config.steps
    if steps and config.epochs:
        epoch_steps = steps_of_epochs(packed.num_rows, trainer.batch_size, config.epochs)
        steps = min(steps, epoch_steps)
    plan = LearningPlan(
        steps=steps,
        peak=config.learning_rate,
        end_value=config.end_learning_rate,
        warmup_steps=min(config.lr_warmup_steps, steps),
    )
    state = learning.train(run, WARM_UP.name, _starting_state(run), packed, plan=plan)

    # Commit and evaluate.
    commit_policy(run, state, WARM_UP.step)
    cost.trajectories = len(trajectories)
    cost.accepted = len(kept_trajectories)
    cost.forward_tokens = tokens_of(trajectories) if is_few_shot else 0
    cost.trained_slots = (steps + _pretraining_steps(run)) * trainer.tokens_per_step
    result = evaluation.finish(run, WARM_UP, state, cost)

    # A method may replay the rows of the trajectories with the best reward.
    best_reward = run.reward.best
    best_trajectories = [
        trajectory
        for trajectory in kept_trajectories
        if accepts(trajectory.reward, k=best_reward, best_reward=best_reward)
    ]
    rewarded_ids = {id(row) for row in training_rows(best_trajectories)}
    rewarded = [row for row in conversations if id(row) in rewarded_ids]
    return state, result, Demonstrations(rows=conversations, rewarded=rewarded)


def begin(
    run: Run, *, replayed: bool = False, more_rows: MoreRows = lambda: ()
) -> tuple[PhaseState, PhaseResult, Demonstrations]:
    """Run the warm-up, or evaluate what the run starts from where the warm-up has no steps.

    In the second case nothing is demonstrated, unless the method replays demonstrations and a
    script plays some. `more_rows`: see `warm_up`.
    """
    if run.config.warmup.steps or (replayed and _has_demonstrations(run)):
        return warm_up(run, more_rows)

    cost = PhaseCost(start_time=time.monotonic())
    cost.trained_slots = _pretraining_steps(run) * run.config.trainer.tokens_per_step
    state = PhaseState(_starting_state(run))
    commit_policy(run, state, WARM_UP.step)
    result = evaluation.finish(run, WARM_UP, state, cost)
    return state, result, Demonstrations(rows=[], rewarded=[])


def _has_demonstrations(run: Run) -> bool:
    """Return whether a script plays some demonstrations."""
    if not has_script(run.config):
        return False
    return isinstance(run.task, FromScratchTask) and any(run.task.demonstrations())


def _starting_state(run: Run) -> GetState:
    """Return what makes the state before the warm-up: the checkpoint, or a pre-trained one."""
    if run.config.init:
        return run.initial_state
    return functools.partial(_pretrain, run)


def _pretraining_steps(run: Run) -> int:
    """Return how many updates pre-training makes; none where a run starts from a checkpoint."""
    return 0 if run.config.init else run.config.pretraining.steps


def with_control(
    run: Run,
    state: PhaseState,
    demonstrations: Demonstrations,
    first: PhaseResult,
    phases: Sequence[PhaseResult],
) -> list[PhaseResult]:
    """Return the results of all phases, with the control if it is asked for.

    `first` is the phase that ended with `state`, and `phases` are the method's own.
    """
    if not run.config.eval.control:
        return [first, *phases]

    # Train for the steps that cost as much as the method's phases.
    cost = PhaseCost(start_time=time.monotonic())
    method = run.config.method
    trainer = run.config.trainer
    methods_cost = sum(
        result.forward_tokens + FORWARD_AND_BACKWARD * result.trained_slots for result in phases
    )
    steps = max(1, round(methods_cost / (FORWARD_AND_BACKWARD * trainer.tokens_per_step)))

    with run.clock.stage("packing"):
        packed = pack(
            demonstrations.rows, sequence_length=trainer.sequence_length, seed=run.config.seed
        )
    plan = LearningPlan(steps=steps, peak=method.learning_rate, end_value=method.end_learning_rate)
    control_state = learning.train(run, CONTROL, state, packed, plan=plan)
    cost.trained_slots = steps * trainer.tokens_per_step
    phase = Phase(name=CONTROL, step=WARM_UP.step + len(phases) + 1, prefix=f"{CONTROL}/")
    control = evaluation.finish(run, phase, control_state, cost)
    return [first, control, *phases]


def _why_nothing_to_learn(run: Run, num_sampled: int, kept_trajectories: list[Trajectory]) -> str:
    """Return the sentence for a warm-up without a training row."""
    if kept_trajectories:
        shortest = min(len(row.token_ids) for row in training_rows(kept_trajectories))
        return (
            f"no conversation of the {len(kept_trajectories)} warm-up trajectories fits "
            f"trainer.sequence_length {run.config.trainer.sequence_length}, the shortest has "
            f"{shortest} tokens: raise trainer.sequence_length"
        )
    if run.config.warmup.source == "few_shot":
        return (
            f"none of {num_sampled} few-shot trajectories was answered correctly: raise "
            f"warmup.few_shot_attempts {run.config.warmup.few_shot_attempts}, or start from a "
            "stronger model"
        )
    if not num_sampled:
        return (
            "no training question can be demonstrated by a script, which needs a question's type "
            "and evidences, from which its answer follows: add them (docs/guides/own_questions.md), or "
            "--warmup.source few_shot"
        )
    return (
        f"none of {num_sampled} scripted demonstrations reaches its gold answer: the limits of "
        f"agent cut them, raise agent.max_turn_tokens {run.config.agent.max_turn_tokens} or the "
        "limit of turns"
    )


class Played(NamedTuple):
    """The trajectories of a warm-up."""

    trajectories: list[Trajectory]  # all that were played
    kept_trajectories: list[Trajectory]  # those that are learnt


def _scripted(run: Run) -> Played:
    """Play the demonstrations in their environments.

    A script that fails by a miss is kept, as the noise it is meant to be. One that cannot reach the
    gold answer, or whose search failed, is left out.
    """
    policy = ScriptedPolicy(
        run.tokenizer,
        miss_rate=run.config.warmup.miss_rate,
        seed=run.config.seed,
        contract=contract_of(run.config.agent),
    )
    run.preemption.enter(f"{WARM_UP.name}: playing the demonstrations")
    trajectories, is_right = asyncio.run(_play_scripts(run, policy))

    kept_trajectories: list[Trajectory] = []
    stop_reasons: Counter[StopReason] = Counter()  # of the others
    for trajectory, right in zip(trajectories, is_right, strict=True):
        has_missed = not trajectory.is_environment_fault and any(
            search.query in policy.missed for search in trajectory.searches
        )
        if right or has_missed:
            kept_trajectories.append(trajectory)
        else:
            stop_reasons[trajectory.stop_reason] += 1

    commonest_end = ""
    for stop_reason, count in stop_reasons.most_common(1):
        commonest_end = f"; of the rest {count} end as {stop_reason}"
    num_right = sum(is_right)
    num_kept = len(kept_trajectories)
    run.progress.line(
        f"{num_right} of {len(trajectories)} scripted demonstrations reach the gold answer, "
        f"{num_kept - num_right} of the others fail by a miss; these {num_kept} are "
        f"kept{commonest_end}"
    )
    question_ids = {question.id for question in run.task.questions("train")}
    num_shown = len(question_ids & {trajectory.question_id for trajectory in kept_trajectories})
    if 0 < num_shown < len(question_ids):
        run.progress.line(
            f"{num_shown} of {len(question_ids)} training questions have a demonstration"
        )
    return Played(trajectories, kept_trajectories)


async def _play_scripts(run: Run, policy: ScriptedPolicy) -> tuple[list[Trajectory], list[bool]]:
    """Return the rewarded trajectories of all demonstrations, and which answer is right."""
    trajectories: list[Trajectory] = []
    questions: list[Question] = []
    is_right: list[bool] = []
    for question, environment in from_scratch(run.task).demonstrations():
        run.preemption.check()
        attempt = Attempt(question=question, number=0, seed=run.config.seed, temperature=0.0)
        trajectory = await run.faults.play(run.agent, attempt, environment, policy)
        if isinstance(environment, WrittenPassages):
            planner_conversations = tuple(
                conversation
                for conversation in trajectory.conversations
                if conversation.role == "planner"
            )
            trajectory = dataclasses.replace(trajectory, conversations=planner_conversations)
        elif environment.kind == "text":
            conversations = without_silent_workers(trajectory.conversations)
            trajectory = dataclasses.replace(trajectory, conversations=conversations)
        trajectories.append(trajectory)
        questions.append(question)
        score = metrics.score(trajectory.final_answer, question.answers, run.task.rule)
        is_right.append(score.em == 1.0)

    # All at once: a judge may have to be waited for.
    rewards = [
        run.reward.rewarded(trajectory, question)
        for trajectory, question in zip(trajectories, questions, strict=True)
    ]
    return list(await asyncio.gather(*rewards)), is_right


def _few_shot(run: Run) -> Played:
    """Sample with worked examples in the prompt until enough trajectories are right.

    The examples are taken out of what is kept.
    """
    config = run.config
    name = f"{WARM_UP.name}: sampling with worked examples"
    run.preemption.enter(name, kept_text=sampling.KEPT_SHARDS)
    use_policy(run, run.initial_state, WARM_UP.step)
    few_shot_agent = make_agent(dataclasses.replace(config.agent, prompt="few_shot"), run.tokenizer)
    num_wanted = config.warmup.few_shot_trajectories
    questions = run.task.questions("train")
    shard_size = config.sampling.questions_per_shard

    # A shard holds one attempt at each of some questions: first attempts at all questions, then
    # second ones, and so on.
    shards: list[tuple[int, Sequence[Question]]] = []
    for number in range(config.warmup.few_shot_attempts):
        for start in range(0, len(questions), shard_size):
            shards.append((number, questions[start : start + shard_size]))

    def play(shard: int, on_episode: OnEpisode) -> list[Trajectory]:
        number, shard_questions = shards[shard]
        attempts = [
            Attempt(
                question=question,
                number=number,
                seed=config.seed,
                temperature=config.sampling.temperature,
            )
            for question in shard_questions
        ]
        _, trajectories = sampling.play_attempts(
            run, WARM_UP.step, shard, attempts, on_episode, agent=few_shot_agent
        )
        return trajectories

    sampled: list[Trajectory] = []
    right: list[Trajectory] = []
    group_size = distributed.processes()
    with sampling.sampling_stage(
        run, name, WARM_UP.step, total=num_wanted, unit="correct"
    ) as stage:
        # One shard at a time for each process. What is played beyond what is wanted is not used,
        # whatever the number of processes.
        for start in range(0, len(shards), group_size):
            group = range(start, min(start + group_size, len(shards)))
            sampling.play_share(
                run.progress, name, [functools.partial(play, shard) for shard in group]
            )
            for shard in group:
                if len(right) >= num_wanted:
                    break
                trajectories = play(shard, lambda trajectory: None)
                sampled += trajectories
                right += right_ones(shards[shard][1], trajectories, run.task.rule)
                stage.update(min(len(right), num_wanted), sampled=len(sampled))
            if len(right) >= num_wanted:
                break
    return Played(sampled, [_zero_shot(run, trajectory) for trajectory in right[:num_wanted]])


def _zero_shot(run: Run, trajectory: Trajectory) -> Trajectory:
    """Return the trajectory under the prompt that is trained."""
    kind = run.task.environment_kind
    conversations = [
        with_opening(conversation, run.tokenizer, run.agent.opening(conversation.role, kind))
        for conversation in trajectory.conversations
    ]
    return dataclasses.replace(trajectory, conversations=tuple(conversations))


def _pretrain(run: Run) -> TrainState:
    """Train the random start on plain text."""
    config = run.config.pretraining
    trainer = run.config.trainer
    if config.steps == 0:
        return run.initial_state()

    # Rows are cut into shorter ones, and a step takes as many tokens as before.
    pretraining_trainer = dataclasses.replace(
        trainer,
        sequence_length=trainer.sequence_length // config.row_parts,
        batch_size=trainer.batch_size * config.row_parts,
    )
    sequence_length = pretraining_trainer.sequence_length

    with run.clock.stage("packing"):
        documents = _document_rows(run, sequence_length)
        packed = pack(documents, sequence_length=sequence_length, seed=run.config.seed)
    plan = LearningPlan(
        steps=config.steps,
        peak=config.learning_rate,
        end_value=config.end_learning_rate,
        warmup_steps=min(50, config.steps),
        trainer=pretraining_trainer,
    )
    return learning.train(run, PRETRAINING, run.initial_state, packed, plan=plan)()


def _document_rows(run: Run, sequence_length: int) -> list[Conversation]:
    """Return documents with all tokens trained, without those that are longer than a row."""
    documents = itertools.islice(_documents(run, stream=0), run.config.pretraining.documents)
    return learning.rows_that_fit(run, list(documents), "documents", sequence_length)


def _documents(run: Run, stream: int) -> Iterator[Conversation]:
    """Yield the task's documents as conversations of one turn."""
    for text in from_scratch(run.task).pretraining_documents(seed=1000 * run.config.seed + stream):
        token_ids = (*run.tokenizer.encode_plain(text), run.tokenizer.stop_token_ids[0])
        turn = Turn(role="model", token_ids=token_ids, text=text, trained=True)
        yield Conversation(role="document", turns=(turn,))


def _mixed_documents(run: Run, conversations: list[Conversation]) -> list[Conversation]:
    """Return documents to mix with conversations, so that copying is not unlearnt."""
    share = run.config.warmup.pretraining_share
    if run.config.init or share == 0:
        return []
    max_tokens = share * sum(len(conversation.token_ids) for conversation in conversations)
    rows: list[Conversation] = []
    num_tokens = 0
    for row in itertools.islice(_documents(run, stream=1), run.config.pretraining.documents):
        if num_tokens >= max_tokens:
            break
        if len(row.token_ids) <= run.config.trainer.sequence_length:
            rows.append(row)
            num_tokens += len(row.token_ids)
    return rows
