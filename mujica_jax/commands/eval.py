"""Evaluate a policy on held-out questions, with greedy and with sampled decoding.

    python -m mujica_jax.eval --checkpoint RUN [--policy N] [--section.field value ...]
    python -m mujica_jax.eval CONFIG --checkpoint HF_DIR|HF_NAME|FILE.gguf|smollm2 [--out DIR] \\
        [--section.field value ...]
    python -m mujica_jax.eval [CONFIG] --init HF_DIR|HF_NAME|FILE.gguf|smollm2 --adapter DIR [...]
    python -m mujica_jax.eval --checkpoint RUN \\
        --ask "Who is the mother of the director of Polish-Russian War?"
    python -m mujica_jax.eval CONFIG --remote.base-url URL --remote.model NAME --remote.mode chat \\
        --remote.tokenizer DIR [...]

What can be evaluated:

- A run directory RUN. Its latest policy is evaluated with the configuration in RUN/config.json. If
  the command also names a configuration, that one replaces the run's own. This scores a policy out
  of domain, for example with `configs/musique_v5e.py`.
- A model outside of a run: a Hugging Face directory, a name of the Hugging Face Hub, a GGUF file, or
  `smollm2`. It needs the name of a configuration. `--init` is another name of `--checkpoint` for such models.
- A model with an adapter that a run wrote (RUN/policies/N/adapter). The configuration of that run
  is the default.
- A model behind an OpenAI-compatible endpoint. It needs a configuration, whose `agent.prompt`
  chooses the prompts (docs/guides/endpoints.md).

A policy of a run plays the agent that it was trained as, even if the configuration names another
agent. A console line then says so. Flags `--agent.*` change the agent. If `--agent.kind` names the
agent of the configuration, that agent is played with all its settings from the configuration.

Other flags change what is evaluated: the seed, the number of questions, limits, or the environment.
For example, `--task.environment text` searches passages although the policy was trained on a graph.
`--agents direct rag` and `--tasks CONFIG` add agents and tasks. A paired bootstrap then compares
each agent with the first one.

The scores are written to RUN/eval/<task>-<environment>-<split>.json. Without a run the folder is
./eval, and --out names another one. The file name includes the agent if it is not mujica. The
greedy predictions (JSON lines) and trajectories (Parquet) are in the same folder. If the program is
killed, the same command continues where it stopped.
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
from mujica_jax.config.kinds import of_kind, stored_kind
from mujica_jax.config.methods import needs_judge
from mujica_jax.config.program_help import ProgramHelp, program_name
from mujica_jax.config.schema import AgentConfig, Config, RemoteConfig
from mujica_jax.config.stored import from_dict
from mujica_jax.errors import UserError
from mujica_jax.models.hub import check_same_commits, hub_name, model_folder
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
from mujica_jax.runtime.preemption import Preemption
from mujica_jax.storage.run_directory import RunPath, run_path
from mujica_jax.tasks.data_folder import check_data_dir

ADAPTER_WANTED = "give --adapter the folder of an adapter, such as RUN/policies/N/adapter"
# Without a checkpoint, --help shows the values of this configuration as defaults.
HELP_CONFIG = "tiny_world"
HELP = ProgramHelp(
    summary="Evaluate a policy on held-out questions, with greedy and with sampled decoding. A run "
    "directory brings its own configuration. A model outside of a run needs a CONFIG.",
    usage="[CONFIG] --checkpoint RUN|MODEL [flags]",
    examples={
        "--checkpoint runs/first": "Score the newest policy of a run, with the settings of the run.",
        "two_wiki_text_smollm2 --init smollm2 --task.data-dir DIR --agents direct rag": "Compare "
        "three agents of a model that no run has trained.",
    },
    default_config=HELP_CONFIG,
    common={
        "What is evaluated": (
            "checkpoint",
            "policy",
            "adapter",
            "worker",
            "remote.base_url",
            "remote.model",
            "remote.mode",
            "ask",
        ),
        "Task and data": (
            "task.kind",
            "task.environment",
            "task.data_dir",
            "task.index",
            "task.retriever",
            "task.top_k",
            "tasks",
        ),
        "Agent": ("agent.kind", "agent.prompt", "agents"),
        "Scores": (
            "eval.questions",
            "eval.split",
            "eval.temperature",
            "sampled",
            "samples",
            "judge.base_url",
        ),
        "Sizes": ("engine.max_num_seqs", "agent.max_trajectory_tokens"),
        "Output": ("out", "beside", "plot"),
        "Seed": ("seed",),
    },
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalArguments:
    """Evaluate a policy on held-out questions.

    The first word of the command line may name a configuration, as in `python -m mujica_jax.eval
    two_wiki_text_smollm2 --checkpoint DIR`. A run directory brings its own configuration. The
    sections below are the parts of a configuration that matter for an evaluation.
    """

    # The model to evaluate: a run directory (local or gs://BUCKET/PREFIX). If the command names a
    # configuration, also a Hugging Face directory or name, a GGUF file, or smollm2.
    checkpoint: str | None
    # Folder or Hugging Face name of a LoRA adapter in PEFT's format, to add to a checkpoint that is
    # not a run directory.
    adapter: str | None = None
    # Number of the run's policy to evaluate: 0 is the policy after the warm-up, N the policy after
    # round N. Without this flag it is the latest policy.
    policy: int | None = None
    # Another checkpoint or run directory. Its model writes the worker's turns of the agent mujica.
    # It must have the same tokenizer as the model to evaluate.
    worker: str | None = None
    # Folder of the results. The default is RUN/eval for a run directory and ./eval otherwise.
    out: str | None = None
    # Kinds of further agents to evaluate, with the limits of the section `agent`. One table
    # compares all agents.
    agents: tuple[str, ...] = ()
    # Names of configurations whose tasks are evaluated too, with the same agents.
    tasks: tuple[str, ...] = ()
    # Whether to evaluate a second time, with answers sampled at eval.temperature. Without it there
    # is only greedy decoding, which takes half the time.
    sampled: bool = True
    # How many times each question is sampled. The sampled score is the mean over these samples.
    samples: int = 1
    # File of an earlier result on the same questions, such as OUT/two_wiki-text-dev.json. The
    # program also prints the differences to it, with intervals paired over the questions.
    beside: str | None = None
    # Whether to also draw the comparison table as a picture. This needs the extra `plots`.
    plot: bool = False
    # A question in your own words. The agent answers it over the passages or the graph of the task,
    # and the program shows how, instead of computing scores.
    ask: str | None = None

    task: schema.TaskConfig
    agent: schema.AgentConfig
    engine: schema.EngineConfig
    eval: schema.EvalConfig

    # Name of the reward to record with each prediction. It does not change EM and F1.
    reward: str
    # Seed of the sampled answers.
    seed: int

    remote: RemoteConfig
    judge: schema.JudgeConfig
    faults: schema.FaultConfig
    distributed: schema.DistributedConfig


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status.

    - 0: the program finished, or SIGTERM ended it and the finished parts are kept.
    - 2: the user made a mistake.
    - 130: Ctrl-C ended the program.
    """
    preemption = Preemption(kept_text="what was evaluated is kept")
    preemption.then = "run the same command again to continue"

    def program() -> None:
        words = sys.argv[1:] if arguments is None else arguments
        options, config = command_line(words)
        check_distributed(options.distributed)
        distributed.start(options.distributed, preemption.on_notice)
        configs = all_configs(options, config)

        # Find the models: a policy or an endpoint, and optionally a separate worker and a judge.
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
                "the worker's policy", lambda: find_checkpoint(worker_options, "--worker")
            )
        check_same_commits()
        judge = None
        if options.judge.base_url is not None:
            judge = open_endpoint(options.judge, policy.out)

        # This import starts JAX. It comes late so that mistakes in the arguments are reported fast.
        from mujica_jax.runs.asking import show_answer
        from mujica_jax.runs.evaluate import Models, evaluate

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
    """Return one configuration for each pair of a task and an agent to evaluate.

    Raises UserError if arguments contradict each other. No model is loaded before this check.
    """
    _check_worker(options, config)
    _check_samples(options)
    if options.ask is not None:
        _check_ask(options.ask, options)
    if options.plot and not (options.agents or options.tasks):
        raise UserError(
            "--plot draws a comparison, but there is only one result: add --agents or --tasks, "
            "or leave --plot out"
        )

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
    """Check that a worker's policy is only given for mujica, the only agent that has workers."""
    is_mujica_alone = config.agent.kind == "mujica" and not options.agents
    if options.worker is not None and not is_mujica_alone:
        raise UserError(
            f"--worker is {options.worker}, and the agents are "
            f"{', '.join((config.agent.kind, *options.agents))}, but only mujica has workers: "
            "leave --worker out, or evaluate mujica alone"
        )


