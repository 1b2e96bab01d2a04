"""Train with EviPath: a teacher that knows answer and evidence writes trajectories to learn from.

The paper is "From Evidence to Trajectory". The method has three steps:

1. Warm-up (optional). With 0 steps, the start of the run is evaluated without training.
2. Synthesis: the teacher writes one trajectory for each question
   (`methods/evipath/synthesis.py`). The trajectory is kept if it answers the question correctly.
3. Learning: maximise the likelihood of the kept conversations, for some epochs. Planner
   conversations have several turns and worker conversations have one. Both are rows of the same
   objective (equation 7).

The teacher (`methods/evipath/authors.py`) is a language model: the policy itself, a second
checkpoint, or a model behind an endpoint (a 70B model in the paper). The same teacher works in the
abductive and in the deductive mode, so the two modes can be compared as in the paper's table 4.
`method.trajectories` gives both the same number of trajectories. For a model from scratch the
teacher may also be a script, which replays the warm-up's demonstrations without mistakes. This
shows what perfect trajectories teach, but tells nothing about abduction.

With `method.tune` only one role is trained. Two such runs and `eval --worker` give a planner and a
worker that are separate models, as in table 5.

Differences from the paper, in addition to those of the synthesis:

- After its rise, the learning rate falls along a cosine to `end_learning_rate`.
- Conversations are packed into rows, and a batch is a number of rows. Every trained token of a
  batch has the same weight.
- Equation 7 adds up probabilities, and its last turn depends on the answer. We read it as
  log-likelihoods, and no prompt that is learnt contains the answer.
- The paper names no filter. We leave out a question if its trajectory fails or answers wrongly, in
  the deductive mode too.
- Questions are taken in the task's order, at most `sampling.questions_per_round`.
- A run has one task. The paper learns from three datasets at once.

The trajectories are stored as round 1 of the run directory. Round 0 is for the warm-up.
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
from mujica_jax.learning.losses.loss import named_loss
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
from mujica_jax.runs.selection import record_selection
from mujica_jax.runs.versions import commit_policy, use_policy
from mujica_jax.runtime import distributed
from mujica_jax.tasks.task import ParagraphTask
from mujica_jax.trajectories.select import mean_reward, training_rows
from mujica_jax.trajectories.store import ShardEntry

EVIPATH = Phase(name="evipath", step=1)
# The roles that are trained, by the value of `method.tune`.
TUNED = {"both": (PLANNER, WORKER), "planner": (PLANNER,), "executor": (WORKER,)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Selection:
    """The trajectories of a synthesis, and the rows that are learnt.

    Attributes:
        trajectories: All trajectories.
        right_trajectories: The trajectories with a correct answer.
        kept_trajectories: The first of these, at most `method.trajectories`.
        conversations: The conversations of the kept trajectories, of the roles that are trained.
        rows: Those of them that fit into a training row.
    """

    trajectories: list[Trajectory]
    right_trajectories: list[Trajectory]
    kept_trajectories: list[Trajectory]
    conversations: list[Conversation]
    rows: list[Conversation]


def evipath(run: Run) -> list[PhaseResult]:
    """Run the warm-up, the synthesis, the learning and, with `eval.control`, the control run.

    Return one result for each phase.
    """
    config = method_of(run, EviPathConfig)
    open_author = find_author(run)
    state, first_result, demonstrations = begin(run, more_rows=lambda: lessons(run))
    cost = PhaseCost(start_time=time.monotonic())

    # Synthesise: let the teacher write a trajectory for each question.
    questions = _questions(run)
    _print_lacking_paragraphs(run, questions)
    trajectories = _synthesize(run, state, open_author, questions)

    # Select: keep the trajectories with a correct answer. The conversations of the roles that are
    # trained become the rows that are learnt.
    selection = _select(run, questions, trajectories)
    record_selection(run, EVIPATH.step, trajectories, selection.kept_trajectories)

    # Learn: maximise the likelihood of these rows for some epochs.
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
        loss=named_loss(config.loss),
    )
    learnt_state = learning.train(run, EVIPATH.name, state, packed, plan=plan)

    # Commit: save the policy in the run directory, evaluate it on held-out questions, and log the
    # phase.
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
    """Return the training questions: the first `sampling.questions_per_round` of the task.

    A script can only play questions that have triples, so the others are left out for it. Raises
    UserError if no question remains.
    """
    is_scripted = method_of(run, EviPathConfig).teacher == "scripted"
    questions = [
        question
        for question in run.task.questions("train")
        if question.evidences or not is_scripted
    ]
    if not questions:
        raise UserError(
            f"method.teacher is scripted, but no training question of task {run.task.name} has "
            "gold triples for the script to follow: choose another --method.teacher"
        )
    return questions[: run.config.sampling.questions_per_round]


def _print_lacking_paragraphs(run: Run, questions: Sequence[Question]) -> None:
    """Print how many questions have no paragraphs of their own.

    Workers read the results of searches instead for these questions.
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
            f"{EVIPATH.name}: {num_lacking} of {len(questions)} questions have no paragraphs of "
            "their own; their workers read search results, with the gold passages added"
        )


