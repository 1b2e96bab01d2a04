"""Evaluate a policy on the held-out questions again: by question kind, greedily and sampled.

    python -m mujica_jax.eval --checkpoint RUN [--policy N] [--section.field value ...]
    python -m mujica_jax.eval CONFIG --checkpoint HF_DIR|FILE.gguf|smollm2 [--out DIR] [--section.field value ...]
    python -m mujica_jax.eval [CONFIG] --init HF_DIR|FILE.gguf|smollm2 --adapter DIR [...]
    python -m mujica_jax.eval CONFIG --remote.base-url URL --remote.model NAME --remote.mode chat \\
        --remote.tokenizer DIR [...]

RUN is a run directory: its config.json is the configuration and its latest policy is evaluated. A Hugging Face
directory needs the name of a configuration, as `train` takes it; given with a run, that one replaces the run's own, so
that a policy is scored out of domain (`configs/musique_v5e.py`), and what it says otherwise of the agent is printed.
`--init` is another name of `--checkpoint`, for models that are no run; an adapter that a run wrote
(RUN/policies/N/adapter) brings the configuration of its run. Flags change what is evaluated: another seed, more
questions, other limits, or the passages of a task whose graph the policy was trained on (`--task.environment text`).
With `--agents direct rag` and `--tasks CONFIG` other agents and tasks are evaluated as well, and compared with the
first agent by a paired bootstrap. A model behind an OpenAI-compatible endpoint is evaluated under a configuration as
well, with the prompts that its agent.prompt names (docs/endpoints.md).

Results go to RUN/eval/<task>-<environment>-<split>.json (without a run ./eval, or --out; an agent other than mujica
stands in the name), the greedy predictions beside it as JSON lines and their trajectories as Parquet. The same command
goes on where an earlier one was killed.
"""

import argparse
import dataclasses
import hashlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mujica_jax.config.checks import check
from mujica_jax.config.fields import check_remote
from mujica_jax.config.files import from_dict, load_config, of_kind, override, take_file
from mujica_jax.config.schema import (
    AgentConfig,
    Config,
    DistributedConfig,
    EngineConfig,
    EvalConfig,
    RemoteConfig,
    SingleConfig,
    TaskConfig,
    TwoWikiConfig,
)
from mujica_jax.errors import UserError
from mujica_jax.methods.policies import WANTED, SavedPolicy, find_policy, init_as_checkpoint, is_run, read_object
from mujica_jax.methods.remote import Endpoint, open_endpoint
from mujica_jax.runtime import distributed
from mujica_jax.runtime.host_memory import keep_freed_memory
from mujica_jax.runtime.preemption import Preempted, Preemption
from mujica_jax.runtime.provenance import differences
from mujica_jax.runtime.standard_output import run_program
from mujica_jax.storage.run_directory import run_path

if TYPE_CHECKING:
    from mujica_jax.methods.evaluation import Play, ScoredGenerator
    from mujica_jax.models.tokenizer import Tokenizer
    from mujica_jax.records import Trajectory
    from mujica_jax.report.comparison import Compared
    from mujica_jax.report.progress import Progress
    from mujica_jax.storage.run_directory import RunDirectory, RunPath
    from mujica_jax.tasks.task import Task

