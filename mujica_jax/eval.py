"""Evaluate a policy on the held-out questions again: by question kind, greedily and sampled.

    python -m mujica_jax.eval --checkpoint RUN [--policy N] [--section.field value ...]
    python -m mujica_jax.eval CONFIG --checkpoint HF_DIR|FILE.gguf|smollm2 [--out DIR] \\
        [--section.field value ...]
    python -m mujica_jax.eval [CONFIG] --init HF_DIR|FILE.gguf|smollm2 --adapter DIR [...]
    python -m mujica_jax.eval --checkpoint RUN \\
        --ask "Who is the mother of the director of Polish-Russian War?"
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
that its agent.prompt names (docs/guides/endpoints.md).

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
from mujica_jax.config.checks import check, check_distributed, check_remote
from mujica_jax.config.command_line import override, take_file, take_flag
from mujica_jax.config.files import load_config
from mujica_jax.config.kinds import of_kind
from mujica_jax.config.methods import needs_judge
from mujica_jax.config.schema import AgentConfig, Config, RemoteConfig
from mujica_jax.config.stored import from_dict
from mujica_jax.errors import UserError
from mujica_jax.runs.endpoint import Endpoint, open_endpoint
from mujica_jax.runs.policies import (
    WANTED,
    Checkpoint,
    find_policy,
    init_as_checkpoint,
    is_run,
    read_object,
)
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
    """Evaluate a policy on held-out questions.

    The sections are those of a configuration that matter to it.
    """

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
    # times a question is sampled; its sampled score is the mean
    samples: int = 1
    # An earlier result on the same questions, as OUT/two_wiki-text-dev.json: the differences to it
    # are printed too, with intervals paired over the questions.
    beside: str | None = None
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
    """Run the program and return its exit status.

    0: done, or ended by SIGTERM with its parts kept. 2: a mistake of the user's. 130: interrupted.
    """
    preemption = Preemption(kept_text="what was evaluated is kept")
    preemption.then = "the same command goes on"

    def program() -> None:
        words = sys.argv[1:] if arguments is None else arguments
        options, config = command_line(words)
        check_distributed(options.distributed)
        distributed.start(options.distributed, preemption.on_notice)
        configs = all_configs(options, config)

        # What writes: a policy or an endpoint, and on demand another worker and a judge.
        if options.remote.base_url is None:
            policy = distributed.primary_first("the policy", lambda: find_checkpoint(options))
        else:
            policy = distributed.primary_first("the policy", lambda: find_endpoint(options))
        worker = None
        if options.worker is not None:
            worker_options = dataclasses.replace(
                options, checkpoint=options.worker, policy=None, adapter=None
            )
            worker = distributed.primary_first(
                "the worker's policy", lambda: find_checkpoint(worker_options)
            )
        judge = None
        if options.judge.base_url is not None:
            judge = open_endpoint(options.judge, policy.out)

        # Imported here: a mistake in the arguments is answered before JAX has started.
        from mujica_jax.runs.evaluate import Models, evaluate, show_answer

        models = Models(policy=policy, worker=worker, judge=judge)
        note = other_agent(words)
        if options.ask is not None:
            show_answer(configs[0], models, preemption, options.ask, note=note)
        else:
            evaluate(
                configs,
                models,
                preemption,
                samples=options.samples if options.sampled else 0,
                beside=options.beside,
                plot=options.plot,
                note=note,
            )
        distributed.finish()

    return preemption.exit_status(program)


def all_configs(options: EvalArguments, config: Config) -> list[Config]:
    """Return the configuration of every task and agent to evaluate.

    Raises UserError before anything is loaded.
    """
    _check_worker(options, config)
    _check_samples(options)
    if options.ask is not None:
        _check_ask(options.ask, options, config.task)
    if options.plot and not (options.agents or options.tasks):
        raise UserError("--plot is True and there is nothing to compare: add --agents or --tasks")

    tasks = [config.task]
    for name in options.tasks:
        tasks.append(uncapped(load_config(name).task))
    agents = [config.agent]
    for kind in options.agents:
        agents.append(of_kind(config, "agent", kind).agent)

    configs = []
    for task in tasks:
        for agent in agents:
            configs.append(dataclasses.replace(config, task=task, agent=agent))
    for pair_config in configs:
        check(pair_config)
        check_data_dir(pair_config.task)
    _check_files_differ(configs)
    return configs


def _check_worker(options: EvalArguments, config: Config) -> None:
    """Check that a worker's policy is given for the one agent that has workers."""
    is_mujica_alone = config.agent.kind == "mujica" and not options.agents
    if options.worker is not None and not is_mujica_alone:
        raise UserError(
            f"--worker is {options.worker}, and of "
            f"{', '.join((config.agent.kind, *options.agents))} only mujica has workers: leave it "
            "out, or evaluate mujica alone"
        )


