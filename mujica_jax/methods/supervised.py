"""Supervised training before and beside a method: the warm-up and the control run.

The warm-up teaches the policy the format of conversations. The policy learns a fixed set of
demonstrations by maximum likelihood. A script writes them, or a checkpoint samples them after it
was shown worked examples. In the second case, only trajectories with EM = 1 are kept. They are
learnt without the examples (appendix D.3 of the Mujica-MyGO paper). A model from scratch first
learns plain text about the training part of the task, which replaces pre-training.

The control run shows what the method's computation achieves if it is spent on the demonstrations
alone. It starts from the state after the warm-up and trains on the same rows, with the method's
learning rates. It stops when it has used as many floating-point operations as the method used for
sampling and learning together. A token that goes forward counts one, and a trained token position
counts three, because the backward pass costs twice as much as the forward pass.
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
# The cost of a trained token position, in units of the cost of a forward pass.
FORWARD_AND_BACKWARD = 3

# A function that returns further conversations for the warm-up to learn.
MoreRows = Callable[[], Sequence[Conversation]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Demonstrations:
    """The demonstrations that the warm-up learnt.

    `rows` are all their conversations. `rewarded` are the conversations of those trajectories that
    earned the best reward.
    """

    rows: list[Conversation]
    rewarded: list[Conversation]


def warm_up(
    run: Run, more_rows: MoreRows = lambda: ()
) -> tuple[PhaseState, PhaseResult, Demonstrations]:
    """Run the warm-up. Return the state after it, its result, and its demonstrations.

    `more_rows` returns conversations that the method wants to be learnt in addition to the
    demonstrations.
    """
    cost = PhaseCost(start_time=time.monotonic())
    config = run.config.warmup
    trainer = run.config.trainer
    is_few_shot = config.source == "few_shot"

    # Demonstrate: let the script play, or sample from a checkpoint that is shown worked examples.
    trajectories, kept_trajectories = _few_shot(run) if is_few_shot else _scripted(run)
    conversations = learning.rows_that_fit(run, training_rows(kept_trajectories))
    if not conversations:
        raise UserError(_why_nothing_to_learn(run, len(trajectories), kept_trajectories))
    conversations += learning.rows_that_fit(run, more_rows(), "conversations with a teacher")

    # Pack the demonstrations together with some documents of the pre-training.
    with run.clock.stage("packing"):
        mixed = conversations + _mixed_documents(run, conversations)
        packed = pack(mixed, sequence_length=trainer.sequence_length, seed=run.config.seed)

    # Learn: train for the configured number of steps or epochs, whichever is less.
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

    # Find the rows of the trajectories with the best reward. A method may replay them later.
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
    """Run the warm-up, or only evaluate the start of the run if the warm-up has no steps.

    Without warm-up steps, demonstrations are made only if the method replays them (`replayed`) and
    a script can play them. For `more_rows` and the result see `warm_up`.
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
    """Return whether a script can play any demonstration for this task."""
    if not has_script(run.config):
        return False
    return isinstance(run.task, FromScratchTask) and any(run.task.demonstrations())


def _starting_state(run: Run) -> GetState:
    """Return a function that makes the state before the warm-up.

    It loads the checkpoint that the run starts from. Without a checkpoint, it pre-trains a model.
    """
    if run.config.init:
        return run.initial_state
    return functools.partial(_pretrain, run)


def _pretraining_steps(run: Run) -> int:
    """Return the number of updates of pre-training; 0 if the run starts from a checkpoint."""
    return 0 if run.config.init else run.config.pretraining.steps


def with_control(
    run: Run,
    state: PhaseState,
    demonstrations: Demonstrations,
    first: PhaseResult,
    phases: Sequence[PhaseResult],
) -> list[PhaseResult]:
    """Run the control run if `eval.control` asks for it, and return the results of all phases.

    `state` is the state after the warm-up, `first` the result of the warm-up, and `phases` are the
    results of the method's phases.
    """
    if not run.config.eval.control:
        return [first, *phases]

    # Choose the number of steps so that the control run costs as much as the method's phases.
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
    """Return the sentence that explains why a warm-up has no training rows."""
    if kept_trajectories:
        shortest = min(len(row.token_ids) for row in training_rows(kept_trajectories))
        return (
            f"no conversation of the {len(kept_trajectories)} warm-up trajectories fits "
            f"trainer.sequence_length {run.config.trainer.sequence_length}; the shortest has "
            f"{shortest} tokens: raise trainer.sequence_length"
        )
    if run.config.warmup.source == "few_shot":
        return (
            f"none of {num_sampled} few-shot trajectories has a correct answer: raise "
            f"warmup.few_shot_attempts (now {run.config.warmup.few_shot_attempts}), or start from "
            "a stronger model"
        )
    if not num_sampled:
        return (
            "a script cannot demonstrate any training question, because it needs the question's "
            "type and evidences, and the answer must follow from these: add them "
            "(docs/guides/own_questions.md), or use --warmup.source few_shot"
        )
    return (
        f"none of {num_sampled} scripted demonstrations reaches its gold answer, because the "
        "agent's limits cut them off: raise agent.max_turn_tokens (now "
        f"{run.config.agent.max_turn_tokens}) or the agent's limit of turns"
    )


