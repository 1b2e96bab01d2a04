"""Evaluate a policy under one or several configurations, and print and write the results.

The command `eval` calls this module.
"""

import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from mujica_jax.agents.faults import FaultGuard
from mujica_jax.config.schema import Config, MujicaConfig, SingleConfig, TaskConfig
from mujica_jax.config.stored import to_dict
from mujica_jax.errors import StoreError, UserError
from mujica_jax.inference.counters import LiveCounters
from mujica_jax.inference.generator import PolicyGenerator
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.records import Trajectory
from mujica_jax.report import comparison
from mujica_jax.report.comparison import Compared
from mujica_jax.report.progress import Figure, NoConsole, Progress
from mujica_jax.report.results import score_table
from mujica_jax.runs.endpoint import Endpoint
from mujica_jax.runs.evaluation import (
    Play,
    PolicyEvaluator,
    ScoredGenerator,
    Scores,
    held_out_questions,
)
from mujica_jax.runs.judge import Judge, judge_behind
from mujica_jax.runs.parts import (
    check_engine_temperatures,
    check_prompts,
    make_agent,
    make_reward,
    statistics_of,
)
from mujica_jax.runs.policies import Checkpoint
from mujica_jax.runs.sampling import gather
from mujica_jax.runs.setup import about_questions, build_task, check_dtypes, require_packages
from mujica_jax.runtime import distributed
from mujica_jax.runtime.compilation_cache import use_compilation_cache
from mujica_jax.runtime.extras import import_extra
from mujica_jax.runtime.preemption import Preemption
from mujica_jax.storage.manifest import describe_folder
from mujica_jax.storage.run_directory import RunDirectory, RunPath, atomic_write
from mujica_jax.tasks.content import fingerprint_of_questions, fingerprint_of_searches
from mujica_jax.tasks.task import Task
from mujica_jax.trajectories import shards

_log = logging.getLogger(__name__)

# The least number of questions whose trajectories are stored together. If an evaluation is killed,
# it plays about this number of questions again.
MIN_PART_QUESTIONS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Models:
    """The models of an evaluation, before they are loaded.

    Attributes:
        policy: The model that is evaluated.
        worker: A different model for the turns of workers. None: the policy plays the workers too.
        judge: The model that judges the answers. None: no model judges them.
    """

    policy: Checkpoint | Endpoint
    worker: Checkpoint | None = None
    judge: Endpoint | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Session:
    """The loaded models and other parts that all configurations of one evaluation share.

    `samples` is the number of samples of each question; with 0 the policy is evaluated greedily
    only. `earlier_scores` are the scores of the earlier result that this evaluation is compared
    with.
    """

    policy: Checkpoint | Endpoint
    worker: Checkpoint | None
    judge: Judge | None
    tokenizer: Tokenizer
    generator: ScoredGenerator
    worker_generator: ScoredGenerator | None
    faults: FaultGuard
    progress: Progress
    preemption: Preemption
    samples: int
    earlier_scores: comparison.QuestionScores | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluated:
    """The result of one configuration.

    Attributes:
        scores: The scores, with the trajectories of all questions.
        summary: The scores as they are written: "greedy", and "sampled" if answers were sampled.
        compared: The row of the table that compares all configurations.
        file: The file of the result. Predictions and trajectories are in the same folder.
    """

    scores: Scores
    summary: dict[str, Any]
    compared: Compared
    file: RunPath


