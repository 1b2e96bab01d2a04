"""Evaluate a policy on the held-out questions again: by question kind, greedily and sampled.

    python -m mujica_jax.eval --checkpoint RUN [--policy N] [--section.field value ...]
    python -m mujica_jax.eval CONFIG --checkpoint HF_DIR|FILE.gguf|smollm2 [--out DIR] [--section.field value ...]
    python -m mujica_jax.eval [CONFIG] --init HF_DIR|FILE.gguf|smollm2 --adapter DIR [...]
    python -m mujica_jax.eval --checkpoint RUN --ask "Who is the mother of the director of Polish-Russian War?"
    python -m mujica_jax.eval CONFIG --remote.base-url URL --remote.model NAME --remote.mode chat \\
        --remote.tokenizer DIR [...]

RUN is a run directory: its config.json is the configuration and its latest policy is evaluated. A
Hugging Face directory needs the name of a configuration, as `train` takes it. Given with a run, the
configuration replaces the run's own, so that a policy is scored out of domain
(`configs/musique_v5e.py`). The agent stays the one that the policy was trained as, and a line says
so where the configuration names another. Flags `--agent.*` change it; `--agent.kind` may name the
configuration's agent, which then is played as the configuration describes it. `--init` is another
name of `--checkpoint`, for models that are no run; an adapter that a run wrote
(RUN/policies/N/adapter) brings the configuration of its run. Flags change what is evaluated:
another seed, more questions, other limits, or the passages of a task whose graph the policy was
trained on (`--task.environment text`). With `--agents direct rag` and `--tasks CONFIG` other agents
and tasks are evaluated as well, and compared with the first agent by a paired bootstrap. A model
behind an OpenAI-compatible endpoint is evaluated under a configuration as well, with the prompts
that its agent.prompt names (docs/endpoints.md).

Results go to RUN/eval/<task>-<environment>-<split>.json (without a run ./eval, or --out; an agent
other than mujica stands in the name), the greedy predictions beside it as JSON lines and their
trajectories as Parquet. The same command goes on where an earlier one was killed.
"""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import tyro

from mujica_jax.config import schema
from mujica_jax.config.checks import check
from mujica_jax.config.fields import check_remote
from mujica_jax.config.files import from_dict, load_config, of_kind, override, take_file, take_flag
from mujica_jax.config.rewards import needs_judge
from mujica_jax.config.schema import AgentConfig, Config, RemoteConfig
from mujica_jax.errors import UserError
from mujica_jax.methods.policies import (
    WANTED,
    Checkpoint,
    find_policy,
    init_as_checkpoint,
    is_run,
    read_object,
)
from mujica_jax.methods.remote import Endpoint, open_endpoint
from mujica_jax.runtime import distributed
from mujica_jax.runtime.host_memory import keep_freed_memory
from mujica_jax.runtime.preemption import Preemption
from mujica_jax.runtime.standard_output import run_program
from mujica_jax.storage.run_directory import RunPath, run_path
from mujica_jax.tasks.data_folder import check_data_dir

