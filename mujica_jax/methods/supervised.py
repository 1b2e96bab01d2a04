"""Before MyGO: a policy that knows the format.

From scratch: read plain text about the training side of the task (in place of pre-training), then learn a fixed set of scripted
demonstrations by maximum likelihood. With a checkpoint (`--init`): sample trajectories under worked examples, keep those with
EM = 1, and learn them without the examples (appendix D.3 of the Mujica-MyGO paper).
"""

import asyncio
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Sequence

from mujica_jax import metrics
from mujica_jax.agents import protocol
from mujica_jax.agents.dialogue import with_system
from mujica_jax.agents.mujica import Attempt, Mujica
from mujica_jax.agents.scripted import ScriptedPolicy
from mujica_jax.errors import UserError
from mujica_jax.learning.trainer import TrainState
from mujica_jax.methods.run import KEPT_SHARDS, SAMPLING, PhaseResult, Run, tokens_of
from mujica_jax.methods.shares import play_share
from mujica_jax.records import Conversation, Question, Trajectory, Turn
from mujica_jax.rewards import BEST_REWARD
from mujica_jax.runtime import distributed
from mujica_jax.trajectories.packing import pack, too_long
from mujica_jax.trajectories.select import accepts, training_rows

ROUND = 0  # the warm-up's trajectories are round 0 of the run directory
POLICY = 0
NAME = "warm-up"
READING = "reading"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Demonstrations:
    """What the warm-up learnt from."""

    rows: list[Conversation]  # all of it
    rewarded: list[Conversation]  # the rows of those trajectories that earned the best reward


def warm_up(run: Run) -> tuple[TrainState, PhaseResult, Demonstrations]:
    """The warmed-up state, its phase, and what it was trained on."""
    began = time.monotonic()
    config = run.config.warmup
    trajectories, kept = _few_shot(run) if run.config.init else _scripted(run)
    conversations = fitting(run, training_rows(kept))
    if not conversations:
        raise UserError(_why_nothing_to_learn(run, len(trajectories), kept))
    state = run.learn(
        NAME,
        run.initial_state if run.config.init else lambda: _read(run),
        lambda: pack(
            conversations + _mixed_reading(run, conversations),
            row_tokens=run.config.trainer.row_tokens,
            seed=run.config.seed,
        ),
        steps=config.steps,
        peak=config.learning_rate,
        floor=config.learning_rate_floor,
        warmup_steps=min(20, config.steps),
    )
    run.commit_policy(state, POLICY)
    steps = config.steps if run.config.init else config.steps + run.config.reading.steps
    result = run.finish_phase(
        NAME,
        state,
        POLICY,
        began=began,
        trajectories=len(trajectories),
        accepted=len(kept),
        forward_tokens=tokens_of(trajectories) if run.config.init else 0,
        trained_slots=steps * run.config.trainer.rows_per_step * run.config.trainer.row_tokens,
    )
    rewarded = training_rows([t for t in kept if accepts(t.reward, k=BEST_REWARD, best_reward=BEST_REWARD)])
    limit = run.config.trainer.row_tokens
    return state, result, Demonstrations(rows=conversations, rewarded=_trainable(rewarded, limit))


def fitting(run: Run, conversations: list[Conversation]) -> list[Conversation]:
    """Conversations that fit a row and train anything; how many do not is said."""
    limit = run.config.trainer.row_tokens
    trained = [conversation for conversation in conversations if any(conversation.loss_mask)]
    kept = _trainable(trained, limit)
    _say_left_out(run, too_long(trained, limit), len(trained), "conversations")
    return kept


def _say_left_out(run: Run, left_out: int, of: int, what: str) -> None:
    if left_out:
        run.progress.line(f"{left_out} of {of} {what} exceed {run.config.trainer.row_tokens} tokens and are left out")


def _trainable(conversations: Sequence[Conversation], limit: int) -> list[Conversation]:
    return [row for row in conversations if any(row.loss_mask) and len(row.token_ids) <= limit]


def _why_nothing_to_learn(run: Run, sampled: int, kept: list[Trajectory]) -> str:
    if kept:
        shortest = min(len(row.token_ids) for row in training_rows(kept))
        return (
            f"no conversation of the {len(kept)} warm-up trajectories fits trainer.row_tokens {run.config.trainer.row_tokens}, the "
            f"shortest has {shortest} tokens: raise trainer.row_tokens"
        )
    if run.config.init:
        return (
            f"none of {sampled} few-shot trajectories was answered correctly: raise warmup.few_shot_attempts "
            f"{run.config.warmup.few_shot_attempts}, or start from a stronger model"
        )
    return (
        f"none of {sampled} scripted demonstrations reaches its gold answer: the limits of agent cut them, raise "
        f"agent.max_iterations {run.config.agent.max_iterations} or agent.max_turn_tokens {run.config.agent.max_turn_tokens}"
    )