def evaluate(
    configs: Sequence[Config],
    models: Models,
    preemption: Preemption,
    *,
    samples: int = 1,
    beside: str | None = None,
    plot: bool = False,
    note: str | None = None,
) -> list[Evaluated]:
    """Evaluate a policy under each configuration, print and write the results, and return them.

    `samples` is the number of samples of each question; with 0 the policy is evaluated greedily
    only. `beside` is the file of an earlier result on the same questions; the differences to it are
    printed and written too. The configurations differ in task and agent. If there are several, a
    table compares them, and `plot` draws a picture of this table. `note` is a line that is printed
    first.
    """
    first = configs[0]
    policy = models.policy

    # Check everything that can be checked before the model is loaded.
    if plot:
        import_extra("matplotlib", "--plot", extra="plots")
    _require_writable(policy.out)
    tasks = prepare_tasks(configs)
    earlier_scores = None
    if beside is not None:
        earlier_scores = comparison.read_scores(beside)
        comparison.check_same_questions(
            beside, earlier_scores, held_out_questions(tasks[first.task], first)
        )

    # Load the models.
    session = open_session(
        configs, tasks, models, preemption, samples=samples, earlier_scores=earlier_scores
    )
    progress = session.progress
    print_notes(session, first, note)

    # Score the policy under each configuration.
    folders = [
        _parts_folder(config, tasks[config.task], policy, models.worker) for config in configs
    ]
    results = [
        _evaluate_one(session, config, tasks[config.task], folder)
        for config, folder in zip(configs, folders, strict=True)
    ]
    distributed.barrier("all is evaluated")
    if not distributed.is_primary():
        return results

    # Compare the configurations.
    if len(results) > 1:
        compared = [result.compared for result in results]
        _write_comparison(
            compared, policy.out / f"comparison-{first.eval.split}.json", progress, plot
        )
    # Remove the stored parts. The results hold everything that is in them.
    for folder in folders:
        RunDirectory(folder).remove_folder("")
    if isinstance(policy, Endpoint):
        progress.line(f"{policy.place}: {policy.generator.statistics.sentence()}")
    return results


def prepare_tasks(configs: Sequence[Config], *, is_scored: bool = True) -> dict[TaskConfig, Task]:
    """Check that packages and devices suit the configurations, and build each task once.

    If the tasks are scored, their evaluated split needs questions. A user's own question needs none.
    """
    require_packages(configs[0])
    check_dtypes(configs[0])
    use_compilation_cache()
    tasks: dict[TaskConfig, Task] = {}
    for config in configs:
        if config.task not in tasks:
            tasks[config.task] = build_task(config, learns=False, is_scored=is_scored)
    return tasks


def open_session(
    configs: Sequence[Config],
    tasks: Mapping[TaskConfig, Task],
    models: Models,
    preemption: Preemption,
    *,
    samples: int,
    earlier_scores: comparison.QuestionScores | None,
) -> Session:
    """Load the models of an evaluation, and check that they suit the prompts and temperatures."""
    first = configs[0]
    tokenizer, generator = models.policy.open(first)
    if isinstance(models.policy, Checkpoint):
        # A checkpoint is decoded by an engine on this machine.
        engine_generator = cast(PolicyGenerator, generator)
        check_engine_temperatures(engine_generator, first, trains=False, sampled=samples > 0)
    for config in configs:
        check_prompts(config.agent, tokenizer, tasks[config.task].environment_kind)
    worker_generator = None
    if models.worker is not None:
        worker_generator = _open_worker(models.worker, first, tokenizer)
    return Session(
        policy=models.policy,
        worker=models.worker,
        worker_generator=worker_generator,
        tokenizer=tokenizer,
        generator=generator,
        progress=Progress() if distributed.is_primary() else Progress(NoConsole(), live=False),
        faults=FaultGuard(first.faults),
        judge=None if models.judge is None else judge_behind(models.judge, first),
        preemption=preemption,
        samples=samples,
        earlier_scores=earlier_scores,
    )


def print_notes(session: Session, config: Config, note: str | None) -> None:
    """Print the note, and warn if the models were trained with other settings of the agent."""
    if note is not None:
        session.progress.line(note)
    _print_other_settings("policy", session.policy, config, session.progress)
    _print_other_settings("worker", session.worker, config, session.progress)