MIN_PART_QUESTIONS = 64  # questions that are kept together: what a kill may cost
HELP_CONFIG = "tiny_world"  # its values are the defaults that --help shows without a checkpoint


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalArguments:
    """Evaluate a policy on held-out questions. The sections are those of a configuration that matter to it."""

    # A run directory (local or gs://BUCKET/PREFIX). With a configuration's name also a Hugging Face directory, a GGUF
    # file, or smollm2.
    checkpoint: str | None
    adapter: str | None = None  # folder of a LoRA adapter (PEFT's format) on top of a checkpoint that is no run
    policy: int | None = None  # of a run: 0 is the warm-up, N the policy after round N (default: the latest)
    # Another checkpoint or run that writes as mujica's worker; it has the tokenizer of the first.
    worker: str | None = None
    out: str | None = None  # folder of the results (default: RUN/eval, or eval)
    agents: tuple[str, ...] = ()  # further kinds, with the limits of `agent`: all are compared in one table
    tasks: tuple[str, ...] = ()  # configurations whose tasks are evaluated as well, by the same agents
    plot: bool = False  # a picture of the table too (extra `plots`)
    task: TaskConfig
    agent: AgentConfig
    engine: EngineConfig
    eval: EvalConfig
    reward: str
    seed: int
    remote: RemoteConfig
    judge: RemoteConfig  # a model behind an endpoint that says which answers mean the same as the gold ones
    distributed: DistributedConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint(SavedPolicy):
    """What is evaluated and where that is written down."""

    out: "RunPath"

    def concurrency(self, config: Config) -> int:
        return config.engine.slots

    def open(self, config: Config) -> "tuple[Tokenizer, ScoredGenerator]":
        from flax import nnx

        from mujica_jax.inference.engine.factory import engine_mesh
        from mujica_jax.methods.parts import make_generator, use_weights

        tokenizer, decoder = self.load(config.trainer.dtype, engine_mesh(config.engine))
        generator = make_generator(decoder, config, tokenizer)
        if config.engine.weights != "compute" or self.adapter is not None:
            use_weights(generator, decoder, nnx.state(decoder), config.engine.weights, self.version)
        generator.policy_version = self.version
        return tokenizer, generator

    def about(self) -> dict[str, Any]:
        adapter = {} if self.adapter is None else {"adapter": str(self.adapter)}
        return {"checkpoint": self.place, "policy": self.version, **adapter}

    def trained_otherwise(self, agent: AgentConfig) -> list[str]:
        """What the run that made the policy says otherwise of its agent: a configuration beside a run replaces it."""
        if self.run is None:
            return []
        trained, now = read_object(self.run / "config.json")["config"]["agent"], dataclasses.asdict(agent)
        said = trained if trained["kind"] == now["kind"] else {"kind": trained["kind"]}
        return differences({"agent": said}, {"agent": {key: now.get(key) for key in said}}, ignore=())

    def closing_lines(self) -> list[str]:
        return []


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, or ended by SIGTERM, its parts kept; 2 a mistake of the user's; 130 interrupted."""
    with Preemption(kept="what was evaluated is kept") as preemption:
        preemption.then = "the same command goes on"
        try:
            given, config = command_line(sys.argv[1:] if arguments is None else arguments)
            distributed.start(given.distributed, preemption.on_notice)
            find = find_checkpoint if given.remote.base_url is None else find_endpoint
            configs = all_configs(given, config)
            policy = distributed.primary_first("the policy", lambda: find(given))
            worker = None
            if given.worker is not None:
                named = dataclasses.replace(given, checkpoint=given.worker, policy=None, adapter=None)
                worker = distributed.primary_first("the worker's policy", lambda: find_checkpoint(named))
            judge = None if given.judge.base_url is None else open_endpoint(given.judge, policy.out)
            evaluate(configs, policy, preemption, worker=worker, judge=judge, plot=given.plot)
            distributed.finish()
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            distributed.abort(str(error), 2)
            return 2
        except Preempted as ended:
            print(f"\n{ended}", file=sys.stderr)
            distributed.abort(str(ended), preemption.status)
            return preemption.status
        except Exception:
            distributed.abort_with_traceback()
            raise
    return 0


def all_configs(given: EvalArguments, config: Config) -> list[Config]:
    """Of every task and agent that is asked for. Raises UserError before anything is loaded."""
    if given.worker is not None and (config.agent.kind != "mujica" or given.agents):
        raise UserError(
            f"--worker is {given.worker}, and of {', '.join((config.agent.kind, *given.agents))} only mujica has "
            "workers: leave it out, or evaluate mujica alone"
        )
    if given.plot and not (given.agents or given.tasks):
        raise UserError("--plot is True and there is nothing to compare: add --agents or --tasks")
    tasks = [config.task, *(load_config(name).task for name in given.tasks)]
    agents = [config.agent, *(of_kind(config, "agent", kind).agent for kind in given.agents)]
    found = [dataclasses.replace(config, task=task, agent=agent) for task in tasks for agent in agents]
    for one in found:
        check(one)
    named = [(one.task.kind, one.task.environment, one.agent.kind) for one in found]
    if twice := [" ".join(name) for name in named if named.count(name) > 1]:
        raise UserError(f"{twice[0]} is asked for twice and would be written into one file: name each once")
    return found