def _select(run: Run, questions: Sequence[Question], trajectories: list[Trajectory]) -> _Selection:
    """Choose the rows that are learnt, and print how many trajectories are kept and why others not.

    Raises UserError if there are no rows.
    """
    config = method_of(run, EviPathConfig)
    right = right_ones(questions, trajectories, run.task.rule)
    kept_trajectories = right[: config.trajectories or None]
    num_kept = len(kept_trajectories)
    if num_kept < config.trajectories:
        run.progress.line(
            f"{EVIPATH.name}: method.trajectories is {config.trajectories}, but all "
            f"{len(questions)} questions give only {num_kept} correct trajectories: use more "
            "questions with --sampling.questions-per-round"
        )
    conversations = [
        row for row in training_rows(kept_trajectories) if row.role in TUNED[config.tune]
    ]
    rows = learning.rows_that_fit(run, conversations)

    num_beyond = len(right) - num_kept
    beyond = f" ({num_beyond} more are correct)" if num_beyond else ""
    reasons = _reasons_in_words(trajectories, right)
    run.progress.line(
        f"{EVIPATH.name}: kept {num_kept} of {len(trajectories)} trajectories{beyond}; the teacher "
        f"needed {_total_counts(trajectories)[RETRIES]} retries; reasons for the others: "
        f"{reasons or 'none'}"
    )
    if not rows:
        raise UserError(
            f"{num_kept} of {len(trajectories)} trajectories are correct, but none of their "
            f"{len(conversations)} conversations can be learnt ({reasons}): use another teacher "
            "or more questions, or raise trainer.sequence_length (now "
            f"{run.config.trainer.sequence_length})"
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
    """Return one trajectory for each question, until enough of them are correct.

    They are written in shards. If an earlier start of the run finished the synthesis, its
    trajectories are read. Raises UserError if nothing that the teacher wrote can be used.
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
    # If the synthesis may end early, each host gets only one shard at a time.
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
    """Check that at least one trajectory of the teacher can be used. Raises UserError otherwise."""
    if synthesized.has_usable:
        return
    trajectories = synthesized.trajectories
    raise UserError(
        f"nothing that the teacher {config.teacher} wrote for {len(trajectories)} questions can be "
        f"used ({_reasons_in_words(trajectories, [])}). Finished shards are kept. Use another "
        f"teacher, or start a new run with a larger method.max_tries (now {config.max_tries})"
    )


class _Synthesized:
    """A collector of the trajectories of a synthesis, which shows its progress.

    There are enough trajectories when `num_wanted` of them are correct. If `num_wanted` is 0, all
    questions are used.
    """

    def __init__(self, rule: Rule, stage: Stage, *, num_wanted: int) -> None:
        self._rule: Rule = rule
        self._stage = stage
        self._num_wanted = num_wanted
        # The number of episodes, including those of the current shard.
        self._num_episodes = 0
        self._num_failed = 0
        self._num_right = 0
        self.entries: list[ShardEntry] = []
        self.trajectories: list[Trajectory] = []

    def on_episode(self, trajectory: Trajectory) -> None:
        """Count a finished episode of the current shard, and show the new number."""
        self._num_episodes += 1
        if trajectory.stop_reason is StopReason.SYNTHESIS_FAILED:
            self._num_failed += 1
        self._stage.update(self._num_episodes, failed=self._num_failed)

    def add(
        self, entry: ShardEntry, trajectories: Sequence[Trajectory], questions: Sequence[Question]
    ) -> None:
        """Add a finished shard with its trajectories."""
        self.entries.append(entry)
        self.trajectories += trajectories
        self._num_right += len(right_ones(questions, trajectories, self._rule))

    @property
    def has_enough(self) -> bool:
        """Whether enough trajectories are correct."""
        return 0 < self._num_wanted <= self._num_right

    @property
    def has_usable(self) -> bool:
        """Whether any trajectory can be used, or the teacher has not written any yet."""
        written = [
            trajectory for trajectory in self.trajectories if not trajectory.is_environment_fault
        ]
        return not written or any(
            trajectory.stop_reason is not StopReason.SYNTHESIS_FAILED for trajectory in written
        )


def _total_counts(trajectories: Sequence[Trajectory]) -> collections.Counter[str]:
    """Return the counts of all trajectories, added up by name."""
    total: collections.Counter[str] = collections.Counter()
    for trajectory in trajectories:
        total.update({name: round(count) for name, count in trajectory.counts.items()})
    return total


def _reasons(
    trajectories: Sequence[Trajectory], kept_trajectories: Sequence[Trajectory]
) -> dict[str, int]:
    """Return how many trajectories are not kept for each reason, the most common reason first.

    The reason is the failure of a teacher's turn, the way in which the episode ended, or a wrong
    answer.
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
    """Return why trajectories are not kept as text, as in "wrong_answer 3, leak 1"."""
    reasons = _reasons(trajectories, kept_trajectories)
    return ", ".join(f"{reason} {count}" for reason, count in reasons.items())


def _write_metrics(run: Run, selection: _Selection, *, steps: int) -> None:
    """Log how many trajectories and tokens the teacher wrote, and how many rows are learnt."""
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
