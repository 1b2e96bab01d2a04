"""Evaluating policies under configurations: score, print, and write the results. Called by
`eval`."""

import asyncio
import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from mujica_jax.agents.agent import Attempt, EnginePolicy, TwoPolicies, gather_polled
from mujica_jax.agents.faults import FaultGuard
from mujica_jax.config.schema import Config, MujicaConfig, SingleConfig, TaskConfig
from mujica_jax.errors import StoreError, UserError
from mujica_jax.inference.counters import LiveCounters
from mujica_jax.inference.generator import PolicyGenerator
from mujica_jax.methods.evaluation import (
    Play,
    ScoredGenerator,
    Scores,
    held_out_questions,
    score_policy,
)
from mujica_jax.methods.judge import Judge, judge_behind
from mujica_jax.methods.parts import (
    check_engine_temperatures,
    check_prompts,
    make_agent,
    make_reward,
    statistics_of,
)
from mujica_jax.methods.policies import Checkpoint
from mujica_jax.methods.remote import Endpoint
from mujica_jax.methods.setup import about_questions, build_task, check_dtypes, require_packages
from mujica_jax.methods.shares import gather
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.records import Question, Trajectory
from mujica_jax.report import comparison
from mujica_jax.report.comparison import Compared
from mujica_jax.report.progress import NoConsole, Progress
from mujica_jax.report.results import question_tree, score_table
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

MIN_PART_QUESTIONS = 64  # questions that are kept together: what a kill may cost


def evaluate(
    configs: Sequence[Config],
    policy: Checkpoint | Endpoint,
    preemption: Preemption,
    *,
    worker: Checkpoint | None = None,
    judge: Endpoint | None = None,
    sampled: bool = True,
    plot: bool = False,
    ask: str | None = None,
    note: str | None = None,
) -> None:
    """Score, print, and write the results; of several configurations, which differ in task and
    agent, a table too. Or show how the first one's agent answers what `ask` says. `note` is printed
    first."""
    first = configs[0]
    if plot:
        import_extra("matplotlib", "--plot", extra="plots")
    if ask is None:
        _require_writable(policy.out)
    require_packages(first)
    check_dtypes(first)
    use_compilation_cache()
    tasks: dict[TaskConfig, Task] = {}
    for config in configs:
        if config.task not in tasks:
            tasks[config.task] = build_task(config, learns=False)
    tokenizer, generator = policy.open(first)
    if isinstance(policy, Checkpoint):
        check_engine_temperatures(
            cast(PolicyGenerator, generator), first, trains=False, sampled=sampled and ask is None
        )
    for config in configs:
        check_prompts(config.agent, tokenizer, tasks[config.task].environment_kind)
    reader = None if worker is None else _worker(worker, first, tokenizer)
    progress = Progress() if distributed.is_primary() else Progress(NoConsole(), live=False)
    faults = FaultGuard(first.faults)
    asked_judge = None if judge is None else judge_behind(judge, first)
    if note is not None:
        progress.line(note)
    if isinstance(policy, Checkpoint) and (otherwise := policy.trained_otherwise(first.agent)):
        progress.line(f"the policy was trained under other settings: {'; '.join(otherwise)}")
    if worker is not None and (otherwise := worker.trained_otherwise(first.agent)):
        progress.line(f"the worker was trained under other settings: {'; '.join(otherwise)}")
    if ask is not None:
        task, writes = tasks[first.task], EnginePolicy(generator)
        asked = Question(id="asked", text=ask, answers=())
        attempt = Attempt(question=asked, number=0, seed=first.seed, temperature=0.0)
        agent = make_agent(first.agent, tokenizer)
        by = writes if reader is None else TwoPolicies(writes, EnginePolicy(reader))
        playing = gather_polled([agent.run(attempt, task.environment(asked), by)], preemption.check)
        (trajectory,) = asyncio.run(playing)
        return progress.show(question_tree(asked, trajectory))
    folders = [_parts(config, tasks[config.task], policy, worker) for config in configs]
    compared = [
        _evaluate_one(
            config,
            tasks[config.task],
            parts=parts,
            policy=policy,
            worker=worker,
            judge=asked_judge,
            faults=faults,
            tokenizer=tokenizer,
            generator=generator,
            reader=reader,
            progress=progress,
            preemption=preemption,
            sampled=sampled,
        )
        for config, parts in zip(configs, folders, strict=True)
    ]
    distributed.barrier("all is evaluated")
    if not distributed.is_primary():
        return
    if len(compared) > 1:
        found = comparison.rows(compared)
        file = policy.out / f"comparison-{first.eval.split}.json"
        atomic_write(file, (json.dumps(found, indent=2, allow_nan=False) + "\n").encode())
        atomic_write(file.with_suffix(".md"), comparison.markdown(found).encode())
        if plot:
            atomic_write(file.with_suffix(".png"), comparison.draw(found))
        progress.show(comparison.table(found))
        progress.line(f"comparison: {file}")
    for folder in folders:  # all that they hold is in the results
        RunDirectory(folder).remove_folder("")
    if isinstance(policy, Endpoint):
        progress.line(f"{policy.place}: {policy.generator.statistics.sentence()}")