def _print_other_settings(
    role: str, policy: Checkpoint | Endpoint | None, config: Config, progress: Progress
) -> None:
    """Print how the configured agent differs from the one that the policy was trained with."""
    if not isinstance(policy, Checkpoint):
        return
    differences = policy.trained_otherwise(config.agent)
    if differences:
        progress.line(f"the {role} was trained with other settings: {'; '.join(differences)}")


def _write_comparison(
    results: Sequence[Compared], file: RunPath, progress: Progress, plot: bool
) -> None:
    """Write and print the table that compares all configurations."""
    rows = comparison.rows(results)
    atomic_write(file, (json.dumps(rows, indent=2, allow_nan=False) + "\n").encode())
    atomic_write(file.with_suffix(".md"), comparison.markdown(rows).encode())
    if plot:
        atomic_write(file.with_suffix(".png"), comparison.draw(rows))
    progress.show(comparison.table(rows))
    progress.line(f"comparison: {file}")


def _evaluate_one(session: Session, config: Config, task: Task, parts_folder: RunPath) -> Evaluated:
    """Evaluate the policy under one configuration, and write and print the results."""
    policy = session.policy
    file = policy.out / f"{_stem(config, task)}-{config.eval.split}.json"
    _announce(session, config, task, file)

    # Score the answers, and let the judge judge them.
    scores = _score(session, config, task, RunDirectory(parts_folder))
    if isinstance(policy, Endpoint):
        policy.generator.require_an_answer()
    summary = scores.summary()
    if session.judge is not None and distributed.is_primary():
        judge_place = str(config.judge.base_url)
        summary["greedy"] |= _ask_judge(session.judge, judge_place, scores, session.progress)

    if distributed.is_primary():
        _write_result(session, config, task, scores, summary, file)
        _print_result(session, task, scores, summary, file)
    name = f"{task.name} {task.environment_kind}"
    # How many of a question's own passages a search shows, as in "5 of 10 passages".
    shown = getattr(task, "shown", "")
    compared = Compared(
        task=f"{name}, {shown}" if shown else name,
        agent=config.agent.kind,
        summary=summary["greedy"],
        em=scores.exact_matches(),
    )
    return Evaluated(scores=scores, summary=summary, compared=compared, file=file)


def _announce(session: Session, config: Config, task: Task, file: RunPath) -> None:
    """Print which policy, task and split are evaluated, and whether a result is replaced."""
    policy = session.policy
    agent = "" if config.agent.kind == "mujica" else f", {config.agent.kind}"
    where = f"{task.name} ({task.environment_kind}{agent}), {config.eval.split}"
    session.progress.line(f"evaluating {policy.name} from {policy.place} on {where}")
    for sentence in about_questions(task):
        session.progress.line(sentence)
    if distributed.is_primary() and file.exists():
        session.progress.line(
            f"this replaces the earlier result in {file}: to keep both, give another folder with "
            "--out"
        )


def _write_result(
    session: Session,
    config: Config,
    task: Task,
    scores: Scores,
    summary: dict[str, Any],
    file: RunPath,
) -> None:
    """Write scores, predictions and trajectories.

    If the evaluation is compared with an earlier result, the differences are added to `summary`
    under "beside".
    """
    predictions = scores.predictions()
    if session.earlier_scores is not None:
        own_scores = comparison.scores_of_predictions(predictions)
        summary["beside"] = comparison.differences(session.earlier_scores, own_scores)
    settings = _settings(config, task) | session.policy.about()
    if session.worker is not None:
        settings["worker"] = session.worker.place
    atomic_write(file.with_suffix(".predictions.jsonl"), predictions)
    atomic_write(file.with_suffix(".parquet"), shards.encode(scores.greedy.trajectories))
    atomic_write(file, (json.dumps(settings | summary, indent=2, allow_nan=False) + "\n").encode())


