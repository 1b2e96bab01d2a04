"""Evaluate: score a policy on the held-out questions, with greedy and with sampled decoding.

`PolicyEvaluator` scores any policy. Both training runs and `eval` use it. A recipe calls `finish`
at the end of each phase, which scores the run's policy and stores the result of the phase.
"""

import asyncio
import dataclasses
import functools
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from mujica_jax import metrics
from mujica_jax.agents.agent import (
    Agent,
    Attempt,
    EnginePolicy,
    EpisodeHooks,
    OnEpisode,
    Policy,
    TwoPolicies,
    run_episodes,
)
from mujica_jax.agents.faults import FaultGuard
from mujica_jax.config.schema import Config
from mujica_jax.errors import UserError
from mujica_jax.inference.requests import Generator
from mujica_jax.metrics import Rule
from mujica_jax.records import GoldPassage, Question, Search, Trajectory, generated_tokens
from mujica_jax.report.progress import Figure, Progress, Stage
from mujica_jax.report.results import PhaseRow, rounded
from mujica_jax.rewards.reward import RewardFunction
from mujica_jax.runs import phases
from mujica_jax.runs.parts import statistics_of
from mujica_jax.runs.phases import GetState, Phase, PhaseCost, PhaseResult, phase_file
from mujica_jax.runs.run import Run
from mujica_jax.runs.sampling import gather
from mujica_jax.runs.versions import use_policy
from mujica_jax.runtime import distributed
from mujica_jax.runtime.preemption import Preemption
from mujica_jax.tasks.task import EnvironmentKind, Task
from mujica_jax.trajectories import shards
from mujica_jax.trajectories.question_records import question_record

# A function that plays episodes and returns their trajectories.
Play = Callable[[], Sequence[Trajectory]]