def command_line(arguments: Sequence[str]) -> tuple[EvalArguments, Config]:
    """`[CONFIG] --checkpoint DIR [flags]` -> the arguments, and the whole configuration under them."""
    words = init_as_checkpoint(arguments)
    name = take_file(words)
    checkpoint, adapter = _flag_value(words, "--checkpoint"), _flag_value(words, "--adapter")
    remote = _flag_value(words, "--remote.base-url", "--remote.base_url")
    if remote is not None and (name is None or checkpoint is not None):
        raise UserError(
            f"--remote.base-url is {remote}: an endpoint is evaluated under a configuration and without a checkpoint, "
            f"as in `python -m mujica_jax.eval {HELP_CONFIG} --remote.base-url {remote} ...`"
        )
    if name is None and adapter is not None:
        config = _adapter_config(Path(adapter))
    elif name is None and checkpoint is not None:
        config = _run_config(run_path(checkpoint))
    else:
        config = load_config(name or HELP_CONFIG)
    shared = {field.name: getattr(config, field.name) for field in dataclasses.fields(Config)}
    sections = {field.name for field in dataclasses.fields(EvalArguments)} & set(shared)
    defaults = {section: shared[section] for section in sections}
    defaults["remote"] = RemoteConfig()
    defaults["judge"] = RemoteConfig()
    defaults["distributed"] = DistributedConfig()  # a run's own says which machines trained it
    defaults["checkpoint"] = checkpoint if remote is not None else _given_or_missing(checkpoint)
    given = override(EvalArguments(**defaults), words, prog="python -m mujica_jax.eval")
    changed = {section: getattr(given, section) for section in sections}
    if isinstance(given.task, TwoWikiConfig):  # copies are for demonstrations, and of graphs only
        changed["task"] = dataclasses.replace(given.task, augmented_copies=0)
    config = dataclasses.replace(config, **changed)
    check(config)
    check_remote(given.remote)
    check_remote(given.judge, "judge")
    return given, config


def find_endpoint(given: EvalArguments) -> Endpoint:
    """The model behind the endpoint that the flags describe."""
    if given.adapter is not None:
        raise UserError(f"--adapter is {given.adapter} and an endpoint has its own model: leave --adapter out")
    if given.policy is not None:
        raise UserError(
            f"--policy is {given.policy} and {given.remote.base_url} is no run directory: leave --policy out"
        )
    return open_endpoint(given.remote, run_path(given.out or "eval"))


def find_checkpoint(given: EvalArguments) -> Checkpoint:
    """The policy to evaluate."""
    assert given.checkpoint is not None, "only an endpoint is evaluated without one"
    found = find_policy(given.checkpoint, policy=given.policy, adapter=given.adapter)
    folder = run_path(given.out or "eval") if given.out or found.run is None else found.run / "eval"
    return Checkpoint(**vars(found), out=folder)


def evaluate(
    configs: Sequence[Config],
    policy: Checkpoint | Endpoint,
    preemption: Preemption,
    *,
    worker: Checkpoint | None = None,
    judge: Endpoint | None = None,
    plot: bool = False,
) -> None:
    """Score, print, and write the results; of several configurations, which differ in task and agent, a table too."""
    # Imported here: a mistake in the arguments is answered before JAX has started.
    from mujica_jax.inference.counters import LiveCounters
    from mujica_jax.inference.scheduler import BatchedGenerator
    from mujica_jax.methods.setup import build_task, check_dtypes, require_packages
    from mujica_jax.report import comparison
    from mujica_jax.report.progress import NoConsole, Progress
    from mujica_jax.runtime.compilation_cache import use_compilation_cache
    from mujica_jax.runtime.extras import import_extra
    from mujica_jax.storage.run_directory import RunDirectory, atomic_write

    first = configs[0]
    if plot:
        import_extra("matplotlib", "--plot", extra="plots")
    _require_writable(policy.out)
    require_packages(first)
    check_dtypes(first)
    use_compilation_cache()
    tasks: dict[TaskConfig, Task] = {}
    for config in configs:
        if config.task not in tasks:
            tasks[config.task] = build_task(config, learns=False)
    tokenizer, generator = policy.open(first)
    reader = None if worker is None else _worker(worker, first, tokenizer)
    live = LiveCounters(lambda: generator.statistics).figures if isinstance(generator, BatchedGenerator) else dict
    progress = Progress() if distributed.is_primary() else Progress(NoConsole(), live=False)
    if isinstance(policy, Checkpoint) and (otherwise := policy.trained_otherwise(first.agent)):
        progress.line(f"the policy was trained under other settings: {'; '.join(otherwise)}")
    compared = [
        _evaluate_one(
            config, tasks[config.task], policy, worker, judge, tokenizer, generator, reader, progress, live, preemption
        )
        for config in configs
    ]
    folders = [_parts(config, policy, worker) for config in configs]
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
    for line in policy.closing_lines():
        progress.line(line)


