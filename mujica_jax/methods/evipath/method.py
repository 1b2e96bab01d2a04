"""EviPath: learn trajectories that a teacher writes backwards from answer and evidence.

The paper is "From Evidence to Trajectory".

    warm-up     optional; of 0 steps, what the run starts from is evaluated as it is
    synthesis   one trajectory a question (`methods/evipath/synthesis.py`), kept if it answers the question
                rightly
    learning    conversational fine-tuning: maximum likelihood of planner conversations of several
                turns and worker conversations of one, as rows of one objective (equation 7), for
                some epochs

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
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence

from mujica_jax.agents.agent import OnEpisode
from mujica_jax.agents.mujica import PLANNER, WORKER
from mujica_jax.config.schema import EviPathConfig
from mujica_jax.errors import UserError
from mujica_jax.learning.packing import pack, too_long
from mujica_jax.learning.trainer import steps_of_epochs
from mujica_jax.methods.evipath.authors import Author, find_author, lessons
from mujica_jax.methods.evipath.synthesis import FAILED
from mujica_jax.methods.evipath.teacher import (
    REFUSED,
    RETRIES,
    TEACHER_PROMPT_TOKENS,
    TEACHER_TOKENS,
)
from mujica_jax.methods.supervised import begin, with_control
from mujica_jax.metrics import Rule
from mujica_jax.records import Conversation, Question, StopReason, Trajectory
from mujica_jax.report.progress import Stage
from mujica_jax.runs import evaluation, learning, sampling
from mujica_jax.runs.evaluation import right_ones
from mujica_jax.runs.learning import LearningPlan
from mujica_jax.runs.phases import Phase, PhaseCost, PhaseResult, PhaseState
from mujica_jax.runs.run import Run, method_of
from mujica_jax.runs.versions import commit_policy, use_policy
from mujica_jax.runtime import distributed
from mujica_jax.tasks.task import ParagraphTask
from mujica_jax.trajectories.select import mean_reward, training_rows
from mujica_jax.trajectories.store import ShardEntry

EVIPATH = Phase(name="evipath", step=1)
TUNED = {"both": (PLANNER, WORKER), "planner": (PLANNER,), "executor": (WORKER,)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Selection:
    """The trajectories of a synthesis, and the rows that are learnt of them."""

    trajectories: list[Trajectory]  # all
    right_trajectories: list[Trajectory]  # that answer their question
    kept_trajectories: list[Trajectory]  # of the right ones, at most `method.trajectories`
    conversations: list[Conversation]  # of what is kept, of the roles that are tuned
    rows: list[Conversation]  # of these, what fits a row


def evipath(run: Run) -> list[PhaseResult]:
    """Run the start, learn the trajectories, and run the control if it is asked for."""
    config = method_of(run, EviPathConfig)
    open_author = find_author(run)
    state, first_result, demonstrations = begin(run, more_rows=lambda: lessons(run))
    cost = PhaseCost(start_time=time.monotonic())

    # Synthesize: let the teacher write a trajectory for each question.
    questions = _questions(run)
    _print_lacking_paragraphs(run, questions)
    trajectories = _synthesize(run, state, open_author, questions)

    # Select: keep the trajectories that answer rightly, and the rows of the roles that are tuned.
    selection = _select(run, questions, trajectories)

    # Learn.
    with run.clock.stage("packing"):
        packed = pack(
            selection.rows, sequence_length=run.config.trainer.sequence_length, seed=run.config.seed
        )
    steps = steps_of_epochs(packed.num_rows, run.config.trainer.batch_size, config.epochs)
    plan = LearningPlan(
        steps=steps,
        peak=config.learning_rate,
        end_value=config.end_learning_rate,
        warmup_steps=round(config.warmup_ratio * steps),
    )
    learnt_state = learning.train(run, EVIPATH.name, state, packed, plan=plan)

    # Commit and evaluate.
    commit_policy(run, learnt_state, EVIPATH.step)
    cost.trajectories = len(trajectories)
    cost.accepted = len(selection.kept_trajectories)
    cost.trained_slots = steps * run.config.trainer.tokens_per_step
    if config.teacher in ("policy", "checkpoint"):
        counts = _total_counts(trajectories)
        cost.forward_tokens = counts[TEACHER_TOKENS] + counts[TEACHER_PROMPT_TOKENS]
    result = evaluation.finish(run, EVIPATH, learnt_state, cost)
    _write_metrics(run, selection, steps=steps)
    return with_control(run, state, demonstrations, first_result, [result])


def _questions(run: Run) -> list[Question]:
    """Return the first training questions.

    A script follows triples, so it plays questions that have some.
    """
    is_scripted = method_of(run, EviPathConfig).teacher == "scripted"
    questions = [
        question
        for question in run.task.questions("train")
        if question.evidences or not is_scripted
    ]
    if not questions:
        raise UserError(
            f"no training question of task {run.task.name} has gold triples and method.teacher is "
            "scripted: choose another teacher"
        )
    return questions[: run.config.sampling.questions_per_round]


def _print_lacking_paragraphs(run: Run, questions: Sequence[Question]) -> None:
    """Print how many questions bring no paragraphs of their own.

    Their pools hold what a search finds instead.
    """
    config = method_of(run, EviPathConfig)
    task = run.task
    uses_own_paragraphs = config.mode == "abductive" and config.distractors == "own"
    if not uses_own_paragraphs or task.environment_kind != "text":
        return
    num_lacking = 0
    for question in questions:
        if not isinstance(task, ParagraphTask) or not task.own_paragraphs(question):
            num_lacking += 1
    if num_lacking:
        run.progress.line(
            f"{EVIPATH.name}: {num_lacking} of {len(questions)} questions bring no paragraphs of "
            "their own; their workers read what searches find, with the gold passages among it"
        )


def _select(run: Run, questions: Sequence[Question], trajectories: list[Trajectory]) -> _Selection:
    """Choose what is learnt, and print it. Raises UserError if that is nothing."""
    config = method_of(run, EviPathConfig)
    right = right_ones(questions, trajectories, run.task.rule)
    kept_trajectories = right[: config.trajectories or None]
    num_kept = len(kept_trajectories)
    if num_kept < config.trajectories:
        run.progress.line(
            f"{EVIPATH.name}: all {len(questions)} questions give {num_kept} right trajectories, "
            f"and method.trajectories is {config.trajectories}: give more questions with "
            "--sampling.questions-per-round"
        )
    conversations = [
        row for row in training_rows(kept_trajectories) if row.role in TUNED[config.tune]
    ]
    rows = learning.rows_that_fit(run, conversations)

    num_beyond = len(right) - num_kept
    beyond = f" ({num_beyond} more are right)" if num_beyond else ""
    reasons = _reasons_in_words(trajectories, right)
    run.progress.line(
        f"{EVIPATH.name}: {num_kept} of {len(trajectories)} trajectories are kept{beyond}, after "
        f"{_total_counts(trajectories)[RETRIES]} retries of the teacher; not kept: "
        f"{reasons or 'none'}"
    )
    if not rows:
        raise UserError(
            f"of {len(trajectories)} trajectories {num_kept} are right, and none of their "
            f"{len(conversations)} conversations can be learnt ({reasons}): ask another teacher, "
            "give more questions, or raise trainer.sequence_length "
            f"{run.config.trainer.sequence_length}"
        )
    return _Selection(
        trajectories=trajectories,
        right_trajectories=right,
        kept_trajectories=kept_trajectories,
        conversations=conversations,
        rows=rows,
    )


def _synthesize(
    run: Run, state: PhaseState, open_author: Callable[[], Author], questions: Sequence[Question]
) -> list[Trajectory]:
    """Return one trajectory a question, made in shards, until enough of them are right.

    Raises UserError as soon as all that a teacher wrote is malformed.
    """
    config = method_of(run, EviPathConfig)
    number = EVIPATH.step
    name = f"{EVIPATH.name}: synthesis"
    finished = sampling.finished_round(run, number)
    if finished is not None:
        return finished.trajectories

    # Plan the shards, and open the teacher.
    shard_size = run.config.sampling.questions_per_shard
    shards = [
        questions[start : start + shard_size] for start in range(0, len(questions), shard_size)
    ]
    if distributed.is_primary():
        question_ids = []
        for shard in shards:
            question_ids.append([question.id for question in shard])
        plan = {"policy_version": 0, "shards": question_ids, "mode": config.mode}
        run.store.write_plan(number, plan)
    run.preemption.enter(name, kept_text=sampling.KEPT_SHARDS)
    if config.teacher == "policy":
        use_policy(run, state, 0)
    author = open_author()

    def play(index: int, on_episode: OnEpisode) -> tuple[ShardEntry, list[Trajectory]]:
        author.begin_shard()
        attempts = [sampling.attempt(run, question, 0, number) for question in shards[index]]
        return sampling.play_attempts(
            run,
            number,
            index,
            attempts,
            on_episode,
            agent=author.synthesizer,
            concurrency=author.concurrency,
        )

    units = [functools.partial(play, index) for index in range(len(shards))]
    # If the synthesis may end early, the hosts share out a few shards at a time: one for each host.
    group_size = distributed.processes() if config.trajectories else len(units)
    with sampling.sampling_stage(
        run, name, number, total=len(questions), unit="questions"
    ) as stage:
        synthesized = _Synthesized(run.task.rule, stage, num_wanted=config.trajectories)
        for start in range(0, len(units), group_size):
            group = range(start, min(start + group_size, len(units)))
            sampling.play_share(run.progress, name, [units[index] for index in group])
            for index in group:
                if synthesized.has_enough:
                    break
                entry, trajectories = units[index](synthesized.on_episode)
                synthesized.add(entry, trajectories, shards[index])
                _check_usable(synthesized, config)
            if synthesized.has_enough:
                break
    trajectories = synthesized.trajectories
    sampling.close_round(run, number, synthesized.entries, mean_reward=mean_reward(trajectories))
    return trajectories


def _check_usable(synthesized: "_Synthesized", config: EviPathConfig) -> None:
    """Raise UserError if all that the teacher wrote is malformed."""
    if synthesized.has_usable:
        return
    trajectories = synthesized.trajectories
    raise UserError(
        f"nothing that the teacher {config.teacher} wrote for {len(trajectories)} questions can be "
        f"used ({_reasons_in_words(trajectories, [])}); what was made is kept: ask another "
        f"teacher, or begin another run with more than method.max_tries {config.max_tries}"
    )


class _Synthesized:
    """What a synthesis has made so far.

    It has enough with `num_wanted` right trajectories. If that is 0, it asks all questions.
    """

    def __init__(self, rule: Rule, stage: Stage, *, num_wanted: int) -> None:
        self._rule: Rule = rule
        self._stage = stage
        self._num_wanted = num_wanted
        self._num_episodes = 0  # with those of the shard under way
        self._num_failed = 0
        self._num_right = 0
        self.entries: list[ShardEntry] = []
        self.trajectories: list[Trajectory] = []

    def on_episode(self, trajectory: Trajectory) -> None:
        """Count an episode of the shard under way, and show it."""
        self._num_episodes += 1
        if trajectory.stop_reason is StopReason.SYNTHESIS_FAILED:
            self._num_failed += 1
        self._stage.update(self._num_episodes, failed=self._num_failed)

    def add(
        self, entry: ShardEntry, trajectories: Sequence[Trajectory], questions: Sequence[Question]
    ) -> None:
        """Add a finished shard."""
        self.entries.append(entry)
        self.trajectories += trajectories
        self._num_right += len(right_ones(questions, trajectories, self._rule))

    @property
    def has_enough(self) -> bool:
        return 0 < self._num_wanted <= self._num_right

    @property
    def has_usable(self) -> bool:
        """Whether anything that the teacher wrote can be used, or it wrote nothing yet."""
        written = [
            trajectory for trajectory in self.trajectories if not trajectory.is_environment_fault
        ]
        return not written or any(
            trajectory.stop_reason is not StopReason.SYNTHESIS_FAILED for trajectory in written
        )


def _total_counts(trajectories: Sequence[Trajectory]) -> collections.Counter[str]:
    """Return the sum of the trajectories' counts, by name."""
    total: collections.Counter[str] = collections.Counter()
    for trajectory in trajectories:
        total.update({name: round(count) for name, count in trajectory.counts.items()})
    return total


