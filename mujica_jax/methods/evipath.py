"""EviPath: learn trajectories that a teacher writes backwards from answer and evidence ("From
Evidence to Trajectory").

    warm-up     optional; of 0 steps, what the run starts from is evaluated as it is
    synthesis   one trajectory a question (`agents/synthesis.py`), kept if it answers the question rightly
    learning    conversational fine-tuning: maximum likelihood of planner conversations of several turns and worker
                conversations of one, as rows of one objective (equation 7), for some epochs

The teacher is a language model (`evipath_teacher.py`): the policy itself, a second checkpoint, or
the model behind an endpoint (the paper's has 70B). It serves the abductive and the deductive mode
alike, so table 4's comparison has one teacher, and `method.trajectories` gives both rows the same
number of trajectories. The script of a world from scratch is no language model: it replays the
demonstrations that a warm-up shows, without noise. It shows what perfect trajectories teach, and
says nothing about abduction.

With `tune` one of the two roles is learnt; two such runs and `eval --worker` are planner and worker
as two models (table 5).

Differences from the paper, beside those of the synthesis:

- The learning rate falls along a cosine to `end_learning_rate` after its rise.
- Conversations are packed, and a step takes rows, not conversations; every trained token of a batch
  weighs the same.
- Equation 7 adds up probabilities and conditions the last turn on the answer; we read
  log-likelihoods, and the answer stands in no prompt that is learnt.
- A question whose trajectory fails or answers wrongly is left out, in the deductive mode too: the
  paper names no filter.
- Questions are taken in the task's order, at most `sampling.questions_per_round`.
- A run has one task, where the paper learns from three data sets at once.

Round 1 of the run directory holds the trajectories, for round 0 is that of a warm-up from worked
examples.
"""

import collections
import functools
import time
from collections.abc import Callable, Sequence

from mujica_jax.agents.agent import OnEpisode
from mujica_jax.agents.mujica import PLANNER, WORKER
from mujica_jax.agents.synthesis import FAILED
from mujica_jax.agents.teacher import REFUSED, RETRIES, TEACHER_PROMPT_TOKENS, TEACHER_TOKENS
from mujica_jax.config.schema import EviPathConfig
from mujica_jax.errors import UserError
from mujica_jax.learning.trainer import steps_of_epochs
from mujica_jax.methods.evaluation import right_ones
from mujica_jax.methods.evipath_teacher import Author, find_author, lessons
from mujica_jax.methods.phases import Phase, PhaseResult, PhaseState
from mujica_jax.methods.rounds import attempt, close_round, finished_round, method_of, sampling
from mujica_jax.methods.run import KEPT_SHARDS, Run
from mujica_jax.methods.shares import play_share
from mujica_jax.methods.supervised import begin, with_control
from mujica_jax.metrics import Rule
from mujica_jax.records import Conversation, Question, StopReason, Trajectory
from mujica_jax.runtime import distributed
from mujica_jax.tasks.task import ParagraphTask
from mujica_jax.trajectories.packing import pack, too_long
from mujica_jax.trajectories.select import mean_reward, training_rows
from mujica_jax.trajectories.store import ShardEntry

EVIPATH = Phase(name="evipath", step=1)
TUNED = {"both": (PLANNER, WORKER), "planner": (PLANNER,), "executor": (WORKER,)}