def _evaluate_one(
    config: Config,
    task: "Task",
    policy: Checkpoint | Endpoint,
    worker: Checkpoint | None,
    judge: Endpoint | None,
    tokenizer: "Tokenizer",
    generator: "ScoredGenerator",
    reader: "ScoredGenerator | None",
    progress: "Progress",
    live: Any,
    preemption: Preemption,
) -> "Compared":
    from mujica_jax.methods.evaluation import score_policy
    from mujica_jax.methods.judge import Judge
    from mujica_jax.methods.parts import make_agent, make_reward, statistics_of
    from mujica_jax.methods.shares import gather
    from mujica_jax.report.comparison import Compared
    from mujica_jax.report.results import score_table
    from mujica_jax.storage.run_directory import RunDirectory, atomic_write
    from mujica_jax.trajectories import shards

    parts = _parts(config, policy, worker)
    agent = "" if config.agent.kind == "mujica" else f", {config.agent.kind}"
    where = f"{task.name} ({task.environment_kind}{agent}), {config.eval.split}"
    progress.line(f"{policy.name} from {policy.place}, {where}")
    if left_out := getattr(task, "left_out", 0):
        progress.line(f"{left_out} questions are left out: the graph does not know their entities or answers")
    scores = score_policy(
        policy.name,
        agent=make_agent(config.agent, tokenizer),
        reward=make_reward(config, task.rule).at(generator.policy_version),
        generator=generator,
        task=task,
        config=config,
        progress=progress,
        concurrency=policy.concurrency(config),
        live=live,
        preemption=preemption,
        worker=reader,
        gather=lambda kind, own: gather(RunDirectory(parts), kind, own),
        part_questions=max(MIN_PART_QUESTIONS, 2 * policy.concurrency(config)),
        keep=lambda name, play: _kept(RunDirectory(parts), f"{name}.parquet", play),
    )
    summary = scores.summary()
    if judge is not None and distributed.is_primary():
        progress.line(f"{judge.name} at {judge.place} judges {len(scores.questions)} answers")
        judged = Judge(judge.generator, judge.tokenizer, f"{judge.place} {judge.name}")
        judgement = judged.judge(scores.questions, scores.greedy.trajectories, task.rule).summary()
        summary["greedy"] |= judgement | {"judged_by": judge.name}
        progress.line(
            f"{judge.name} says yes to {judgement['judge']}% and fails {judgement['judge_failures']} times; yes "
            f"without an exact match {judgement['judge_yes_not_exact']} times and no with one "
            f"{judgement['judge_no_but_exact']} times"
        )
    compared = Compared(
        task=f"{task.name} {task.environment_kind}",
        agent=config.agent.kind,
        summary=summary["greedy"],
        em=scores.exact_matches(),
    )
    if not distributed.is_primary():
        return compared
    file = policy.out / f"{_stem(config, task)}-{config.eval.split}.json"
    about = {
        "task": task.name,
        "environment": task.environment_kind,
        "split": config.eval.split,
        "agent": config.agent.kind,
        "left_out": getattr(task, "left_out", 0),  # questions that the task could not ask
        "settings": {"task": dataclasses.asdict(config.task), "agent": dataclasses.asdict(config.agent)},
        **policy.about(),
        **({} if worker is None else {"worker": worker.place}),
        "prompt": getattr(config.agent, "prompt", None),  # baselines have one each
        "seed": config.seed,
        "temperature": config.eval.temperature,
    }
    atomic_write(file.with_suffix(".predictions.jsonl"), scores.predictions())
    atomic_write(file.with_suffix(".parquet"), shards.encode(scores.greedy.trajectories))
    atomic_write(file, (json.dumps(about | summary, indent=2, allow_nan=False) + "\n").encode())
    progress.show(score_table(summary["greedy"], summary["sampled"]))
    for kind, found in summary.items():
        reasons = ", ".join(f"{reason} {count}" for reason, count in found["stop_reasons"].items())
        progress.line(f"{kind}: {found['searches']:.2f} searches a question; episodes ended: {reasons}")
    progress.line(f"retrieval: {statistics_of(task, scores.questions).sentence()}")
    progress.line(f"results and predictions: {file}")
    return compared