def _print_result(
    session: Session, task: Task, scores: Scores, summary: Mapping[str, Any], file: RunPath
) -> None:
    """Print the tables of a result, how its episodes ended, and the file it is written to."""
    progress = session.progress
    progress.show(score_table(summary["greedy"], summary.get("sampled")))
    if "beside" in summary:
        progress.show(comparison.difference_table(summary["beside"]))
    shown = getattr(task, "shown", "")
    if shown:
        progress.line(f"a search shows {shown} that belong to the question")
    for kind in ("greedy", "sampled"):
        if kind not in summary:
            continue
        scores_of_kind = summary[kind]
        stop_reasons = scores_of_kind["stop_reasons"]
        reasons = ", ".join(f"{reason} {count}" for reason, count in stop_reasons.items())
        progress.line(
            f"{kind} decoding: {scores_of_kind['searches']:.2f} searches per question; how the "
            f"episodes ended: {reasons}"
        )
    progress.line(f"retrieval: {statistics_of(task, scores.questions).sentence()}")
    progress.line(f"results and predictions: {file}")


def _score(session: Session, config: Config, task: Task, parts: RunDirectory) -> Scores:
    """Evaluate the policy under one configuration.

    Parts that an earlier start of this evaluation played are read from the folder `parts`.
    """
    generator = session.generator
    concurrency = session.policy.concurrency(config)

    def gather_parts(kind: str, trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
        return gather(parts, kind, trajectories)

    def read_or_play(name: str, play: Play) -> Sequence[Trajectory]:
        return _read_or_play(parts, f"{name}.parquet", play)

    live: Callable[[], Mapping[str, Figure]] = dict
    if isinstance(session.policy, Checkpoint):
        engine_generator = cast(PolicyGenerator, generator)
        live = LiveCounters(lambda: engine_generator.statistics).figures
    reward = make_reward(config, task.rule, session.judge)
    evaluator = PolicyEvaluator(
        name=session.policy.name,
        agent=make_agent(config.agent, session.tokenizer),
        reward=reward.at(generator.policy_version),
        faults=session.faults,
        generator=generator,
        worker=session.worker_generator,
        task=task,
        config=config,
        progress=session.progress,
        preemption=session.preemption,
        concurrency=concurrency,
        samples=session.samples,
        part_questions=max(MIN_PART_QUESTIONS, 2 * concurrency),
        live=live,
        gather=gather_parts,
        keep=read_or_play,
    )
    return evaluator.run()


def _ask_judge(judge: Judge, place: str, scores: Scores, progress: Progress) -> dict[str, Any]:
    """Let the judge judge the greedy answers, print the result, and return it."""
    progress.line(f"{judge.name} at {place} judges {scores.greedy.score.questions} answers")
    verdicts = judge.judge(scores.questions, scores.greedy.trajectories, scores.rule).summary()
    progress.line(
        f"{judge.name} accepts {verdicts['judge']}% of the answers; it gave no verdict on "
        f"{verdicts['judge_failures']} answers, which are left out. It accepted "
        f"{verdicts['judge_yes_not_exact']} answers that do not match exactly, and rejected "
        f"{verdicts['judge_no_but_exact']} that do"
    )
    return verdicts | {"judged_by": judge.name}


def _settings(config: Config, task: Task) -> dict[str, Any]:
    """Return the settings that a result was made with. The policy is described elsewhere."""
    return {
        "task": task.name,
        "environment": task.environment_kind,
        "split": config.eval.split,
        "agent": config.agent.kind,
        # Number of questions that the task could not ask.
        "left_out": len(getattr(task, "left_out", ())),
        "notes": list(getattr(task, "notes", ())),
        # How many of a question's own passages a search shows, as in "5 of 10 passages".
        "shown": getattr(task, "shown", ""),
        "settings": {
            "task": to_dict(config.task),
            "agent": to_dict(config.agent),
        },
        # Baselines have only one prompt, and no setting for it.
        "prompt": getattr(config.agent, "prompt", None),
        "seed": config.seed,
        "temperature": config.eval.temperature,
    }


def _open_worker(worker: Checkpoint, config: Config, tokenizer: Tokenizer) -> ScoredGenerator:
    """Load the worker's model. Raises UserError if its tokenizer differs from the planner's."""
    worker_tokenizer, generator = worker.open(config)
    sample = "Who? <think> Ghent [1] </think> 14 März 1961"
    has_same_size = worker_tokenizer.vocab_size == tokenizer.vocab_size
    if not has_same_size or (
        worker_tokenizer.encode_trusted(sample) != tokenizer.encode_trusted(sample)
    ):
        raise UserError(
            f"planner and worker need the same tokenizer, but --worker {worker.place} has another "
            f"one (it has {worker_tokenizer.vocab_size:,} tokens, and the planner's has "
            f"{tokenizer.vocab_size:,}): choose a worker with the planner's tokenizer"
        )
    return generator


def _stem(config: Config, task: Task) -> str:
    """Return the beginning of a result's file name, which names the task and the agent."""
    agent = config.agent
    words = [task.name, task.environment_kind]
    if getattr(config.task, "setting", "open") == "distractor":
        words.append("distractor")
    if agent.kind != "mujica":
        words.append(agent.kind.replace("_", "-"))
    if isinstance(agent, SingleConfig):
        words.append(agent.style.replace("_", "-"))
    if isinstance(agent, MujicaConfig) and agent.protocol == "evipath":
        words.append("evipath")
    words += [f"no-{name}" for name in ("split", "parallel") if not getattr(agent, name, True)]
    return "-".join(words)


def _parts_folder(
    config: Config, task: Task, policy: Checkpoint | Endpoint, worker: Checkpoint | None
) -> RunPath:
    """Return the folder that stores the parts of an evaluation until it is finished.

    All processes of a job share this folder.
    """
    identity = distributed.broadcast("parts", lambda: _identity(config, task, policy, worker))
    return policy.out / f".parts-{identity}"


def _identity(
    config: Config, task: Task, policy: Checkpoint | Endpoint, worker: Checkpoint | None
) -> str:
    """Return a hash of everything that the trajectories of a part depend on.

    This covers the settings, the questions, the passages or the graph, and the weights. Questions,
    passages and weights are identified by their content, because two data folders may have the same
    names, sizes and times.
    """
    settings = (
        config.task,
        config.agent,
        config.engine,
        config.eval,
        config.trainer.dtype,
        config.staged,
        config.judge,
    )
    questions = held_out_questions(task, config)
    weights = []
    for checkpoint in (policy, worker):
        for name in ("model", "adapter"):
            folder = getattr(checkpoint, name, None)
            weights.append([] if folder is None else describe_folder(folder))
    content = [
        fingerprint_of_questions(questions),
        fingerprint_of_searches(task, questions),
        weights,
    ]
    identity = [
        repr(settings),
        repr(getattr(policy, "remote", None)),
        config.reward,
        config.seed,
        policy.place,
        policy.name,
        distributed.processes(),
        content,
    ]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:12]


def _read_or_play(parts: RunDirectory, name: str, play: Play) -> Sequence[Trajectory]:
    """Read a part that an earlier start stored, or play it and store it.

    If the stored part is damaged, for example because the disk was full, it is played again.
    """
    if parts.exists(name):
        try:
            return shards.decode(parts.read(name), name)
        except StoreError as error:
            _log.warning("%s; these episodes are played again", error)
    trajectories = play()
    atomic_write(parts.root / name, shards.encode(trajectories))
    return trajectories


def _require_writable(folder: RunPath) -> None:
    """Check that results can be written into a folder. Raises UserError otherwise.

    This is checked before the evaluation, which takes minutes. A folder in a bucket is not checked:
    it reports an error at the first write.
    """
    if not isinstance(folder, Path):
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot write into {folder} ({error.strerror}): choose another folder with --out"
        ) from error
    if not os.access(folder, os.W_OK):
        raise UserError(f"cannot write into {folder}: choose another folder with --out")