ADAPTER_WANTED = "give --adapter a folder as RUN/policies/N/adapter"
HELP_CONFIG = "tiny_world"  # its values are the defaults that --help shows without a checkpoint


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalArguments:
    """Evaluate a policy on held-out questions. The sections are those of a configuration that
    matter to it."""

    # A run directory (local or gs://BUCKET/PREFIX). With a configuration's name also a Hugging Face
    # directory, a GGUF file, or smollm2.
    checkpoint: str | None
    # folder of a LoRA adapter (PEFT's format) on top of a checkpoint that is no run
    adapter: str | None = None
    # of a run: 0 is the warm-up, N the policy after round N (default: the latest)
    policy: int | None = None
    # Another checkpoint or run that writes as mujica's worker; it has the tokenizer of the first.
    worker: str | None = None
    out: str | None = None  # folder of the results (default: RUN/eval, or eval)
    # further kinds, with the limits of `agent`: all are compared in one table
    agents: tuple[str, ...] = ()
    # configurations whose tasks are evaluated as well, by the same agents
    tasks: tuple[str, ...] = ()
    # a second time at eval.temperature; False: greedily alone, in half the time
    sampled: bool = True
    plot: bool = False  # a picture of the table too (extra `plots`)
    # a question of yours over the task's passages: shows how it is answered, in place of scores
    ask: str | None = None
    task: schema.TaskConfig
    agent: schema.AgentConfig
    engine: schema.EngineConfig
    eval: schema.EvalConfig
    reward: str
    seed: int
    remote: RemoteConfig
    judge: schema.JudgeConfig
    faults: schema.FaultConfig
    distributed: schema.DistributedConfig


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, or ended by SIGTERM, its parts kept; 2 a mistake of the user's; 130
    interrupted."""
    preemption = Preemption(kept="what was evaluated is kept")
    preemption.then = "the same command goes on"

    def program() -> None:
        words = sys.argv[1:] if arguments is None else arguments
        given, config = command_line(words)
        distributed.start(given.distributed, preemption.on_notice)
        find = find_checkpoint if given.remote.base_url is None else find_endpoint
        configs = all_configs(given, config)
        policy = distributed.primary_first("the policy", lambda: find(given))
        worker = None
        if given.worker is not None:
            named = dataclasses.replace(given, checkpoint=given.worker, policy=None, adapter=None)
            worker = distributed.primary_first(
                "the worker's policy", lambda: find_checkpoint(named)
            )
        judge = None if given.judge.base_url is None else open_endpoint(given.judge, policy.out)
        # A mistake in the arguments is answered before JAX has started.
        from mujica_jax.methods.evaluate_policies import evaluate

        options = {
            "sampled": given.sampled,
            "plot": given.plot,
            "ask": given.ask,
            "note": other_agent(words),
        }
        evaluate(configs, policy, preemption, worker=worker, judge=judge, **options)
        distributed.finish()

    return preemption.exit_status(program)


def all_configs(given: EvalArguments, config: Config) -> list[Config]:
    """Of every task and agent that is asked for. Raises UserError before anything is loaded."""
    if given.worker is not None and (config.agent.kind != "mujica" or given.agents):
        raise UserError(
            f"--worker is {given.worker}, and of {', '.join((config.agent.kind, *given.agents))} "
            "only mujica has workers: leave it out, or evaluate mujica alone"
        )
    if given.ask is not None:
        if not given.ask.strip():
            raise UserError(f"--ask is {given.ask!r} and no question: write one between quotes")
        task, setting = config.task, getattr(config.task, "setting", "open")
        environment = getattr(task, "environment", "of its own")
        if task.kind == "tiny_world" or (environment, setting) != ("text", "open"):
            raise UserError(
                f"--ask is {given.ask!r} and {task.kind} has environment {environment}, setting "
                f"{setting}: a question of yours comes with no entities and no passages; ask over "
                "passages that all questions share"
            )
        asked_too = {
            "agents": given.agents,
            "tasks": given.tasks,
            "plot": given.plot,
            "judge": given.judge.base_url,
        }
        if beside := [name for name, value in asked_too.items() if value]:
            raise UserError(
                f"--ask is {given.ask!r} and --{beside[0]} is given: one agent answers, and "
                "nothing is compared"
            )
    if given.plot and not (given.agents or given.tasks):
        raise UserError("--plot is True and there is nothing to compare: add --agents or --tasks")
    tasks = [config.task, *(uncapped(load_config(name).task) for name in given.tasks)]
    agents = [config.agent, *(of_kind(config, "agent", kind).agent for kind in given.agents)]
    found = [
        dataclasses.replace(config, task=task, agent=agent) for task in tasks for agent in agents
    ]
    for one in found:
        check(one)
        check_data_dir(one.task)
    named = [(one.task.kind, getattr(one.task, "environment", ""), one.agent.kind) for one in found]
    if twice := [" ".join(filter(None, name)) for name in named if named.count(name) > 1]:
        raise UserError(
            f"{twice[0]} is asked for twice and would be written into one file: name each once"
        )
    return found


def command_line(arguments: Sequence[str]) -> tuple[EvalArguments, Config]:
    """`[CONFIG] --checkpoint DIR [flags]` -> the arguments, and the whole configuration under
    them."""
    words = init_as_checkpoint(arguments)
    name = take_file(words)
    checkpoint, adapter = _flag_value(words, "--checkpoint"), _flag_value(words, "--adapter")
    remote = _flag_value(words, "--remote.base-url", "--remote.base_url")
    if remote is not None and (name is None or checkpoint is not None):
        raise UserError(
            f"--remote.base-url is {remote}: an endpoint is evaluated under a configuration and "
            f"without a checkpoint, as in `python -m mujica_jax.eval {HELP_CONFIG} "
            f"--remote.base-url {remote} ...`"
        )
    lone = next((word for word in words if word.startswith("--remote.")), None)
    if lone is not None and remote is None and checkpoint is None:
        raise UserError(f"{lone} is given and there is no endpoint: give --remote.base-url too")
    if name is None and adapter is not None:
        lacking = "has no config.json of the run that made it: name a configuration"
        config = _config_left_in(
            Path(adapter), "--init ... --adapter", wanted=ADAPTER_WANTED, lacking=lacking
        )
    elif name is None and checkpoint is not None:
        lacking = "is no run directory: a Hugging Face directory is evaluated under a configuration"
        config = _config_left_in(
            run_path(checkpoint), "--checkpoint", wanted=WANTED, lacking=lacking
        )
    else:
        config = load_config(name or HELP_CONFIG)
        if (trained := _trained_agent(words)) is not None:
            config = dataclasses.replace(config, agent=trained)
    sections = {field.name for field in dataclasses.fields(EvalArguments)} & vars(config).keys()
    defaults = {section: getattr(config, section) for section in sections}
    defaults["remote"] = RemoteConfig()
    defaults["task"] = uncapped(config.task)
    if not needs_judge(_flag_value(words, "--reward") or config.reward, config.staged):
        defaults["judge"] = (
            schema.JudgeConfig()
        )  # the run was not trained by one; flags may name one all the same
    defaults["distributed"] = (
        schema.DistributedConfig()
    )  # a run's own says which machines trained it
    defaults["checkpoint"] = tyro.MISSING if remote is None and checkpoint is None else checkpoint
    given = override(EvalArguments(**defaults), words, prog="python -m mujica_jax.eval")
    changed = {section: getattr(given, section) for section in sections}
    if isinstance(
        given.task, schema.TwoWikiConfig
    ):  # copies are for demonstrations, and of graphs only
        changed["task"] = dataclasses.replace(given.task, augmented_copies=0)
    if remote is not None:  # an endpoint has an engine of its own, and may give log-probabilities
        changed["engine"] = dataclasses.replace(given.engine, kind="native", factory=None)
    config = dataclasses.replace(config, **changed)
    check(config)
    check_remote(given.remote)
    return given, config


def uncapped(task: schema.TaskConfig) -> schema.TaskConfig:
    """Return the task without its caps on held-out questions: eval.questions decides how many are
    asked, or a flag."""
    if not isinstance(task, schema.TwoWikiConfig):
        return task
    return dataclasses.replace(task, dev_questions=None, test_questions=None)


def other_agent(arguments: Sequence[str]) -> str | None:
    """Return a line where the configuration given beside a run's policy names another agent than
    the policy plays."""
    words = init_as_checkpoint(arguments)
    name = take_file(words)
    trained = _trained_agent(words)
    if name is None or trained is None:
        return None
    named = load_config(name).agent
    if named.kind != trained.kind:
        return (
            f"the policy plays {trained.kind}, as it was trained; {name} says {named.kind}: "
            "--agent.kind changes it"
        )
    others = [field for field, value in vars(trained).items() if getattr(named, field) != value]
    if not others:
        return None
    settings = ", ".join(
        f"agent.{field} {getattr(trained, field)!r}, not {getattr(named, field)!r}"
        for field in others
    )
    return (
        f"the policy plays as it was trained, not as {name} says: {settings}; flags --agent.* "
        "change it"
    )


def _trained_agent(words: Sequence[str]) -> AgentConfig | None:
    """Return the agent that a run's policy or adapter was trained as, if that one is to be played.

    None where the checkpoint comes from no run, and where `--agent.kind` names another agent."""
    folder = _folder_of_run(_flag_value(words, "--checkpoint"), _flag_value(words, "--adapter"))
    if folder is None:
        return None
    trained = from_dict(Config, read_object(folder / "config.json")["config"]).agent
    asked = _flag_value(words, "--agent.kind")
    return trained if asked in (None, trained.kind) else None


def _folder_of_run(checkpoint: str | None, adapter: str | None) -> RunPath | None:
    """Return the folder with the configuration that a policy was trained by: a run's own, or an
    adapter's.

    The model of one policy, RUN/policies/N/model, belongs to RUN."""
    folders = [run_path(name) for name in (adapter, checkpoint) if name is not None]
    for folder in tuple(folders):
        if (
            isinstance(folder, Path)
            and folder.name == "model"
            and folder.parent.parent.name == "policies"
        ):
            folders.append(folder.parent.parent.parent)
    return next((folder for folder in folders if folder.is_dir() and is_run(folder)), None)


def find_endpoint(given: EvalArguments) -> Endpoint:
    """The model behind the endpoint that the flags describe."""
    if given.adapter is not None:
        raise UserError(
            f"--adapter is {given.adapter} and an endpoint has its own model: leave --adapter out"
        )
    if given.policy is not None:
        raise UserError(
            f"--policy is {given.policy} and {given.remote.base_url} is no run directory: leave "
            "--policy out"
        )
    return open_endpoint(given.remote, run_path(given.out or "eval"))


def find_checkpoint(given: EvalArguments) -> Checkpoint:
    """The policy to evaluate."""
    assert given.checkpoint is not None, "only an endpoint is evaluated without one"
    found = find_policy(given.checkpoint, policy=given.policy, adapter=given.adapter)
    folder = run_path(given.out or "eval") if given.out or found.run is None else found.run / "eval"
    return Checkpoint(**vars(found), out=folder)


def _config_left_in(folder: RunPath, flag: str, *, wanted: str, lacking: str) -> Config:
    """The configuration that a run directory was begun with, or of the run that wrote an
    adapter."""
    if not folder.is_dir():
        raise UserError(f"there is no directory {folder}: {wanted}")
    if (folder / "adapter" / "adapter_config.json").exists():
        asked = f"--adapter {folder / 'adapter'}, or --checkpoint RUN --policy N"
        raise UserError(f"{folder} is a policy of a run: give {asked}")
    if (folder / "model" / "config.json").exists():
        raise UserError(f"{folder} is a policy of a run: give --checkpoint RUN --policy N")
    if not is_run(folder):
        raise UserError(
            f"{folder} {lacking}, as in `python -m mujica_jax.eval {HELP_CONFIG} {flag} {folder}`"
        )
    return from_dict(Config, read_object(folder / "config.json")["config"])


def _flag_value(words: Sequence[str], *spellings: str) -> str | None:
    """The value of one flag, before the others can be read: they depend on the configuration that
    it names."""
    return next(
        (value for flag in spellings if (value := take_flag([*words], flag)) is not None), None
    )


if __name__ == "__main__":
    keep_freed_memory()
    raise SystemExit(run_program(main))
