"""What methods do by plain maximum likelihood: the warm-up before them, and the equal-compute
control beside them.

Warm-up: a policy that knows the format. It learns a fixed set of demonstrations: scripted ones, or
trajectories with EM = 1 that a checkpoint samples under worked examples, without the examples
(appendix D.3 of the Mujica-MyGO paper). A model from scratch first learns plain text about the
training side of the task, in place of pre-training.

Control: what a method's computation gives when it is spent on the warm-up's own demonstrations.
From the warmed-up state, training goes on over the same rows with the method's learning rates,
until as many floating-point operations are spent as the method used for sampling and learning
together. A token that goes forward counts one, a trained slot three (the backward pass costs twice
the forward).
"""

import asyncio
import dataclasses
import functools
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from mujica_jax import metrics
from mujica_jax.agents.agent import Attempt, OnEpisode
from mujica_jax.agents.dialogue import with_opening
from mujica_jax.agents.mujica import contract_of
from mujica_jax.agents.scripted import ScriptedPolicy
from mujica_jax.agents.scripted_text import without_silent_workers
from mujica_jax.config.method_checks import has_script
from mujica_jax.errors import UserError
from mujica_jax.learning.trainer import TrainState, steps_of_epochs
from mujica_jax.methods.evaluation import right_ones
from mujica_jax.methods.parts import make_agent
from mujica_jax.methods.phases import WARM_UP, Phase, PhaseResult, PhaseState, tokens_of
from mujica_jax.methods.rounds import sampling
from mujica_jax.methods.run import KEPT_SHARDS, Run
from mujica_jax.methods.shares import play_share
from mujica_jax.records import Conversation, Question, Trajectory, Turn
from mujica_jax.runtime import distributed
from mujica_jax.tasks.environment import WrittenPassages
from mujica_jax.tasks.task import FromScratchTask, Task
from mujica_jax.trajectories.packing import PackedRows, pack
from mujica_jax.trajectories.select import accepts, training_rows

PRETRAINING = "pretraining"
CONTROL = "control"
FORWARD_AND_BACKWARD = 3