def _check_samples(options: EvalArguments) -> None:
    """Check the number of samples, and that only one result is compared with an earlier one."""
    if options.samples < 1:
        raise UserError(f"--samples is {options.samples} and must be at least 1")
    if options.samples > 1 and not options.sampled:
        raise UserError(
            f"--samples is {options.samples} and --sampled is False: leave one of them out"
        )
    if options.beside is not None and (options.agents or options.tasks):
        raise UserError(
            f"--beside is {options.beside} and there are several results: leave out --agents and "
            "--tasks, which compare by themselves"
        )


def _check_ask(question: str, options: EvalArguments, task: schema.TaskConfig) -> None:
    """Check that a question of the user's can be asked, and that nothing else is."""
    if not question.strip():
        raise UserError(f"--ask is {question!r} and no question: write one between quotes")

    environment = getattr(task, "environment", "of its own")
    setting = getattr(task, "setting", "open")
    shares_passages = environment == "text" and setting == "open"
    if task.kind == "tiny_world" or not shares_passages:
        raise UserError(
            f"--ask is {question!r} and {task.kind} has environment {environment}, setting "
            f"{setting}: a question of yours comes with no entities and no passages; ask over "
            "passages that all questions share"
        )

    comparisons = {
        "agents": options.agents,
        "tasks": options.tasks,
        "plot": options.plot,
        "judge": options.judge.base_url,
        "beside": options.beside,
    }
    for name, value in comparisons.items():
        if value:
            raise UserError(
                f"--ask is {question!r} and --{name} is given: one agent answers, and "
                "nothing is compared"
            )


def _check_files_differ(configs: Sequence[Config]) -> None:
    """Check that no two evaluations are written into one file."""
    file_names = []
    for config in configs:
        environment = getattr(config.task, "environment", "")
        parts = (config.task.kind, environment, config.agent.kind)
        file_names.append(" ".join(part for part in parts if part))
    for name in file_names:
        if file_names.count(name) > 1:
            raise UserError(
                f"{name} is asked for twice and would be written into one file: name each once"
            )