def _evaluate_one(
    config: Config,
    task: Task,
    *,
    parts: RunPath,
    policy: Checkpoint | Endpoint,
    worker: Checkpoint | None,
    judge: Judge | None,
    faults: FaultGuard,
    tokenizer: Tokenizer,
    generator: ScoredGenerator,
    reader: ScoredGenerator | None,
    progress: Progress,
    preemption: Preemption,
    sampled: bool,
) -> Compared:
    live = dict
    if isinstance(policy, Checkpoint):  # its engine is on this machine
        live = LiveCounters(lambda: cast(PolicyGenerator, generator).statistics).figures
    agent = "" if config.agent.kind == "mujica" else f", {config.agent.kind}"
    where = f"{task.name} ({task.environment_kind}{agent}), {config.eval.split}"
    progress.line(f"{policy.name} from {policy.place}, {where}")
    for sentence in about_questions(task):
        progress.line(sentence)
    file = policy.out / f"{_stem(config, task)}-{config.eval.split}.json"
    if distributed.is_primary() and file.exists():
        progress.line(f"replaces the result in {file}: give --out another folder to keep both")
    scores = score_policy(
        policy.name,
        agent=make_agent(config.agent, tokenizer),
        reward=make_reward(config, task.rule, judge).at(generator.policy_version),
        faults=faults,
        generator=generator,
        task=task,
        config=config,
        progress=progress,
        concurrency=policy.concurrency(config),
        live=live,
        preemption=preemption,
        worker=reader,
        sampled=sampled,
        gather=lambda kind, own: gather(RunDirectory(parts), kind, own),
        part_questions=max(MIN_PART_QUESTIONS, 2 * policy.concurrency(config)),
        keep=lambda name, play: _kept(RunDirectory(parts), f"{name}.parquet", play),
    )
    if isinstance(policy, Endpoint):
        policy.generator.require_an_answer()
    summary = scores.summary()
    if judge is not None and distributed.is_primary():
        summary["greedy"] |= _judged(judge, str(config.judge.base_url), scores, progress)
    shown = getattr(task, "shown", "")  # how many of a question's own passages a search shows
    name = f"{task.name} {task.environment_kind}"
    compared = Compared(
        task=f"{name}, {shown}" if shown else name,
        agent=config.agent.kind,
        summary=summary["greedy"],
        em=scores.exact_matches(),
    )
    if not distributed.is_primary():
        return compared
    about = (
        _about(config, task) | policy.about() | ({} if worker is None else {"worker": worker.place})
    )
    atomic_write(file.with_suffix(".predictions.jsonl"), scores.predictions())
    atomic_write(file.with_suffix(".parquet"), shards.encode(scores.greedy.trajectories))
    atomic_write(file, (json.dumps(about | summary, indent=2, allow_nan=False) + "\n").encode())
    progress.show(score_table(summary["greedy"], summary.get("sampled")))
    if shown:
        progress.line(f"a search shows {shown} of its question")
    for kind, found in summary.items():
        reasons = ", ".join(f"{reason} {count}" for reason, count in found["stop_reasons"].items())
        progress.line(
            f"{kind}: {found['searches']:.2f} searches a question; episodes ended: {reasons}"
        )
    progress.line(f"retrieval: {statistics_of(task, scores.questions).sentence()}")
    progress.line(f"results and predictions: {file}")
    return compared