def _check_samples(options: EvalArguments) -> None:
    """Check the number of samples, and that --beside compares only one new result."""
    if options.samples < 1:
        raise UserError(f"--samples is {options.samples} and must be at least 1")
    if options.samples > 1 and not options.sampled:
        raise UserError(
            f"--samples is {options.samples}, but --no-sampled takes no samples: leave one of them out"
        )
    if options.beside is not None and (options.agents or options.tasks):
        raise UserError(
            f"--beside is {options.beside} and compares a single result, but --agents or --tasks "
            "ask for several: leave out --beside, or leave out --agents and --tasks"
        )


def _check_ask(question: str, options: EvalArguments) -> None:
    """Check that the question is not empty, and that no comparison is asked for."""
    if not question.strip():
        raise UserError(f"--ask is {question!r}, which is empty: write a question between quotes")

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
                f"--ask is {question!r}, but --{name} is given too: --ask lets one agent answer "
                f"and compares nothing, so leave out --ask or --{name}"
            )


def _check_files_differ(configs: Sequence[Config]) -> None:
    """Check that every evaluation is written to a file of its own."""
    file_names = []
    for config in configs:
        environment = getattr(config.task, "environment", "")
        parts = (config.task.kind, environment, config.agent.kind)
        file_names.append(" ".join(part for part in parts if part))
    for name in file_names:
        if file_names.count(name) > 1:
            raise UserError(
                f"{name} is asked for twice, and both results would have the same file name: name "
                "each task and agent once"
            )