def evipath(run: Run) -> list[PhaseResult]:
    """The start, the learnt trajectories, and the control if asked for."""
    config = method_of(run, EviPathConfig)
    open_author = find_author(run)
    state, started, demonstrations = begin(run, more_rows=lambda: lessons(run))
    began = time.monotonic()
    questions = _questions(run)
    _say_what_pools_hold(run, questions)
    trajectories = _synthesize(run, state, open_author, questions)
    right = right_ones(questions, trajectories, run.task.rule)
    kept = right[: config.trajectories or None]
    if len(kept) < config.trajectories:
        run.progress.line(
            f"{EVIPATH.name}: all {len(questions)} questions give {len(kept)} right trajectories, "
            f"and method.trajectories is {config.trajectories}: give more questions with "
            "--sampling.questions-per-round"
        )
    conversations = [row for row in training_rows(kept) if row.role in TUNED[config.tune]]
    rows = run.fitting(conversations)
    beyond = f" ({len(right) - len(kept)} more are right)" if len(right) > len(kept) else ""
    run.progress.line(
        f"{EVIPATH.name}: {len(kept)} of {len(trajectories)} trajectories are kept{beyond}, after "
        f"{_summed(trajectories)[RETRIES]} retries of the teacher; not kept: "
        f"{_not_kept(trajectories, right) or 'none'}"
    )
    if not rows:
        raise UserError(
            f"of {len(trajectories)} trajectories {len(kept)} are right, and none of their "
            f"{len(conversations)} conversations can be learnt ({_not_kept(trajectories, right)}): "
            "ask another teacher, give more questions, or raise trainer.row_tokens "
            f"{run.config.trainer.row_tokens}"
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
    forward = 0
    if config.teacher in ("policy", "checkpoint"):
        forward = counts[TEACHER_TOKENS] + counts[TEACHER_PROMPT_TOKENS]
    spent = {"accepted": len(kept), "forward_tokens": forward, "trained_slots": steps * slots}
    result = run.finish_phase(EVIPATH, learnt, began=began, trajectories=len(trajectories), **spent)
    _write_metrics(run, trajectories, right, kept, conversations, rows, steps)
    return with_control(run, state, demonstrations, started, [result])


def _questions(run: Run) -> list[Question]:
    """The first ones; a script follows triples, and plays questions that have some."""
    scripted = method_of(run, EviPathConfig).teacher == "scripted"
    questions = [
        question for question in run.task.questions("train") if question.evidences or not scripted
    ]
    if not questions:
        raise UserError(
            f"no training question of task {run.task.name} has gold triples and method.teacher is "
            "scripted: choose another teacher"
        )
    return questions[: run.config.sampling.questions_per_round]


def _say_what_pools_hold(run: Run, questions: Sequence[Question]) -> None:
    """Say where pools hold what a search finds because questions bring no paragraphs of their
    own."""
    config = method_of(run, EviPathConfig)
    if (
        config.mode != "abductive"
        or config.distractors != "own"
        or run.task.environment_kind != "text"
    ):
        return
    task = run.task
    bring_some = [
        isinstance(task, ParagraphTask) and bool(task.own_paragraphs(question))
        for question in questions
    ]
    if lacking := bring_some.count(False):
        run.progress.line(
            f"{EVIPATH.name}: {lacking} of {len(questions)} questions bring no paragraphs of their "
            "own; their workers read what searches find, with the gold passages among it"
        )


def _synthesize(
    run: Run, state: PhaseState, open_author: Callable[[], Author], questions: Sequence[Question]
) -> list[Trajectory]:
    """Return one trajectory a question, made in shards, until enough of them are right.

    Raises UserError as soon as all that a teacher wrote is malformed."""
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
    author = open_author()

    def unit(index: int, on_episode: OnEpisode) -> tuple[ShardEntry, list[Trajectory]]:
        author.begin_shard()
        attempts = [attempt(run, question, 0, number) for question in shards[index]]
        return run.sample(
            number,
            index,
            attempts,
            on_episode,
            agent=author.synthesizer,
            concurrency=author.concurrency,
        )

    units = [functools.partial(unit, index) for index in range(len(shards))]
    # If the synthesis may end early, the hosts share out a few shards at a time: one for each host.
    group_size = distributed.processes() if config.trajectories else len(units)
    made = _Made(run.task.rule, wanted=config.trajectories)
    with sampling(run, name, number, total=len(questions), unit="questions") as stage:

        def on_episode(trajectory: Trajectory) -> None:
            made.count(trajectory)
            stage.update(made.episodes, failed=made.failed)

        for start in range(0, len(units), group_size):
            group = range(start, min(start + group_size, len(units)))
            play_share(run.progress, name, [units[index] for index in group])
            for index in group:
                if made.has_enough:
                    break
                entry, trajectories = units[index](on_episode)
                made.add(entry, trajectories, shards[index])
                if made.nothing_usable:
                    raise UserError(
                        f"nothing that the teacher {config.teacher} wrote for "
                        f"{len(made.trajectories)} questions can be used "
                        f"({_not_kept(made.trajectories, [])}); what was made is kept: ask another "
                        "teacher, or begin another run with more than method.max_tries "
                        f"{config.max_tries}"
                    )
            if made.has_enough:
                break
    close_round(run, number, made.entries, mean_reward=mean_reward(made.trajectories))
    return made.trajectories


class _Made:
    """What a synthesis has made so far. It ends at `wanted` right trajectories; 0: it asks all
    questions."""

    def __init__(self, rule: Rule, wanted: int) -> None:
        self._rule: Rule = rule
        self._wanted = wanted
        self.entries: list[ShardEntry] = []
        self.trajectories: list[Trajectory] = []
        self.episodes = 0  # those of the shard under way among them
        self.failed = 0
        self.right = 0

    def count(self, trajectory: Trajectory) -> None:
        self.episodes += 1
        self.failed += trajectory.stop_reason is StopReason.SYNTHESIS_FAILED

    def add(
        self, entry: ShardEntry, trajectories: Sequence[Trajectory], questions: Sequence[Question]
    ) -> None:
        self.entries.append(entry)
        self.trajectories += trajectories
        self.right += len(right_ones(questions, trajectories, self._rule))

    @property
    def has_enough(self) -> bool:
        return 0 < self._wanted <= self.right

    @property
    def nothing_usable(self) -> bool:
        written = [
            trajectory for trajectory in self.trajectories if not trajectory.is_environment_fault
        ]
        return bool(written) and all(
            trajectory.stop_reason is StopReason.SYNTHESIS_FAILED for trajectory in written
        )


def _summed(trajectories: Sequence[Trajectory]) -> collections.Counter[str]:
    total: collections.Counter[str] = collections.Counter()
    for trajectory in trajectories:
        total.update({name: round(count) for name, count in trajectory.counts.items()})
    return total


def _reasons(trajectories: Sequence[Trajectory], kept: Sequence[Trajectory]) -> dict[str, int]:
    """Why trajectories are not kept, the commonest reason first: a teacher's failing turn, another
    end of the episode, or a wrong answer."""
    right = {id(trajectory) for trajectory in kept}
    found: collections.Counter[str] = collections.Counter()
    for trajectory in trajectories:
        failed = [
            name.removeprefix(FAILED) for name in trajectory.counts if name.startswith(FAILED)
        ]
        ended = trajectory.stop_reason
        why = (
            failed[0] if failed else "wrong_answer" if ended is StopReason.ANSWERED else ended.value
        )
        found[why] += id(trajectory) not in right
    return {
        why: count
        for why, count in sorted(found.items(), key=lambda item: (-item[1], item[0]))
        if count
    }


def _not_kept(trajectories: Sequence[Trajectory], kept: Sequence[Trajectory]) -> str:
    return ", ".join(f"{why} {count}" for why, count in _reasons(trajectories, kept).items())


def _write_metrics(
    run: Run,
    trajectories: Sequence[Trajectory],
    right: Sequence[Trajectory],
    kept: Sequence[Trajectory],
    conversations: Sequence[Conversation],
    rows: Sequence[Conversation],
    steps: int,
) -> None:
    counts = _summed(trajectories)
    refused = {name: count for name, count in sorted(counts.items()) if name.startswith(REFUSED)}
    failed = {f"{FAILED}{why}": count for why, count in _reasons(trajectories, right).items()}
    values = {
        "trajectories": len(trajectories),
        "right": len(right),
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