MoreRows = Callable[[], Sequence[Conversation]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Demonstrations:
    """What the warm-up learnt from."""

    rows: list[Conversation]  # all of it
    rewarded: list[Conversation]  # the rows of those trajectories that earned the best reward


def warm_up(
    run: Run, more_rows: MoreRows = lambda: ()
) -> tuple[PhaseState, PhaseResult, Demonstrations]:
    """Return the warmed-up state, its phase, and what it was trained on.

    `more_rows` gives conversations that a method wants learnt beside the demonstrations."""
    began = time.monotonic()
    config = run.config.warmup
    few_shot = config.source == "few_shot"
    trajectories, kept = _few_shot(run) if few_shot else _scripted(run)
    conversations = run.fitting(training_rows(kept))
    if not conversations:
        raise UserError(_why_nothing_to_learn(run, len(trajectories), kept))
    conversations += run.fitting(more_rows(), "conversations with a teacher")

    @functools.cache
    def packed_rows() -> PackedRows:
        mixed = conversations + _mixed_documents(run, conversations)
        return pack(mixed, row_tokens=run.config.trainer.row_tokens, seed=run.config.seed)

    steps = config.steps
    if steps and config.epochs:
        steps = min(
            steps,
            steps_of_epochs(
                packed_rows().num_rows, run.config.trainer.rows_per_step, config.epochs
            ),
        )
    state = run.learn(
        WARM_UP.name,
        run.initial_state if run.config.init else lambda: _pretrain(run),
        packed_rows,
        steps=steps,
        peak=config.learning_rate,
        end_value=config.end_learning_rate,
        warmup_steps=min(config.rise_steps, steps),
    )
    run.commit_policy(state, WARM_UP.step)
    trained_steps = steps if run.config.init else steps + run.config.pretraining.steps
    slots = trained_steps * run.config.trainer.rows_per_step * run.config.trainer.row_tokens
    forward = tokens_of(trajectories) if few_shot else 0
    spent = {"accepted": len(kept), "forward_tokens": forward, "trained_slots": slots}
    result = run.finish_phase(WARM_UP, state, began=began, trajectories=len(trajectories), **spent)
    best = run.reward.best
    rewarded = {
        id(row)
        for row in training_rows([t for t in kept if accepts(t.reward, k=best, best_reward=best)])
    }
    rewarded_rows = [row for row in conversations if id(row) in rewarded]
    return state, result, Demonstrations(rows=conversations, rewarded=rewarded_rows)


def begin(
    run: Run, *, replayed: bool = False, more_rows: MoreRows = lambda: ()
) -> tuple[PhaseState, PhaseResult, Demonstrations]:
    """The warm-up, or where it has no steps what the run starts from, evaluated. Then nothing is
    demonstrated, unless the method replays demonstrations and a script plays some. `more_rows`: see
    `warm_up`."""
    task, scripted = run.task, replayed and has_script(run.config)
    played = scripted and isinstance(task, FromScratchTask) and any(task.demonstrations())
    if run.config.warmup.steps or played:
        return warm_up(run, more_rows)
    began = time.monotonic()
    state = PhaseState(run.initial_state if run.config.init else lambda: _pretrain(run))
    run.commit_policy(state, WARM_UP.step)
    steps, trainer = 0 if run.config.init else run.config.pretraining.steps, run.config.trainer
    slots = steps * trainer.rows_per_step * trainer.row_tokens
    result = run.finish_phase(WARM_UP, state, began=began, trained_slots=slots)
    return state, result, Demonstrations(rows=[], rewarded=[])


def with_control(
    run: Run,
    state: PhaseState,
    demonstrations: Demonstrations,
    first: PhaseResult,
    phases: Sequence[PhaseResult],
) -> list[PhaseResult]:
    """The `first` phase, which `state` was left by, the control if it is asked for, and the
    method's own phases."""
    if not run.config.eval.control:
        return [first, *phases]
    began, method = time.monotonic(), run.config.method
    spent = sum(
        result.forward_tokens + FORWARD_AND_BACKWARD * result.trained_slots for result in phases
    )
    slots = run.config.trainer.rows_per_step * run.config.trainer.row_tokens
    steps = max(1, round(spent / (FORWARD_AND_BACKWARD * slots)))
    trained = run.learn(
        CONTROL,
        state,
        lambda: pack(
            demonstrations.rows, row_tokens=run.config.trainer.row_tokens, seed=run.config.seed
        ),
        steps=steps,
        peak=method.learning_rate,
        end_value=method.end_learning_rate,
    )
    phase = Phase(name=CONTROL, step=WARM_UP.step + len(phases) + 1, prefix=f"{CONTROL}/")
    return [
        first,
        run.finish_phase(phase, trained, began=began, trained_slots=steps * slots),
        *phases,
    ]


def _why_nothing_to_learn(run: Run, sampled: int, kept: list[Trajectory]) -> str:
    if kept:
        shortest = min(len(row.token_ids) for row in training_rows(kept))
        return (
            f"no conversation of the {len(kept)} warm-up trajectories fits trainer.row_tokens "
            f"{run.config.trainer.row_tokens}, the shortest has {shortest} tokens: raise "
            "trainer.row_tokens"
        )
    if run.config.warmup.source == "few_shot":
        return (
            f"none of {sampled} few-shot trajectories was answered correctly: raise "
            f"warmup.few_shot_attempts {run.config.warmup.few_shot_attempts}, or start from a "
            "stronger model"
        )
    if not sampled:
        return (
            "no training question can be demonstrated by a script, which needs a question's type "
            "and evidences, from which its answer follows: add them (docs/own_questions.md), or "
            "--warmup.source few_shot"
        )
    return (
        f"none of {sampled} scripted demonstrations reaches its gold answer: the limits of agent "
        f"cut them, raise agent.max_turn_tokens {run.config.agent.max_turn_tokens} or the limit of "
        "turns"
    )


def from_scratch(task: Task) -> FromScratchTask:
    """The task's demonstrations and texts. Raises UserError if it has none."""
    if not isinstance(task, FromScratchTask):
        needed = ("demonstrations", "pretraining_documents", "tokenizer_text")
        lacking = ", ".join(name for name in needed if not hasattr(task, name))
        raise UserError(
            f"task {task.name} lacks {lacking}, which a model from scratch begins with: start from "
            "a checkpoint with --init and --warmup.steps 0 or --warmup.source few_shot"
        )
    return task


def _scripted(run: Run) -> tuple[list[Trajectory], list[Trajectory]]:
    """Play the demonstrations in their environments. A script that fails by a miss stays in, as the
    noise it is meant to be; one that cannot reach the gold answer, or whose search failed, is left
    out."""
    policy = ScriptedPolicy(
        run.tokenizer,
        miss_rate=run.config.warmup.miss_rate,
        seed=run.config.seed,
        contract=contract_of(run.config.agent),
    )
    played: list[tuple[Trajectory, Question]] = []
    trajectories: list[Trajectory] = []
    right: list[bool] = []

    async def play() -> None:
        for question, environment in from_scratch(run.task).demonstrations():
            run.preemption.check()
            attempt = Attempt(question=question, number=0, seed=run.config.seed, temperature=0.0)
            trajectory = await run.faults.play(run.agent, attempt, environment, policy)
            if isinstance(environment, WrittenPassages):
                planned = tuple(c for c in trajectory.conversations if c.role == "planner")
                trajectory = dataclasses.replace(trajectory, conversations=planned)
            elif environment.kind == "text":
                spoken = without_silent_workers(trajectory.conversations)
                trajectory = dataclasses.replace(trajectory, conversations=spoken)
            played.append((trajectory, question))
            right.append(
                metrics.score(trajectory.final_answer, question.answers, run.task.rule).em == 1.0
            )
        # All at once: a judge may have to be waited for.
        rewards = (run.reward.rewarded(trajectory, question) for trajectory, question in played)
        trajectories.extend(await asyncio.gather(*rewards))

    run.preemption.enter(f"{WARM_UP.name}: playing the demonstrations")
    asyncio.run(play())
    slipped = [
        not trajectory.is_environment_fault
        and any(search.query in policy.missed for search in trajectory.searches)
        for trajectory in trajectories
    ]
    kept = [t for t, *keep in zip(trajectories, right, slipped, strict=True) if any(keep)]
    lost = [
        t.stop_reason
        for t, *keep in zip(trajectories, right, slipped, strict=True)
        if not any(keep)
    ]
    ends = "".join(
        f"; of the rest {count} end as {end}" for end, count in Counter(lost).most_common(1)
    )
    run.progress.line(
        f"{sum(right)} of {len(trajectories)} scripted demonstrations reach the gold answer, "
        f"{len(kept) - sum(right)} of the others fail by a miss; these {len(kept)} are kept{ends}"
    )
    asked = {question.id for question in run.task.questions("train")}
    if 0 < (shown := len(asked & {trajectory.question_id for trajectory in kept})) < len(asked):
        run.progress.line(f"{shown} of {len(asked)} training questions have a demonstration")
    return trajectories, kept


def _few_shot(run: Run) -> tuple[list[Trajectory], list[Trajectory]]:
    """Sample with worked examples in the prompt until enough trajectories are right, then take the
    examples out."""
    config = run.config
    name = f"{WARM_UP.name}: sampling with worked examples"
    run.preemption.enter(name, kept=KEPT_SHARDS)
    run.use_policy(run.initial_state, WARM_UP.step)
    few_shot = make_agent(dataclasses.replace(config.agent, prompt="few_shot"), run.tokenizer)
    questions = run.task.questions("train")
    wanted = config.warmup.few_shot_trajectories
    sampled: list[Trajectory] = []
    kept: list[Trajectory] = []
    starts = range(0, len(questions), config.sampling.shard_questions)
    orders = itertools.product(range(config.warmup.few_shot_attempts), starts)

    def chosen(start: int) -> Sequence[Question]:
        return questions[start : start + config.sampling.shard_questions]

    def unit(shard: int, order: tuple[int, int], callback: OnEpisode) -> list[Trajectory]:
        number, start = order
        attempts = [
            Attempt(
                question=question,
                number=number,
                seed=config.seed,
                temperature=config.sampling.temperature,
            )
            for question in chosen(start)
        ]
        return run.sample(WARM_UP.step, shard, attempts, callback, agent=few_shot)[1]

    with sampling(run, name, WARM_UP.step, total=wanted, unit="correct") as stage:
        # As many shards at a time as there are processes; what is played beyond what is wanted is
        # not used, whatever their number.
        numbered = enumerate(orders)
        while group := list(itertools.islice(numbered, distributed.processes())):
            play_share(
                run.progress,
                name,
                [functools.partial(unit, shard, order) for shard, order in group],
            )
            for shard, order in group:
                if len(kept) >= wanted:
                    break
                trajectories = unit(shard, order, lambda trajectory: None)
                sampled += trajectories
                kept += right_ones(chosen(order[1]), trajectories, run.task.rule)
                stage.update(min(len(kept), wanted), sampled=len(sampled))
            if len(kept) >= wanted:
                break
    return sampled, [_zero_shot(run, trajectory) for trajectory in kept[:wanted]]


def _zero_shot(run: Run, trajectory: Trajectory) -> Trajectory:
    """The same trajectory under the prompt that is trained."""
    kind = run.task.environment_kind
    conversations = [
        with_opening(conversation, run.tokenizer, run.agent.opening(conversation.role, kind))
        for conversation in trajectory.conversations
    ]
    return dataclasses.replace(trajectory, conversations=tuple(conversations))


def _pretrain(run: Run) -> TrainState:
    """On plain text, from the random start."""
    config, trainer = run.config.pretraining, run.config.trainer
    if config.steps == 0:
        return run.initial_state()
    cut = dataclasses.replace(
        trainer,
        row_tokens=trainer.row_tokens // config.row_parts,
        rows_per_step=trainer.rows_per_step * config.row_parts,
    )
    return run.learn(
        PRETRAINING,
        run.initial_state,
        lambda: pack(
            _document_rows(run, cut.row_tokens), row_tokens=cut.row_tokens, seed=run.config.seed
        ),
        config=cut,
        steps=config.steps,
        peak=config.learning_rate,
        end_value=config.end_learning_rate,
        warmup_steps=min(50, config.steps),
    )()


def _document_rows(run: Run, row_tokens: int) -> list[Conversation]:
    """All tokens trained, without the documents that are longer than a row."""
    documents = itertools.islice(_documents(run, stream=0), run.config.pretraining.documents)
    return run.fitting(list(documents), "documents", row_tokens)


def _documents(run: Run, stream: int) -> Iterator[Conversation]:
    for text in from_scratch(run.task).pretraining_documents(seed=1000 * run.config.seed + stream):
        ids = (*run.tokenizer.encode_plain(text), run.tokenizer.stop_token_ids[0])
        yield Conversation(
            role="document", turns=(Turn(role="model", token_ids=ids, text=text, trained=True),)
        )


def _mixed_documents(run: Run, conversations: list[Conversation]) -> list[Conversation]:
    """Documents kept in the mixture, so that learning the format does not unlearn copying."""
    share = run.config.warmup.pretraining_share
    if run.config.init or share == 0:
        return []
    wanted = share * sum(len(conversation.token_ids) for conversation in conversations)
    rows, tokens = [], 0
    for row in itertools.islice(_documents(run, stream=1), run.config.pretraining.documents):
        if tokens >= wanted:
            break
        if len(row.token_ids) <= run.config.trainer.row_tokens:
            rows.append(row)
            tokens += len(row.token_ids)
    return rows