def command_line(arguments: Sequence[str]) -> tuple[EvalArguments, Config]:
    """Parse `[CONFIG] --checkpoint DIR [flags]`.

    For what it returns, see `read_flags`. Raises UserError.
    """
    words = init_as_checkpoint(arguments)
    name = take_file(words)
    return read_flags(words, None if name is None else load_config(name))


def read_flags(
    words: Sequence[str],
    named_config: Config | None,
    *,
    command: str = "eval",
    program: ProgramHelp = HELP,
) -> tuple[EvalArguments, Config]:
    """Parse the flags that follow the name of a configuration.

    `named_config` is that configuration, or None if the command names none. `command` is the
    program whose flags these are, and `program` is its help. Returns the parsed arguments, and the
    full configuration with the changes by the flags. Raises UserError.
    """
    # Read the arguments that decide which configuration the other flags change.
    checkpoint = _flag_value(words, "--checkpoint")
    remote_url = _flag_value(words, "--remote.base-url", "--remote.base_url")
    _check_endpoint(
        words,
        has_config=named_config is not None,
        checkpoint=checkpoint,
        remote_url=remote_url,
    )
    config = base_config(words, named_config=named_config, checkpoint=checkpoint)

    # Parse the other flags. The sections of that configuration are their defaults.
    section_names = vars(config).keys() & {
        field.name for field in dataclasses.fields(EvalArguments)
    }
    # The adapter that a run began with is part of its policies already.
    section_names -= {"adapter"}
    sections = {name: getattr(config, name) for name in section_names}
    sections["task"] = uncapped(config.task)
    reward = _flag_value(words, "--reward") or config.reward
    if not needs_judge(reward, config.staged):
        # The run was trained without a judge. Flags can name a judge that scores the answers.
        sections["judge"] = schema.JudgeConfig()
    # The section of a run describes the machines that trained it, not this machine.
    sections["distributed"] = schema.DistributedConfig()
    needs_checkpoint = remote_url is None and checkpoint is None
    defaults = EvalArguments(
        checkpoint=tyro.MISSING if needs_checkpoint else checkpoint,
        remote=RemoteConfig(),
        **sections,
    )
    options = override(defaults, words, prog=program_name(command), program=program)

    changed_sections = {name: getattr(options, name) for name in section_names}
    changed_sections["task"] = without_copies(options.task)
    if remote_url is not None:
        # The endpoint uses its own engine, so the configured engine does not matter.
        changed_sections["engine"] = dataclasses.replace(
            options.engine, kind="native", factory=None
        )
    config = dataclasses.replace(config, **changed_sections)
    check(config)
    check_remote(options.remote)
    return options, config


