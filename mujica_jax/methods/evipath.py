"""EviPath: learn trajectories that a teacher writes backwards from answer and evidence ("From Evidence to Trajectory").

    warm-up     optional; of 0 steps, what the run starts from is evaluated as it is
    synthesis   one trajectory a question (`agents/synthesis.py`), kept if it answers the question rightly
    learning    conversational fine-tuning: maximum likelihood of planner conversations of several turns and worker
                conversations of one, as rows of one objective (equation 7), for some epochs

The teacher is the model behind an endpoint (the paper's has 70B), the policy itself, or the script of a world from
scratch, which writes its own answer to a sub-question in both of the worker's steps. With `tune` one of the two roles
is learnt; two such runs and `eval --worker` are planner and worker as two models (table 5).

Differences from the paper, beside those of the synthesis:

- The learning rate falls along a cosine to `end_learning_rate` after its rise.
- Conversations are packed, and a step takes rows, not conversations; every trained token of a batch weighs the same.
- Equation 7 adds up probabilities and conditions the last turn on the answer; we read log-likelihoods, and the answer
  stands in no prompt that is learnt.
- A question whose trajectory fails is left out. Questions are taken in the task's order, at most
  `sampling.questions_per_round`.

Round 1 of the run directory holds the trajectories, for round 0 is that of a warm-up from worked examples.
"""

import collections
import functools
import time
from collections.abc import Sequence

from mujica_jax.agents.agent import EnginePolicy, OnEpisode
from mujica_jax.agents.mujica import PLANNER, WORKER
from mujica_jax.agents.scripted import ScriptedPolicy
from mujica_jax.agents.synthesis import FAILED, Synthesis, Synthesizer
from mujica_jax.agents.teacher import REFUSED, RETRIES, TEACHER_PROMPT_TOKENS, TEACHER_TOKENS, Teacher
from mujica_jax.config.schema import EviPathConfig, MujicaConfig
from mujica_jax.errors import UserError
from mujica_jax.learning.trainer import steps_of_epochs
from mujica_jax.methods.evaluation import right_ones
from mujica_jax.methods.phases import Phase, PhaseResult, PhaseState
from mujica_jax.methods.remote import open_endpoint
from mujica_jax.methods.rounds import attempt, close_round, finished_round, method_of, sampling
from mujica_jax.methods.run import KEPT_SHARDS, Run
from mujica_jax.methods.shares import play_share
from mujica_jax.methods.supervised import begin, with_control
from mujica_jax.records import Conversation, Question, StopReason, Trajectory
from mujica_jax.retrieval.text.similarity import find_similarity
from mujica_jax.runtime import distributed
from mujica_jax.trajectories.packing import pack, too_long
from mujica_jax.trajectories.select import mean_reward, training_rows
from mujica_jax.trajectories.store import ShardEntry

EVIPATH = Phase(name="evipath", step=1)
TUNED = {"both": (PLANNER, WORKER), "planner": (PLANNER,), "executor": (WORKER,)}