def command_line(arguments: Sequence[str]) -> tuple[EvalArguments, Config]:
    """Return the arguments of `[CONFIG] --checkpoint DIR [flags]`, and the whole configuration.

    The flags change the sections of the configuration.
    """
    # These words decide which configuration the other flags change.
    words = init_as_checkpoint(arguments)
    name = take_file(words)
    checkpoint = _flag_value(words, "--checkpoint")
    remote_url = _flag_value(words, "--remote.base-url", "--remote.base_url")
    _check_endpoint(words, name=name, checkpoint=checkpoint, remote_url=remote_url)
    config = _base_config(words, name=name, checkpoint=checkpoint)

    # The flags change the sections of that configuration.
    section_names = vars(config).keys() & {
        field.name for field in dataclasses.fields(EvalArguments)
    }
    sections = {name: getattr(config, name) for name in section_names}
    sections["task"] = uncapped(config.task)
    reward = _flag_value(words, "--reward") or config.reward
    if not needs_judge(reward, config.staged):
        # The run was not trained by a judge. Flags may name one for scores.
        sections["judge"] = schema.JudgeConfig()
    # A run's own section says which machines trained it.
    sections["distributed"] = schema.DistributedConfig()
    needs_checkpoint = remote_url is None and checkpoint is None
    defaults = EvalArguments(
        checkpoint=tyro.MISSING if needs_checkpoint else checkpoint,
        remote=RemoteConfig(),
        **sections,
    )
    options = override(defaults, words, prog="python -m mujica_jax.eval")

    changed_sections = {name: getattr(options, name) for name in section_names}
    if isinstance(options.task, schema.TwoWikiConfig):
        # Copies are for demonstrations, and of graphs only.
        changed_sections["task"] = dataclasses.replace(options.task, augmented_copies=0)
    if remote_url is not None:
        # An endpoint has an engine of its own, and may give log-probabilities.
        changed_sections["engine"] = dataclasses.replace(
            options.engine, kind="native", factory=None
        )
    config = dataclasses.replace(config, **changed_sections)
    check(config)
    check_remote(options.remote)
    return options, config


def _check_endpoint(
    words: Sequence[str], *, name: str | None, checkpoint: str | None, remote_url: str | None
) -> None:
    """Check the flags of an endpoint.

    It comes with a configuration, without a checkpoint and with an address. Raises UserError.
    """
    if remote_url is not None and (name is None or checkpoint is not None):
        raise UserError(
            f"--remote.base-url is {remote_url}: an endpoint is evaluated under a configuration "
            f"and without a checkpoint, as in `python -m mujica_jax.eval {HELP_CONFIG} "
            f"--remote.base-url {remote_url} ...`"
        )
    remote_flags = [word for word in words if word.startswith("--remote.")]
    if remote_flags and remote_url is None and checkpoint is None:
        raise UserError(
            f"{remote_flags[0]} is given and there is no endpoint: give --remote.base-url too"
        )


def _base_config(words: Sequence[str], *, name: str | None, checkpoint: str | None) -> Config:
    """Return the configuration that the flags change.

    It is the named one, or that of the run which trained the policy.
    """
    adapter = _flag_value(words, "--adapter")
    if name is None and adapter is not None:
        return _config_left_in(
            Path(adapter),
            "--init ... --adapter",
            if_missing=ADAPTER_WANTED,
            if_no_run="has no config.json of the run that made it: name a configuration",
        )
    if name is None and checkpoint is not None:
        return _config_left_in(
            run_path(checkpoint),
            "--checkpoint",
            if_missing=WANTED,
            if_no_run=(
                "is no run directory: a Hugging Face directory is evaluated under a configuration"
            ),
        )
    config = load_config(name or HELP_CONFIG)
    trained_agent = _trained_agent(words)
    if trained_agent is None:
        return config
    return dataclasses.replace(config, agent=trained_agent)


def uncapped(task: schema.TaskConfig) -> schema.TaskConfig:
    """Return the task without its caps on held-out questions.

    `eval.questions`, or a flag, decides how many are asked.
    """
    if not isinstance(task, schema.TwoWikiConfig):
        return task
    return dataclasses.replace(task, dev_questions=None, test_questions=None)


def other_agent(arguments: Sequence[str]) -> str | None:
    """Return a line for the user if the configuration names another agent than the policy plays.

    None if it names the same agent, or if no configuration is named.
    """
    words = init_as_checkpoint(arguments)
    name = take_file(words)
    trained_agent = _trained_agent(words)
    if name is None or trained_agent is None:
        return None

    named_agent = load_config(name).agent
    if named_agent.kind != trained_agent.kind:
        return (
            f"the policy plays {trained_agent.kind}, as it was trained; {name} says "
            f"{named_agent.kind}: --agent.kind changes it"
        )

    differences = []
    for field, value in vars(trained_agent).items():
        named_value = getattr(named_agent, field)
        if named_value != value:
            differences.append(f"agent.{field} {value!r}, not {named_value!r}")
    if not differences:
        return None
    return (
        f"the policy plays as it was trained, not as {name} says: {', '.join(differences)}; flags "
        "--agent.* change it"
    )