def _reasons(
    trajectories: Sequence[Trajectory], kept_trajectories: Sequence[Trajectory]
) -> dict[str, int]:
    """Count why trajectories are not kept, the commonest reason first.

    A reason is a teacher's failing turn, another end of the episode, or a wrong answer.
    """
    kept_ids = {id(trajectory) for trajectory in kept_trajectories}
    counts: collections.Counter[str] = collections.Counter()
    for trajectory in trajectories:
        if id(trajectory) not in kept_ids:
            counts[_reason(trajectory)] += 1
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _reason(trajectory: Trajectory) -> str:
    """Return why a trajectory is not kept."""
    failed_turns = [
        name.removeprefix(FAILED) for name in trajectory.counts if name.startswith(FAILED)
    ]
    if failed_turns:
        return failed_turns[0]
    if trajectory.stop_reason is StopReason.ANSWERED:
        return "wrong_answer"
    return trajectory.stop_reason.value


def _reasons_in_words(
    trajectories: Sequence[Trajectory], kept_trajectories: Sequence[Trajectory]
) -> str:
    reasons = _reasons(trajectories, kept_trajectories)
    return ", ".join(f"{reason} {count}" for reason, count in reasons.items())


def _write_metrics(run: Run, selection: _Selection, *, steps: int) -> None:
    """Write what the teacher made and what of it is learnt."""
    counts = _total_counts(selection.trajectories)
    reasons = _reasons(selection.trajectories, selection.right_trajectories)
    refused = {name: count for name, count in sorted(counts.items()) if name.startswith(REFUSED)}
    failed = {f"{FAILED}{reason}": count for reason, count in reasons.items()}
    values = {
        "trajectories": len(selection.trajectories),
        "right": len(selection.right_trajectories),
        "kept": len(selection.kept_trajectories),
        RETRIES: counts[RETRIES],
        TEACHER_TOKENS: counts[TEACHER_TOKENS],
        TEACHER_PROMPT_TOKENS: counts[TEACHER_PROMPT_TOKENS],
        "planner_rows": sum(row.role == PLANNER for row in selection.rows),
        "worker_rows": sum(row.role == WORKER for row in selection.rows),
        "too_long": too_long(selection.conversations, run.config.trainer.sequence_length),
        "steps": steps,
    }
    run.metrics.write("evipath", EVIPATH.step, {**values, **refused, **failed})