def evipath(run: Run) -> list[PhaseResult]:
    """The start, the learnt trajectories, and the control if asked for."""
    config = method_of(run, EviPathConfig)
    synthesizer = _synthesizer(run)
    state, started, demonstrations = begin(run)
    began = time.monotonic()
    questions = _questions(run)
    trajectories = _synthesize(run, state, synthesizer, questions)
    kept = right_ones(questions, trajectories, run.task.rule)
    conversations = [row for row in training_rows(kept) if row.role in TUNED[config.tune]]
    rows = run.fitting(conversations)
    run.progress.line(
        f"{EVIPATH.name}: {len(kept)} of {len(trajectories)} trajectories are kept, after "
        f"{_summed(trajectories)[RETRIES]} retries of the teacher; not kept: {_not_kept(trajectories, kept) or 'none'}"
    )
    if not rows:
        raise UserError(
            f"of {len(trajectories)} trajectories {len(kept)} are right, and none of their {len(conversations)} "
            f"conversations can be learnt ({_not_kept(trajectories, kept)}): ask another teacher, give more questions, "
            f"or raise trainer.row_tokens {run.config.trainer.row_tokens}"
        )
    slots = run.config.trainer.rows_per_step * run.config.trainer.row_tokens
    with run.clock.stage("packing"):
        packed = pack(rows, row_tokens=run.config.trainer.row_tokens, seed=run.config.seed)
    steps = steps_of_epochs(packed.num_rows, run.config.trainer.rows_per_step, config.epochs)
    learnt = run.learn(
        EVIPATH.name,
        state,
        lambda: packed,
        steps=steps,
        peak=config.learning_rate,
        end_value=config.end_learning_rate,
        warmup_steps=round(config.warmup_ratio * steps),
    )
    run.commit_policy(learnt, EVIPATH.step)
    counts = _summed(trajectories)
    forward = counts[TEACHER_TOKENS] + counts[TEACHER_PROMPT_TOKENS] if config.teacher == "policy" else 0
    spent = {"accepted": len(kept), "forward_tokens": forward, "trained_slots": steps * slots}
    result = run.finish_phase(EVIPATH, learnt, began=began, trajectories=len(trajectories), **spent)
    _write_metrics(run, trajectories, kept, conversations, rows, steps)
    return with_control(run, state, demonstrations, started, [result])


def _synthesizer(run: Run) -> Synthesizer:
    """Teacher and prompts. A policy that was warmed up knows the agent's prompt; others are shown worked examples."""
    config, agent = method_of(run, EviPathConfig), run.config.agent
    assert isinstance(agent, MujicaConfig), "the configuration was checked to play mujica"
    if config.teacher == "scripted":
        script = ScriptedPolicy(run.tokenizer, seed=run.config.seed)
        teacher = Teacher(policy=script, tokenizer=run.tokenizer, plans=False)
    elif config.teacher == "policy":
        teacher = Teacher(policy=None, tokenizer=run.tokenizer, max_tokens=agent.max_trajectory_tokens)
    else:
        endpoint = open_endpoint(config.remote, run.store.root)
        teacher = Teacher(policy=EnginePolicy(endpoint.generator), tokenizer=endpoint.tokenizer)
    warmed_up = config.teacher != "remote" and bool(run.config.warmup.steps)
    return Synthesizer(
        Synthesis(
            method=config,
            agent=agent,
            tokenizer=run.tokenizer,
            teacher=teacher,
            similarity=find_similarity(config.embedder),
            prompt=agent.prompt if warmed_up else "few_shot",
            rule=run.task.rule,
        )
    )


def _questions(run: Run) -> list[Question]:
    """The first ones; a script follows triples, and plays questions that have some."""
    scripted = method_of(run, EviPathConfig).teacher == "scripted"
    questions = [question for question in run.task.questions("train") if question.evidences or not scripted]
    if not questions:
        raise UserError(
            f"no training question of task {run.task.name} has gold triples and method.teacher is scripted: choose "
            "another teacher"
        )
    return questions[: run.config.sampling.questions_per_round]