def _scripted(run: Run) -> tuple[list[Trajectory], list[Trajectory]]:
    """Play the demonstrations in their environments. A script that fails by an oversight stays in, as the noise it is meant to be; one
    that cannot reach the gold answer is left out.
    """
    policy = ScriptedPolicy(run.tokenizer, oversight=run.config.warmup.oversight, seed=run.config.seed)
    demonstrations = run.task.demonstrations()

    async def play() -> list[Trajectory]:
        played = []
        for question, environment in demonstrations:
            run.preemption.check()
            attempt = Attempt(question=question, number=0, seed=run.config.seed, temperature=0.0)
            played.append(await run.agent.run(attempt, environment, policy, policy.version))
        return played

    run.preemption.enter(f"{NAME}: playing the demonstrations")
    trajectories = asyncio.run(play())
    golds = {question.id: question.answers for question, _ in demonstrations}
    right = [metrics.score(t.answer, golds[t.question_id], run.task.rule).em == 1.0 for t in trajectories]
    slipped = [any(search.query in policy.overlooked for search in t.searches) for t in trajectories]
    kept = [t for t, *keep in zip(trajectories, right, slipped, strict=True) if any(keep)]
    run.progress.line(
        f"{sum(right)} of {len(trajectories)} scripted demonstrations reach the gold answer, {len(kept) - sum(right)} of the others "
        f"fail by an oversight; these {len(kept)} are kept"
    )
    return trajectories, kept


def _few_shot(run: Run) -> tuple[list[Trajectory], list[Trajectory]]:
    """Sample with worked examples in the prompt until enough trajectories are right, then take the examples out."""
    config = run.config
    run.preemption.enter(f"{NAME}: sampling with worked examples", kept=KEPT_SHARDS)
    run.use_policy(run.initial_state(), POLICY)
    few_shot = Mujica(run.tokenizer, dataclasses.replace(config.agent, prompt="few_shot"), run.agent.reward)
    questions = run.task.questions("train")
    wanted = config.warmup.few_shot_trajectories
    sampled: list[Trajectory] = []
    kept: list[Trajectory] = []
    orders = itertools.product(
        range(config.warmup.few_shot_attempts), range(0, len(questions), config.mygo.shard_questions)
    )

    def chosen(start: int) -> Sequence[Question]:
        return questions[start : start + config.mygo.shard_questions]

    def unit(shard: int, order: tuple[int, int], heard: Callable[[Trajectory], None]) -> list[Trajectory]:
        number, start = order
        attempts = [
            Attempt(question=question, number=number, seed=config.seed, temperature=config.mygo.temperature)
            for question in chosen(start)
        ]
        return run.sample(ROUND, shard, attempts, heard, agent=few_shot)[1]

    name = f"{NAME}: sampling with worked examples"
    with (
        run.counted(SAMPLING, ROUND),
        run.progress.stage(name, total=wanted, unit="correct", live=run.counters.figures) as stage,
    ):
        # As many shards at a time as there are processes; what is played beyond what is wanted is not used, whatever their number.
        numbered = enumerate(orders)
        while group := list(itertools.islice(numbered, distributed.processes())):
            play_share(run.progress, name, [functools.partial(unit, shard, order) for shard, order in group])
            for shard, order in group:
                if len(kept) >= wanted:
                    break
                trajectories = unit(shard, order, lambda trajectory: None)
                sampled += trajectories
                golds = {question.id: question.answers for question in chosen(order[1])}
                kept += [
                    t for t in trajectories if metrics.score(t.answer, golds[t.question_id], run.task.rule).em == 1.0
                ]
                stage.update(min(len(kept), wanted), sampled=len(sampled))
            if len(kept) >= wanted:
                break
    return sampled, [_zero_shot(run, trajectory) for trajectory in kept[:wanted]]


def _zero_shot(run: Run, trajectory: Trajectory) -> Trajectory:
    """The same trajectory under the prompt that is trained."""

    def prompted(conversation: Conversation) -> Conversation:
        role = "planner" if conversation.role == "planner" else "worker"
        system = protocol.system_prompt(role, run.task.environment.kind, run.config.agent.prompt)
        return with_system(conversation, run.tokenizer, system)

    return dataclasses.replace(
        trajectory, planner=prompted(trajectory.planner), workers=tuple(map(prompted, trajectory.workers))
    )


def _read(run: Run) -> TrainState:
    """Pre-training on reading documents, from the random start."""
    config = run.config.reading
    if config.steps == 0:
        return run.initial_state()
    return run.learn(
        READING,
        run.initial_state,
        lambda: pack(
            reading_rows(run, config.documents, stream=0),
            row_tokens=run.config.trainer.row_tokens,
            seed=run.config.seed,
        ),
        steps=config.steps,
        peak=config.learning_rate,
        floor=config.learning_rate_floor,
        warmup_steps=min(50, config.steps),
    )


def reading_rows(run: Run, count: int, stream: int) -> list[Conversation]:
    """`count` documents as rows, all of their tokens trained, without those longer than a row; `stream` chooses other documents."""
    documents = run.task.reading_documents(seed=1000 * run.config.seed + stream)
    rows = []
    for text in itertools.islice(documents, count):
        ids = (*run.tokenizer.encode_plain(text), run.tokenizer.stop_token_ids[0])
        turn = Turn(role="model", token_ids=ids, text=text, trained=True)
        rows.append(Conversation(role="single", turns=(turn,)))
    kept = [row for row in rows if len(row.token_ids) <= run.config.trainer.row_tokens]
    _say_left_out(run, len(rows) - len(kept), len(rows), "reading documents")
    return kept


def _mixed_reading(run: Run, conversations: list[Conversation]) -> list[Conversation]:
    """Reading documents kept in the mixture, so that learning the format does not unlearn copying."""
    share = run.config.warmup.reading_share
    if run.config.init or share == 0:
        return []
    wanted = share * sum(len(conversation.token_ids) for conversation in conversations)
    rows, tokens = [], 0
    for row in reading_rows(run, run.config.reading.documents, stream=1):
        if tokens >= wanted:
            break
        rows.append(row)
        tokens += len(row.token_ids)
    return rows