def _check_endpoint(
    words: Sequence[str], *, has_config: bool, checkpoint: str | None, remote_url: str | None
) -> None:
    """Check the flags of an endpoint.

    An endpoint needs an address and a configuration, and excludes a checkpoint. Raises UserError.
    """
    if remote_url is not None and (not has_config or checkpoint is not None):
        raise UserError(
            f"--remote.base-url is {remote_url}: an endpoint needs the name of a configuration and "
            f"excludes a checkpoint; run `python -m mujica_jax.eval {HELP_CONFIG} "
            f"--remote.base-url {remote_url} ...`"
        )
    remote_flags = [word for word in words if word.startswith("--remote.")]
    if remote_flags and remote_url is None and checkpoint is None:
        raise UserError(
            f"{remote_flags[0]} is given without the address of an endpoint: add --remote.base-url"
        )


def base_config(
    words: Sequence[str], *, named_config: Config | None, checkpoint: str | None
) -> Config:
    """Return the configuration that the flags change.

    It is the named configuration. Without a name, it is the configuration of the run that trained
    the policy or the adapter.
    """
    adapter = _flag_value(words, "--adapter")
    if named_config is None and adapter is not None:
        return _config_left_in(
            model_folder(adapter, setting="--adapter"),
            "--init ... --adapter",
            if_missing=ADAPTER_WANTED,
            if_no_run="has no config.json of the run that wrote it: name a configuration",
        )
    if named_config is None and checkpoint is not None:
        if hub_name(checkpoint):
            raise UserError(
                f"--checkpoint is {checkpoint}, a model of the Hugging Face Hub without a run: name "
                f"a configuration, as in `python -m mujica_jax.eval {HELP_CONFIG} --checkpoint "
                f"{checkpoint}`"
            )
        return _config_left_in(
            run_path(checkpoint),
            "--checkpoint",
            if_missing=WANTED,
            if_no_run=(
                "is not a run directory: to evaluate a Hugging Face directory, name a configuration"
            ),
        )
    config = named_config or load_config(HELP_CONFIG)
    trained_agent = _trained_agent(words)
    if trained_agent is None:
        return config
    return dataclasses.replace(config, agent=trained_agent)


def uncapped(task: schema.TaskConfig) -> schema.TaskConfig:
    """Return the task without its limits on the number of held-out questions.

    The setting `eval.questions` decides how many questions are asked.
    """
    if not isinstance(task, schema.TwoWikiConfig):
        return task
    return dataclasses.replace(task, dev_questions=None, test_questions=None)


def without_copies(task: schema.TaskConfig) -> schema.TaskConfig:
    """Return the task without augmented copies of its graph, which only demonstrations need."""
    if not isinstance(task, schema.TwoWikiConfig):
        return task
    return dataclasses.replace(task, augmented_copies=0)