def _judged(judge: Judge, place: str, scores: Scores, progress: Progress) -> dict[str, Any]:
    """Return what the judge says of the greedy answers."""
    progress.line(f"{judge.name} at {place} judges {scores.greedy.score.questions} answers")
    verdicts = judge.judge(scores.questions, scores.greedy.trajectories, scores.rule).summary()
    progress.line(
        f"{judge.name} says yes to {verdicts['judge']}%, without the {verdicts['judge_failures']} "
        "answers on which it gave no verdict; yes without an exact match "
        f"{verdicts['judge_yes_not_exact']} times and no with one {verdicts['judge_no_but_exact']} "
        "times"
    )
    return verdicts | {"judged_by": judge.name}


def _about(config: Config, task: Task) -> dict[str, Any]:
    """What a result was made with, beside the policy."""
    return {
        "task": task.name,
        "environment": task.environment_kind,
        "split": config.eval.split,
        "agent": config.agent.kind,
        "left_out": len(getattr(task, "left_out", ())),  # questions that the task could not ask
        "notes": list(getattr(task, "notes", ())),
        "shown": getattr(
            task, "shown", ""
        ),  # of a question's own passages, as in "5 of 10 passages"
        "settings": {
            "task": dataclasses.asdict(config.task),
            "agent": dataclasses.asdict(config.agent),
        },
        "prompt": getattr(config.agent, "prompt", None),  # baselines have one each
        "seed": config.seed,
        "temperature": config.eval.temperature,
    }


def _worker(worker: Checkpoint, config: Config, tokenizer: Tokenizer) -> ScoredGenerator:
    """Raises UserError where its tokens are others."""
    own, generator = worker.open(config)
    said = "Who? <think> Ghent [1] </think> 14 März 1961"
    if own.vocab_size != tokenizer.vocab_size or own.encode_trusted(
        said
    ) != tokenizer.encode_trusted(said):
        raise UserError(
            f"--worker {worker.place} has {own.vocab_size:,} tokens and the planner's checkpoint "
            f"{tokenizer.vocab_size:,}, or splits text otherwise: choose a worker with the same "
            "tokenizer"
        )
    return generator


def _stem(config: Config, task: Task) -> str:
    """What tells results apart in their files' names."""
    agent = config.agent
    which = [task.name, task.environment_kind]
    which += ["distractor"] * (getattr(config.task, "setting", "open") == "distractor")
    which += [] if agent.kind == "mujica" else [agent.kind.replace("_", "-")]
    which += [agent.style.replace("_", "-")] if isinstance(agent, SingleConfig) else []
    which += ["evipath"] * (isinstance(agent, MujicaConfig) and agent.protocol == "evipath")
    which += [f"no-{name}" for name in ("split", "parallel") if not getattr(agent, name, True)]
    return "-".join(which)


def _parts(
    config: Config, task: Task, policy: Checkpoint | Endpoint, worker: Checkpoint | None
) -> RunPath:
    """Return the folder that keeps what is played until all is: one for all processes of a job."""
    identity = distributed.broadcast("parts", lambda: _identity(config, task, policy, worker))
    return policy.out / f".parts-{identity}"


def _identity(
    config: Config, task: Task, policy: Checkpoint | Endpoint, worker: Checkpoint | None
) -> str:
    """Return a hash of all that a part depends on: settings, questions, passages or graph, and
    weights.

    Questions, passages and weights are known by their content: two data folders may agree in names,
    sizes and times.
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
    identity = [repr(settings), repr(getattr(policy, "remote", None)), config.reward, config.seed]
    identity += [policy.place, policy.name, distributed.processes(), content]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:12]


def _kept(parts: RunDirectory, name: str, play: Play) -> Sequence[Trajectory]:
    """Return what an earlier start has played of a part. A part that is damaged, as by a full disk,
    is played again."""
    if parts.exists(name):
        try:
            return shards.decode(parts.read(name), name)
        except StoreError as error:
            _log.warning("%s; it is played again", error)
    played = play()
    atomic_write(parts.root / name, shards.encode(played))
    return played


def _require_writable(folder: RunPath) -> None:
    """Asked first: an evaluation takes minutes. (A bucket answers at the first write.)"""
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