class Played(NamedTuple):
    """The trajectories of a warm-up: all that were played, and those that are kept for learning."""

    trajectories: list[Trajectory]
    kept_trajectories: list[Trajectory]


def _scripted(run: Run) -> Played:
    """Let a script play the demonstrations in their environments.

    The script makes a mistake on purpose from time to time (`warmup.miss_rate`). A demonstration
    that fails because of that is kept, as deliberate noise. A demonstration that fails for another
    reason, such as a failed search, is left out.
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
    # How the demonstrations that are not kept ended.
    stop_reasons: Counter[StopReason] = Counter()
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
        commonest_end = f"; the most common end of the others is {stop_reason} ({count} times)"
    num_right = sum(is_right)
    num_kept = len(kept_trajectories)
    if trajectories:
        run.progress.line(
            f"{num_right} of {len(trajectories)} scripted demonstrations reach the gold answer, and "
            f"{num_kept - num_right} others fail because of a deliberate mistake; these {num_kept} "
            f"are kept{commonest_end}"
        )
    question_ids = {question.id for question in run.task.questions("train")}
    num_shown = len(question_ids & {trajectory.question_id for trajectory in kept_trajectories})
    if 0 < num_shown < len(question_ids):
        run.progress.line(
            f"{num_shown} of {len(question_ids)} training questions have a demonstration"
        )
    return Played(trajectories, kept_trajectories)


async def _play_scripts(run: Run, policy: ScriptedPolicy) -> tuple[list[Trajectory], list[bool]]:
    """Play all demonstrations.

    Returns their trajectories with rewards, and for each whether its answer is right.
    """
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

    # Compute all rewards at the same time, because a judge may take long to reply.
    rewards = [
        run.reward.rewarded(trajectory, question)
        for trajectory, question in zip(trajectories, questions, strict=True)
    ]
    return list(await asyncio.gather(*rewards)), is_right


def _few_shot(run: Run) -> Played:
    """Sample with worked examples in the prompt until enough trajectories are right.

    The kept trajectories are returned under the prompt without the examples.
    """
    config = run.config
    name = f"{WARM_UP.name}: sampling with worked examples"
    run.preemption.enter(name, kept_text=sampling.KEPT_SHARDS)
    use_policy(run, run.initial_state, WARM_UP.step)
    few_shot_agent = make_agent(dataclasses.replace(config.agent, prompt="few_shot"), run.tokenizer)
    num_wanted = config.warmup.few_shot_trajectories
    questions = run.task.questions("train")
    shard_size = config.sampling.questions_per_shard

    # Each shard holds one attempt at each of its questions. The first shards hold the first
    # attempts at all questions, the next ones the second attempts, and so on.
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
        # Each process plays one shard at a time. Shards beyond the wanted number of trajectories
        # are not used, so the result does not depend on the number of processes.
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
    """Return the trajectory under the prompt that is trained, without the worked examples."""
    kind = run.task.environment_kind
    conversations = [
        with_opening(conversation, run.tokenizer, run.agent.opening(conversation.role, kind))
        for conversation in trajectory.conversations
    ]
    return dataclasses.replace(trajectory, conversations=tuple(conversations))


def _pretrain(run: Run) -> TrainState:
    """Train a model with random weights on plain text, and return its state."""
    config = run.config.pretraining
    trainer = run.config.trainer
    if config.steps == 0:
        return run.initial_state()

    # Use shorter rows and more of them, so that a step has the same number of tokens.
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
    """Return documents whose tokens are all trained, without those that are longer than a row."""
    documents = itertools.islice(_documents(run, stream=0), run.config.pretraining.documents)
    return learning.rows_that_fit(run, list(documents), "documents", sequence_length)


def _documents(run: Run, stream: int) -> Iterator[Conversation]:
    """Yield the task's documents, each as a conversation with one turn.

    Each `stream` has its own random order of documents.
    """
    for text in from_scratch(run.task).pretraining_documents(seed=1000 * run.config.seed + stream):
        token_ids = (*run.tokenizer.encode_plain(text), run.tokenizer.stop_token_ids[0])
        turn = Turn(role="model", token_ids=token_ids, text=text, trained=True)
        yield Conversation(role="document", turns=(turn,))


def _mixed_documents(run: Run, conversations: list[Conversation]) -> list[Conversation]:
    """Return documents to mix with the conversations, so that the model does not forget to copy.

    The number of their tokens is `warmup.pretraining_share` times that of the conversations. There
    are none if the run starts from a checkpoint.
    """
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