def _synthesize(run: Run, state: PhaseState, agent: Synthesizer, questions: Sequence[Question]) -> list[Trajectory]:
    """One trajectory a question, in shards. Raises UserError as soon as all that a teacher wrote is malformed."""
    number, config = EVIPATH.step, method_of(run, EviPathConfig)
    name = f"{EVIPATH.name}: synthesis"
    earlier = finished_round(run, number)
    if earlier is not None:
        return earlier[0]
    size = run.config.sampling.shard_questions
    shards = [questions[start : start + size] for start in range(0, len(questions), size)]
    if distributed.is_primary():
        ids = [[question.id for question in shard] for shard in shards]
        run.store.write_plan(number, {"policy_version": 0, "shards": ids, "mode": config.mode})
    run.preemption.enter(name, kept=KEPT_SHARDS)
    if config.teacher == "policy":
        run.use_policy(state, 0)

    def unit(index: int, on_episode: OnEpisode) -> tuple[ShardEntry, list[Trajectory]]:
        attempts = [attempt(run, question, 0, number) for question in shards[index]]
        concurrency = config.remote.concurrency if config.teacher == "remote" else None
        return run.sample(number, index, attempts, on_episode, agent=agent, concurrency=concurrency)

    units = [functools.partial(unit, index) for index in range(len(shards))]
    entries: list[ShardEntry] = []
    trajectories: list[Trajectory] = []
    made = failed = 0
    with sampling(run, name, number, total=len(questions), unit="questions") as stage:

        def on_episode(trajectory: Trajectory) -> None:
            nonlocal made, failed
            made, failed = made + 1, failed + (trajectory.stop_reason is StopReason.SYNTHESIS_FAILED)
            stage.update(made, failed=failed)

        play_share(run.progress, name, units)
        for play in units:
            entry, found = play(on_episode)
            entries.append(entry)
            trajectories += found
            written = [trajectory for trajectory in trajectories if not trajectory.is_environment_fault]
            if written and all(one.stop_reason is StopReason.SYNTHESIS_FAILED for one in written):
                raise UserError(
                    f"nothing that the teacher {config.teacher} wrote for {len(trajectories)} questions can be used "
                    f"({_not_kept(trajectories, [])}); what was made is kept: ask another teacher, or begin another "
                    f"run with more than method.max_tries {config.max_tries}"
                )
    close_round(run, number, entries, mean_reward=mean_reward(trajectories))
    return trajectories


def _summed(trajectories: Sequence[Trajectory]) -> collections.Counter[str]:
    total: collections.Counter[str] = collections.Counter()
    for trajectory in trajectories:
        total.update({name: round(count) for name, count in trajectory.counts.items()})
    return total


def _reasons(trajectories: Sequence[Trajectory], kept: Sequence[Trajectory]) -> dict[str, int]:
    """Why trajectories are not kept, the commonest reason first: a teacher's failing turn, another end of the episode,
    or a wrong answer."""
    right = {id(trajectory) for trajectory in kept}
    found: collections.Counter[str] = collections.Counter()
    for trajectory in trajectories:
        failed = [name.removeprefix(FAILED) for name in trajectory.counts if name.startswith(FAILED)]
        ended = trajectory.stop_reason
        why = failed[0] if failed else "wrong_answer" if ended is StopReason.ANSWERED else ended.value
        found[why] += id(trajectory) not in right
    return {why: count for why, count in sorted(found.items(), key=lambda item: (-item[1], item[0])) if count}


def _not_kept(trajectories: Sequence[Trajectory], kept: Sequence[Trajectory]) -> str:
    return ", ".join(f"{why} {count}" for why, count in _reasons(trajectories, kept).items())


def _write_metrics(
    run: Run,
    trajectories: Sequence[Trajectory],
    kept: Sequence[Trajectory],
    conversations: Sequence[Conversation],
    rows: Sequence[Conversation],
    steps: int,
) -> None:
    counts = _summed(trajectories)
    refused = {name: count for name, count in sorted(counts.items()) if name.startswith(REFUSED)}
    failed = {f"{FAILED}{why}": count for why, count in _reasons(trajectories, kept).items()}
    values = {
        "trajectories": len(trajectories),
        "kept": len(kept),
        RETRIES: counts[RETRIES],
        TEACHER_TOKENS: counts[TEACHER_TOKENS],
        TEACHER_PROMPT_TOKENS: counts[TEACHER_PROMPT_TOKENS],
        "planner_rows": sum(row.role == PLANNER for row in rows),
        "worker_rows": sum(row.role == WORKER for row in rows),
        "too_long": too_long(conversations, run.config.trainer.row_tokens),
        "steps": steps,
    }
    run.metrics.write("evipath", EVIPATH.step, {**values, **refused, **failed})