def _trained_agent(words: Sequence[str]) -> AgentConfig | None:
    """Return the agent that a run's policy or adapter was trained as, if that one is to be played.

    None where the checkpoint comes from no run, and where `--agent.kind` names another agent.
    """
    folder = _folder_of_run(_flag_value(words, "--checkpoint"), _flag_value(words, "--adapter"))
    if folder is None:
        return None
    trained_agent = from_dict(Config, read_object(folder / "config.json")["config"]).agent
    kind = _flag_value(words, "--agent.kind")
    return trained_agent if kind in (None, trained_agent.kind) else None


def _folder_of_run(checkpoint: str | None, adapter: str | None) -> RunPath | None:
    """Return the folder with the configuration that a policy was trained by.

    It is a run's own folder or an adapter's. The model of one policy, RUN/policies/N/model, belongs
    to RUN.
    """
    folders = [run_path(name) for name in (adapter, checkpoint) if name is not None]
    for folder in tuple(folders):
        is_local_model = isinstance(folder, Path) and folder.name == "model"
        if is_local_model and folder.parent.parent.name == "policies":
            folders.append(folder.parent.parent.parent)
    for folder in folders:
        if folder.is_dir() and is_run(folder):
            return folder
    return None


def find_endpoint(options: EvalArguments) -> Endpoint:
    """Return the model behind the endpoint that the flags describe."""
    if options.adapter is not None:
        raise UserError(
            f"--adapter is {options.adapter} and an endpoint has its own model: leave --adapter out"
        )
    if options.policy is not None:
        raise UserError(
            f"--policy is {options.policy} and {options.remote.base_url} is no run directory: "
            "leave --policy out"
        )
    return open_endpoint(options.remote, run_path(options.out or "eval"))


def find_checkpoint(options: EvalArguments) -> Checkpoint:
    """Return the policy to evaluate."""
    assert options.checkpoint is not None, "only an endpoint is evaluated without one"
    policy = find_policy(options.checkpoint, policy=options.policy, adapter=options.adapter)
    if options.out or policy.run is None:
        folder = run_path(options.out or "eval")
    else:
        folder = policy.run / "eval"
    return Checkpoint(**vars(policy), out=folder)


def _config_left_in(folder: RunPath, flag: str, *, if_missing: str, if_no_run: str) -> Config:
    """Return the configuration of a run directory, or of the run that wrote an adapter.

    `if_missing` and `if_no_run` end the errors for such a folder.
    """
    if not folder.is_dir():
        raise UserError(f"there is no directory {folder}: {if_missing}")
    if (folder / "adapter" / "adapter_config.json").exists():
        raise UserError(
            f"{folder} is a policy of a run: give --adapter {folder / 'adapter'}, or --checkpoint "
            "RUN --policy N"
        )
    if (folder / "model" / "config.json").exists():
        raise UserError(f"{folder} is a policy of a run: give --checkpoint RUN --policy N")
    if not is_run(folder):
        raise UserError(
            f"{folder} {if_no_run}, as in `python -m mujica_jax.eval {HELP_CONFIG} {flag} {folder}`"
        )
    return from_dict(Config, read_object(folder / "config.json")["config"])


def _flag_value(words: Sequence[str], *spellings: str) -> str | None:
    """Return the value of one flag, before the others can be read."""
    for flag in spellings:
        value = take_flag([*words], flag)
        if value is not None:
            return value
    return None


if __name__ == "__main__":
    keep_freed_memory()
    raise SystemExit(run_program(main))