def other_agent(arguments: Sequence[str]) -> str | None:
    """Return a console line if the policy plays another agent than the configuration names.

    Returns None if both are the same agent, or if the arguments name no configuration.
    """
    words = init_as_checkpoint(arguments)
    name = take_file(words)
    trained_agent = _trained_agent(words)
    if name is None or trained_agent is None:
        return None

    named_agent = load_config(name).agent
    if named_agent.kind != trained_agent.kind:
        return (
            f"the policy plays the agent {trained_agent.kind}, as in its training; {name} names "
            f"{named_agent.kind}, and --agent.kind {named_agent.kind} selects it"
        )

    differences = []
    for field, value in vars(trained_agent).items():
        named_value = getattr(named_agent, field)
        if named_value != value:
            differences.append(f"agent.{field} {value!r}, not {named_value!r}")
    if not differences:
        return None
    return (
        f"the policy plays with the settings of its training, not with those of {name}: "
        f"{', '.join(differences)}; flags --agent.* change them"
    )


def _trained_agent(words: Sequence[str]) -> AgentConfig | None:
    """Return the agent that the policy or adapter was trained as, if it plays this agent now.

    Returns None if no run made the checkpoint, or if `--agent.kind` names another agent.
    """
    folder = _folder_of_run(_flag_value(words, "--checkpoint"), _flag_value(words, "--adapter"))
    if folder is None:
        return None
    trained_agent = from_dict(Config, read_object(folder / "config.json")["config"]).agent
    kind = _flag_value(words, "--agent.kind")
    own_kinds = (None, trained_agent.kind, stored_kind(trained_agent))
    return trained_agent if kind in own_kinds else None


def _folder_of_run(checkpoint: str | None, adapter: str | None) -> RunPath | None:
    """Return the folder with the training configuration of a policy, or None.

    It is the folder of the run or of the adapter. For a model RUN/policies/N/model it is RUN.
    """
    folders: list[RunPath] = []
    if adapter is not None:
        folders.append(model_folder(adapter, setting="--adapter"))
    if checkpoint is not None:
        folders.append(run_path(checkpoint))
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
            f"--adapter is {options.adapter}, but an adapter cannot be added to the model of an "
            "endpoint: leave --adapter out"
        )
    if options.policy is not None:
        raise UserError(
            f"--policy is {options.policy}, but {options.remote.base_url} is an endpoint, which has "
            "a single policy: leave --policy out"
        )
    return open_endpoint(options.remote, run_path(options.out or "eval"))


def find_checkpoint(options: EvalArguments, setting: str = "--checkpoint") -> Checkpoint:
    """Return the policy to evaluate. Error messages about its download name `setting`."""
    assert options.checkpoint is not None, "only an endpoint is evaluated without a checkpoint"
    policy = find_policy(
        options.checkpoint, policy=options.policy, adapter=options.adapter, setting=setting
    )
    if options.out or policy.run is None:
        folder = run_path(options.out or "eval")
    else:
        folder = policy.run / "eval"
    return Checkpoint(**vars(policy), out=folder)


def _config_left_in(folder: RunPath, flag: str, *, if_missing: str, if_no_run: str) -> Config:
    """Return the configuration that a run left in its own folder or in an adapter's folder.

    `if_missing` ends the error message for a folder that does not exist, and `if_no_run` the one
    for a folder without a configuration. Raises UserError.
    """
    if not folder.is_dir():
        raise UserError(f"there is no directory {folder}: {if_missing}")
    if (folder / "adapter" / "adapter_config.json").exists():
        raise UserError(
            f"{folder} is one policy of a run: give --adapter {folder / 'adapter'}, or "
            "--checkpoint RUN --policy N"
        )
    if (folder / "model" / "config.json").exists():
        raise UserError(f"{folder} is one policy of a run: give --checkpoint RUN --policy N")
    if not is_run(folder):
        raise UserError(
            f"{folder} {if_no_run}, as in `python -m mujica_jax.eval {HELP_CONFIG} {flag} {folder}`"
        )
    return from_dict(Config, read_object(folder / "config.json")["config"])


def _flag_value(words: Sequence[str], *spellings: str) -> str | None:
    """Return the value of a flag, given by any of its spellings, or None.

    It reads the raw arguments, before the other flags can be parsed.
    """
    for flag in spellings:
        value = take_flag([*words], flag)
        if value is not None:
            return value
    return None