def _worker(worker: Checkpoint, config: Config, tokenizer: "Tokenizer") -> "ScoredGenerator":
    """Raises UserError where its tokens are others."""
    own, generator = worker.open(config)
    said = "Who? <think> Ghent [1] </think> 14 März 1961"
    if own.vocab_size != tokenizer.vocab_size or own.encode_trusted(said) != tokenizer.encode_trusted(said):
        raise UserError(
            f"--worker {worker.place} has {own.vocab_size:,} tokens and the planner's checkpoint "
            f"{tokenizer.vocab_size:,}, or splits text otherwise: choose a worker with the same tokenizer"
        )
    return generator


def _stem(config: Config, task: "Task") -> str:
    """What tells results apart in their files' names."""
    agent = config.agent
    which = [task.name, task.environment_kind]
    which += ["distractor"] * (getattr(config.task, "setting", "open") == "distractor")
    which += [] if agent.kind == "mujica" else [agent.kind.replace("_", "-")]
    which += [agent.style.replace("_", "-")] if isinstance(agent, SingleConfig) else []
    which += [f"no-{name}" for name in ("split", "parallel") if not getattr(agent, name, True)]
    return "-".join(which)


def _parts(config: Config, policy: Checkpoint | Endpoint, worker: Checkpoint | None) -> "RunPath":
    """Where what was played is kept until all is: one folder for all processes, whose copies of files differ in age."""
    return policy.out / f".parts-{distributed.broadcast('parts', lambda: _identity(config, policy, worker))}"


def _identity(config: Config, policy: Checkpoint | Endpoint, worker: Checkpoint | None) -> str:
    """What a part that an earlier start has played must agree in."""
    read = (config.task, config.agent, config.engine, config.eval, config.trainer.dtype)
    weights = []
    folders = (getattr(of, name, None) for of in (policy, worker) for name in ("model", "adapter"))
    for folder in folders:
        for path in sorted(folder.rglob("*")) if folder is not None else ():
            found = path.stat()
            weights.append((path.name, found.st_size, found.st_mtime_ns))
    said = [repr(read), repr(getattr(policy, "remote", None)), config.reward, config.seed, policy.place, policy.name]
    said += [weights, distributed.processes()]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:12]


def _kept(parts: "RunDirectory", name: str, play: "Play") -> "Sequence[Trajectory]":
    from mujica_jax.trajectories import shards

    if parts.exists(name):
        return shards.decode(parts.read(name), name)
    played = play()
    parts.create(name, shards.encode(played))
    return played


def _require_writable(folder: "RunPath") -> None:
    """Asked first: an evaluation takes minutes. (A bucket answers at the first write.)"""
    if not isinstance(folder, Path):
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write into {folder} ({error.strerror}): choose another folder with --out") from error
    if not os.access(folder, os.W_OK):
        raise UserError(f"cannot write into {folder}: choose another folder with --out")


def _run_config(folder: "RunPath") -> Config:
    """The configuration a run directory was begun with."""
    other = (
        f"{folder} is no run directory: a Hugging Face directory is evaluated under a configuration, as in "
        f"`python -m mujica_jax.eval {HELP_CONFIG} --checkpoint {folder}`"
    )
    return _config_left_in(folder, wanted=WANTED, other=other)


def _adapter_config(folder: Path) -> Config:
    """The configuration of the run that wrote the adapter."""
    other = (
        f"{folder} has no config.json of the run that made it: name a configuration, as in "
        f"`python -m mujica_jax.eval {HELP_CONFIG} --init ... --adapter {folder}`"
    )
    return _config_left_in(folder, wanted="give --adapter a folder as RUN/policies/N/adapter", other=other)


def _config_left_in(folder: "RunPath", *, wanted: str, other: str) -> Config:
    if not folder.is_dir():
        raise UserError(f"there is no directory {folder}: {wanted}")
    if not is_run(folder):
        raise UserError(other)
    return from_dict(Config, read_object(folder / "config.json")["config"])


def _flag_value(words: Sequence[str], *spellings: str) -> str | None:
    """The value of one flag, before the others can be read: they depend on the configuration that it names."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument(*spellings, dest="value")
    try:
        return parser.parse_known_args(words)[0].value
    except argparse.ArgumentError:  # without its value: the whole command line is refused later, with its usage
        return None


def _given_or_missing(checkpoint: str | None) -> Any:
    if checkpoint is not None:
        return checkpoint
    import tyro  # 0.2 s

    return tyro.MISSING


if __name__ == "__main__":
    keep_freed_memory()
    raise SystemExit(run_program(main))