class ScoredGenerator(Generator, Protocol):
    """A generator whose policy can be evaluated.

    `policy_version` is the version of the policy that it samples from.
    """

    policy_version: int

    def reset_cache(self) -> None:
        """Drop everything that is cached from earlier requests."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class KindScore:
    """Mean scores in percent, over `questions` questions, with 95% bootstrap intervals."""

    em: float
    em_interval: tuple[float, float]
    f1: float
    f1_interval: tuple[float, float]
    questions: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The result of one or several passes over the questions, with one attempt per pass.

    A question's score is the mean over its attempts. Scores and means leave out episodes in which a
    search failed, because these say nothing about the policy.

    Attributes:
        score: The scores over all questions.
        by_kind: The scores over the questions of each kind.
        searches: Mean number of searches per episode.
        stop_reasons: Number of episodes that ended for each reason.
        further: Mean scores, in percent, that only some tasks have (`_further`).
        trajectories: One trajectory for each question, pass after pass, including those that are
            left out of the scores.
    """

    score: KindScore
    by_kind: dict[str, KindScore]
    searches: float
    stop_reasons: dict[str, int]
    further: dict[str, float]
    trajectories: tuple[Trajectory, ...]

    @property
    def scored(self) -> list[Trajectory]:
        """The trajectories that the scores count."""
        return [
            trajectory for trajectory in self.trajectories if not trajectory.is_environment_fault
        ]

    @property
    def left_out(self) -> int:
        """The number of episodes that are left out of the scores."""
        return len(self.trajectories) - len(self.scored)

    def summary(self) -> dict[str, Any]:
        """Return the evaluation as a JSON object, without the trajectories."""
        num_scored = len(self.scored)
        total_seconds = sum(trajectory.seconds for trajectory in self.scored)
        further = {name: round(value, 2) for name, value in self.further.items()}
        by_kind = {kind: rounded(dataclasses.asdict(score)) for kind, score in self.by_kind.items()}
        return {
            **rounded(dataclasses.asdict(self.score)),
            "left_out": self.left_out,
            "searches": round(self.searches, 3),
            "tokens": round(generated_tokens(self.scored) / num_scored, 1),
            "seconds": round(total_seconds / num_scored, 3),
            **further,
            "stop_reasons": self.stop_reasons,
            "by_kind": by_kind,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
    """The greedy and the sampled evaluation of the same questions.

    The sampled evaluation decodes at `eval.temperature`. It is None if the policy was evaluated
    greedily only.
    """

    questions: Sequence[Question]
    rule: Rule
    greedy: Evaluation
    sampled: Evaluation | None

    def summary(self) -> dict[str, Any]:
        """Return both evaluations as one JSON object."""
        summaries = {"greedy": self.greedy.summary()}
        if self.sampled is not None:
            summaries["sampled"] = self.sampled.summary()
        return summaries

    @property
    def left_out(self) -> int:
        """The number of episodes of both evaluations that are left out of the scores."""
        if self.sampled is None:
            return self.greedy.left_out
        return self.greedy.left_out + self.sampled.left_out

    def exact_matches(self) -> tuple[float | None, ...]:
        """Return the exact match of each question (0 or 1) with greedy decoding.

        It is None if a search failed.
        """
        pairs = zip(self.questions, self.greedy.trajectories, strict=True)
        return tuple(self._scores_of(question, trajectory)["em"] for question, trajectory in pairs)

    def predictions(self) -> bytes:
        """Return the content of the predictions file: one JSON object per line and question.

        Each object holds the question, and the greedy prediction with its scores and reward. If the
        question was sampled once, it also holds that prediction and its scores. If the question was
        sampled several times, it holds all these predictions and their mean scores. Scores are null
        if a search failed. The reward is null if the episode could not be rewarded.
        """
        lines = []
        pairs = zip(self.questions, self.greedy.trajectories, strict=True)
        for place, (question, trajectory) in enumerate(pairs):
            row = {
                **question_record(question),
                "prediction": trajectory.answer,
                **self._scores_of(question, trajectory),
                "reward": trajectory.reward if trajectory.is_rewarded else None,
                "stop_reason": trajectory.stop_reason.value,
                "searches": [
                    {"query": search.query, "sentence": search.sentence}
                    for search in trajectory.searches
                ],
            }
            if self.sampled is not None:
                samples = self.sampled.trajectories[place :: len(self.questions)]
                row["sampled"] = self._sampled_row(question, samples)
            lines.append(json.dumps(row, ensure_ascii=False) + "\n")
        return "".join(lines).encode()

    def _sampled_row(self, question: Question, samples: Sequence[Trajectory]) -> dict[str, Any]:
        """Return the part of a question's JSON object about its sampled predictions."""
        if len(samples) == 1:
            return {"prediction": samples[0].answer, **self._scores_of(question, samples[0])}
        row: dict[str, Any] = {"predictions": [sample.answer for sample in samples]}
        sample_scores = [self._scores_of(question, sample) for sample in samples]
        for name in ("em", "f1"):
            values = []
            for scores in sample_scores:
                value = scores[name]
                if value is not None:
                    values.append(value)
            row[name] = sum(values) / len(values) if values else None
        return row

    def _scores_of(self, question: Question, trajectory: Trajectory) -> dict[str, float | None]:
        """Return the scores of a trajectory's answer; None if a search failed."""
        if trajectory.is_environment_fault:
            return {"em": None, "f1": None}
        score = metrics.score(trajectory.final_answer, question.answers, self.rule)
        return {"em": score.em, "f1": score.f1}


def _play_now(name: str, play: Play) -> Sequence[Trajectory]:
    """Play a part of an evaluation. This default stores nothing, so nothing is ever read back."""
    del name
    return play()


def _without_others(kind: str, trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
    """Return this process's trajectories. This default is for jobs with one process."""
    del kind
    return trajectories


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyEvaluator:
    """An evaluator of the generator's policy on the held-out questions.

    If the job has several processes, they share the questions. Each process plays its questions in
    parts. If an earlier start already played some parts, these are read instead.

    Attributes:
        name: The name that is shown with the progress.
        agent: The agent that answers the questions.
        reward: The reward function.
        generator: The generator that decodes the policy.
        worker: A generator of another model for the turns of workers. None: the policy plays the
            workers too.
        task: The task with its questions and environments.
        config: The configuration of the evaluation.
        progress: The console.
        preemption: Tells whether the program was asked to stop.
        faults: Decides what happens if a search fails.
        concurrency: Number of episodes that are played at the same time.
        samples: Number of samples of each question at `eval.temperature`. With 0 the policy is
            evaluated greedily only.
        part_questions: Number of questions in one part. None: all questions are one part.
        live: Returns figures to show with the progress.
        gather: Returns the trajectories of all processes. Takes the name of the pass and this
            process's trajectories.
        keep: Returns the trajectories of a part, either stored or played now. Takes the name of the
            part and a function that plays it.
    """

    name: str
    agent: Agent
    reward: RewardFunction
    generator: ScoredGenerator
    worker: ScoredGenerator | None = None
    task: Task
    config: Config
    progress: Progress
    preemption: Preemption
    faults: FaultGuard = dataclasses.field(default_factory=FaultGuard)
    concurrency: int
    samples: int = 1
    part_questions: int | None = None
    live: Callable[[], Mapping[str, Figure]] = dict
    gather: Callable[[str, Sequence[Trajectory]], Sequence[Trajectory]] = _without_others
    keep: Callable[[str, Play], Sequence[Trajectory]] = _play_now

    def run(self) -> Scores:
        """Evaluate the policy greedily and, if `samples` is not 0, at `eval.temperature`.

        Each sample is one pass over all questions. The passes run one after the other.

        Raises UserError if there are fewer held-out questions than processes.
        """
        questions = held_out_questions(self.task, self.config)
        own_questions = distributed.shard_for_process(questions)
        configured = self.config.eval.questions
        if not own_questions:
            raise UserError(
                f"there are {len(questions)} held-out questions, fewer than the "
                f"{distributed.processes()} processes of this job: raise eval.questions (now "
                f"{configured}), or give the task more held-out questions"
            )
        if len(questions) < configured:
            self.progress.line(
                f"{self.name}: eval.questions is {configured}, but there are only "
                f"{len(questions)} held-out questions; all of them are evaluated"
            )

        greedy = self._score("greedy", questions, self._play_pass("greedy", own_questions))
        sampled = None
        if self.samples:
            sampled_trajectories: list[Trajectory] = []
            for number in range(self.samples):
                sampled_trajectories += self._play_pass("sampled", own_questions, number=number)
            sampled = self._score("sampled", questions, sampled_trajectories)
        return Scores(questions=questions, rule=self.task.rule, greedy=greedy, sampled=sampled)

    def _score(
        self, kind: str, questions: Sequence[Question], trajectories: Sequence[Trajectory]
    ) -> Evaluation:
        """Score the trajectories, and say on the console how many are left out of the scores."""
        evaluation = summarise(questions, trajectories, self.task.rule, self.task.environment_kind)
        if evaluation.left_out:
            self.progress.line(
                f"{self.name}, {kind}: {evaluation.left_out} of {len(trajectories)} episodes are "
                "left out of the scores because a search failed"
            )
        return evaluation

    def _play_pass(
        self, kind: str, own_questions: Sequence[Question], number: int = 0
    ) -> Sequence[Trajectory]:
        """Play this process's questions once, and return the trajectories of all processes.

        `kind` is "greedy" or "sampled". `number` counts the passes of the same kind, from 0.
        """
        temperature = 0.0 if kind == "greedy" else self.config.eval.temperature
        stage_name = f"{self.name}: evaluating, {kind}"
        if number > 0:
            # The files of each pass need their own names.
            kind = f"{kind}-{number}"
            stage_name += f", {number + 1} of {self.samples}"
        self.preemption.enter(stage_name)
        attempts = [
            Attempt(
                question=question, number=number, seed=self.config.seed, temperature=temperature
            )
            for question in own_questions
        ]
        with self.progress.stage(
            stage_name, total=len(own_questions), unit="episodes", live=self.live
        ) as stage:
            score = _RunningScore(own_questions, self.task.rule, stage)
            trajectories = self._play_parts(kind, attempts, score)

        if distributed.processes() > 1:
            trajectories = self.gather(kind, trajectories)
        return trajectories

    def _play_parts(
        self, kind: str, attempts: Sequence[Attempt], score: "_RunningScore"
    ) -> Sequence[Trajectory]:
        """Play the attempts part by part. Parts that an earlier start played are read instead."""
        trajectories: list[Trajectory] = []
        part_size = self.part_questions or len(attempts)
        process = f"{distributed.process()}-of-{distributed.processes()}"
        for start in range(0, len(attempts), part_size):
            part = attempts[start : start + part_size]
            play = functools.partial(self._play, part, score.add)
            part_trajectories = self.keep(f"{kind}-{process}-{start}-{len(part)}", play)
            # A part that was read instead of played is not counted yet.
            if score.num_episodes == start:
                for trajectory in part_trajectories:
                    score.add(trajectory)
            trajectories += part_trajectories
        return trajectories

    def _play(self, part: Sequence[Attempt], on_episode: OnEpisode) -> Sequence[Trajectory]:
        """Play a part, and return its trajectories.

        Raises UserError if a search failed in every episode of the part.
        """
        policy: Policy = EnginePolicy(self.generator)
        if self.worker is not None:
            policy = TwoPolicies(policy, EnginePolicy(self.worker))
            self.worker.reset_cache()
        # Clear the cache, so that a score does not depend on earlier requests.
        self.generator.reset_cache()
        trajectories = asyncio.run(
            run_episodes(
                self.agent,
                part,
                self.task.environment,
                policy,
                reward=self.reward,
                concurrency=self.concurrency,
                hooks=EpisodeHooks(
                    play=self.faults.play, on_episode=on_episode, poll=self.preemption.check
                ),
            )
        )
        # Check before the part is stored, so that the next start plays it again.
        _check_any_scored(trajectories)
        return trajectories


class _RunningScore:
    """The exact match of an evaluation so far, shown while its episodes are played."""

    def __init__(self, questions: Sequence[Question], rule: Rule, stage: Stage) -> None:
        self._answers = {question.id: question.answers for question in questions}
        self._rule: Rule = rule
        self._stage = stage
        self._num_scored = 0
        self._num_correct = 0.0
        self.num_episodes = 0

    def add(self, trajectory: Trajectory) -> None:
        """Count a finished episode. If a search failed, the episode does not enter the score."""
        self.num_episodes += 1
        if not trajectory.is_environment_fault:
            self._num_scored += 1
            answers = self._answers[trajectory.question_id]
            self._num_correct += metrics.score(trajectory.final_answer, answers, self._rule).em
        self._stage.update(self.num_episodes, em=100 * self._num_correct / max(1, self._num_scored))


def right_ones(
    questions: Iterable[Question], trajectories: Iterable[Trajectory], rule: Rule
) -> list[Trajectory]:
    """Return the trajectories whose answer matches a gold answer of their question exactly."""
    answers_of = {question.id: question.answers for question in questions}
    right = []
    for trajectory in trajectories:
        answers = answers_of[trajectory.question_id]
        if metrics.score(trajectory.final_answer, answers, rule).em == 1.0:
            right.append(trajectory)
    return right


def held_out_questions(task: Task, config: Config) -> Sequence[Question]:
    """Return the questions of an evaluation: the first `eval.questions` of its split."""
    return task.questions(config.eval.split)[: config.eval.questions]


def summarise(
    questions: Sequence[Question],
    trajectories: Sequence[Trajectory],
    rule: Rule,
    environment: EnvironmentKind = "text",
) -> Evaluation:
    """Score trajectories, and return the evaluation.

    `trajectories` holds one trajectory for each question, in the same order. If there were several
    passes, the next pass follows after the last question, and a question's score is the mean over
    its episodes. An episode without an answer scores zero. An episode in which a search failed is
    left out of all means. Raises UserError if that happened in all episodes.
    """
    _check_any_scored(trajectories)
    num_passes = max(1, len(trajectories) // len(questions))
    asked_questions = [*questions] * num_passes
    scored_questions: list[Question] = []
    scored_trajectories: list[Trajectory] = []
    scores_by_place: dict[int, list[metrics.Score]] = {}
    for number, (question, trajectory) in enumerate(
        zip(asked_questions, trajectories, strict=True)
    ):
        if trajectory.is_environment_fault:
            continue
        score = metrics.score(trajectory.final_answer, question.answers, rule)
        scored_questions.append(question)
        scored_trajectories.append(trajectory)
        scores_by_place.setdefault(number % len(questions), []).append(score)

    scores: list[_QuestionScore] = []
    scores_by_kind: dict[str, list[_QuestionScore]] = {}
    for place, question_scores in sorted(scores_by_place.items()):
        mean_score = _mean_over_episodes(question_scores)
        scores.append(mean_score)
        scores_by_kind.setdefault(questions[place].kind or "other", []).append(mean_score)

    num_searches = sum(len(trajectory.searches) for trajectory in scored_trajectories)
    stop_reasons = Counter(trajectory.stop_reason.value for trajectory in trajectories)
    return Evaluation(
        score=_mean(scores),
        by_kind={kind: _mean(members) for kind, members in scores_by_kind.items()},
        searches=num_searches / len(scored_trajectories),
        stop_reasons=dict(sorted(stop_reasons.items())),
        further=_further(scored_questions, scored_trajectories, environment),
        trajectories=tuple(trajectories),
    )


def _check_any_scored(trajectories: Sequence[Trajectory]) -> None:
    """Raise UserError if a search failed in every episode."""
    if all(trajectory.is_environment_fault for trajectory in trajectories):
        raise UserError(
            f"a search failed in all {len(trajectories)} episodes of an evaluation, so nothing can "
            "be scored: start the retriever again or correct its address, then start the same "
            "command again"
        )


def _further(
    questions: Sequence[Question], trajectories: Sequence[Trajectory], environment: EnvironmentKind
) -> dict[str, float]:
    """Return the mean scores, in percent, that only some tasks have.

    If questions ask for several answers, these are `set_f1` (the plain macro F1) and
    `gerbil_macro_f1`.

    If questions have gold passages and the agent searched passages, these are `gold_found`,
    `support_em` and `support_f1`. `gold_found` is the share of the gold passages that any search
    showed. `support_em` and `support_f1` compare the gold passages with the passages that workers
    selected, or with all shown passages if none was selected.
    """
    support_scores: dict[str, list[float]] = {}
    set_scores: list[metrics.Score] = []
    is_answered: list[bool] = []
    for question, trajectory in zip(questions, trajectories, strict=True):
        if question.answer_sets:
            set_scores.append(metrics.score_set(trajectory.final_answer, question.answer_sets))
            is_answered.append(bool((trajectory.final_answer or "").strip()))
        if question.gold_passages and environment != "graph":
            for name, score in _support(question.gold_passages, trajectory.searches).items():
                support_scores.setdefault(name, []).append(score)

    means = {name: 100 * sum(scores) / len(scores) for name, scores in support_scores.items()}
    if set_scores:
        means["set_f1"] = 100 * sum(score.f1 for score in set_scores) / len(set_scores)
        means["gerbil_macro_f1"] = 100 * metrics.gerbil_macro_f1(set_scores, is_answered)
    return means


def _support(gold: Sequence[GoldPassage], searches: Sequence[Search]) -> dict[str, float]:
    """Return how well the searches found and selected the gold passages, as scores of 0 to 1."""
    gold_names = {str(number) for number in range(len(gold))}
    shown: set[str] = set()
    selected: set[str] = set()
    for search in searches:
        names = _names_of_shown(search, gold)
        shown.update(names)
        selected.update(names[place] for place in search.selected)
    support = metrics.supporting(selected or shown, gold_names)
    return {
        "gold_found": metrics.supporting(shown, gold_names).recall,
        "support_em": support.em,
        "support_f1": support.f1,
    }


def _names_of_shown(search: Search, gold: Sequence[GoldPassage]) -> list[str]:
    """Return a name for each passage that a search showed.

    If the passage is a gold passage, the name is its number among them. Otherwise it is the text of
    the passage. If a search showed only one passage, the passage may have been cut to fit.
    """
    names = []
    is_cut = len(search.materials) == 1
    for text in search.materials:
        numbers = [
            number for number, passage in enumerate(gold) if passage.is_shown_by(text, cut=is_cut)
        ]
        names.append(str(numbers[0]) if numbers else f"passage {text}")
    return names


@dataclasses.dataclass(frozen=True, kw_only=True)
class _QuestionScore:
    """The scores of one question, from 0 to 1. They are means over its episodes."""

    em: float
    f1: float


def _mean_over_episodes(scores: Sequence[metrics.Score]) -> _QuestionScore:
    """Return the mean scores of the episodes of one question."""
    return _QuestionScore(
        em=sum(score.em for score in scores) / len(scores),
        f1=sum(score.f1 for score in scores) / len(scores),
    )


def _mean(scores: Sequence[_QuestionScore]) -> KindScore:
    """Return the mean scores of several questions in percent, with their intervals."""
    exact_matches = [score.em for score in scores]
    f1_scores = [score.f1 for score in scores]
    return KindScore(
        em=100 * sum(exact_matches) / len(scores),
        em_interval=metrics.bootstrap_interval(exact_matches),
        f1=100 * sum(f1_scores) / len(scores),
        f1_interval=metrics.bootstrap_interval(f1_scores),
        questions=len(scores),
    )


def finish(run: Run, phase: Phase, state: GetState, cost: PhaseCost) -> PhaseResult:
    """Evaluate the policy after a phase, store the result of the phase, and return it.

    The evaluation is greedy and sampled, on the held-out questions. `state` is the training state
    after the phase, and `cost` is what the phase cost. If an earlier start of the run finished the
    phase, its stored result is read instead.
    """
    file = phase_file(phase.name)
    if not distributed.broadcast(file, lambda: run.store.exists(file)):
        use_policy(run, state, phase.step)
        with run.counted(f"{phase.prefix}{phases.EVALUATING}", phase.step):
            scores = _score(run, phase)
        result = PhaseResult(
            row=_table_row(phase, scores, cost),
            forward_tokens=cost.forward_tokens,
            trained_slots=cost.trained_slots,
        )
        if distributed.is_primary():
            _write_scores(run, phase, scores)
            # Write the metrics before the phase is marked as done: a restart skips a done phase.
            _write_phase_metrics(run, phase, scores)
            run.store.write_json_once(file, dataclasses.asdict(result))
        distributed.barrier(f"{phase.name} is written down")

    stored_result = run.store.read_json(file)
    _write_io_statistics(run, phase)
    row = PhaseRow(**stored_result["row"])
    return PhaseResult(**{**stored_result, "row": row})


def _score(run: Run, phase: Phase) -> Scores:
    """Evaluate the policy that is loaded in the engine on the held-out questions."""

    def gather_scored(kind: str, trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
        return gather(run.store, f"{phase.name} {kind}", trajectories)

    evaluator = PolicyEvaluator(
        name=phase.name,
        agent=run.agent,
        reward=run.reward.at(phase.step),
        faults=run.faults,
        generator=run.generator,
        task=run.task,
        config=run.config,
        progress=run.progress,
        concurrency=run.config.engine.max_num_seqs,
        preemption=run.preemption,
        live=run.counters.figures,
        gather=gather_scored,
    )
    return evaluator.run()


def _table_row(phase: Phase, scores: Scores, cost: PhaseCost) -> PhaseRow:
    """Return the phase's row of the closing table."""
    assert scores.sampled is not None, "a training run evaluates with greedy and sampled decoding"
    return PhaseRow(
        name=phase.name,
        em=scores.greedy.score.em,
        f1=scores.greedy.score.f1,
        em_sampled=scores.sampled.score.em,
        f1_sampled=scores.sampled.score.f1,
        questions=scores.greedy.score.questions,
        left_out=scores.left_out,
        trajectories=cost.trajectories,
        accepted=cost.accepted,
        tokens=cost.forward_tokens,
        searches=scores.greedy.searches,
        by_kind=scores.greedy.summary()["by_kind"],
        seconds=time.monotonic() - cost.start_time,
    )


def _write_phase_metrics(run: Run, phase: Phase, scores: Scores) -> None:
    """Log how long each stage of a phase took, and the statistics of the retrieval."""
    seconds = {f"{stage}_seconds": spent for stage, spent in run.clock.take().items()}
    total = {"total_seconds": sum(seconds.values())}
    run.metrics.write(f"{phase.prefix}{phases.TIME}", phase.step, seconds | total)
    statistics = statistics_of(run.task, scores.questions)
    run.metrics.write(
        f"{phase.prefix}{phases.RETRIEVAL}", phase.step, dataclasses.asdict(statistics)
    )
    run.metrics.flush()


def _write_io_statistics(run: Run, phase: Phase) -> None:
    """Log the seconds and bytes of reading and writing the run directory since the last phase.

    This happens once for each phase, also if the run is restarted.
    """
    if run.metrics.write(f"{phase.name}/store", 0, run.store.io_statistics.summary()):
        run.store.io_statistics.reset()
        run.metrics.flush()


def _write_scores(run: Run, phase: Phase, scores: Scores) -> None:
    """Store a phase's scores, predictions and greedy trajectories in the run directory."""
    stem = f"eval/{phase.name.replace(' ', '-')}"
    run.store.write_json_once(f"{stem}.json", {"policy": phase.step, **scores.summary()})
    run.store.create(f"{stem}.predictions.jsonl", scores.predictions())
    run.store.create(f"{stem}.parquet", shards.encode(scores.greedy.trajectories))


def solved_question(run: Run, name: str) -> tuple[Question, Trajectory] | None:
    """Return a held-out question that the policy after a phase solved, with its trajectory.

    Among all questions that greedy decoding solved, this is the one with the most searches. Returns
    None if no question was solved. `name` is the name of the phase.
    """
    path = f"eval/{name.replace(' ', '-')}.parquet"
    trajectories = shards.decode(run.store.read(path), path)
    questions = {question.id: question for question in held_out_questions(run.task, run.config)}
    solved = right_ones(questions.values(), trajectories, run.task.rule)
    if not solved:
        return None
    most_searched = max(solved, key=lambda trajectory: len(trajectory.searches))
    return questions[most_searched.question_id], most_searched
