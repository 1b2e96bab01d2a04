"""Check that a configuration agrees with itself, before the task is read or a device is asked.

Both entry points call `check` first, so a mistake is answered in a second and before a run
directory exists. The bounds of a single number stand at its field (`bounds.py`). What only the
machine, the task or a checkpoint can tell (devices, files, sizes of a checkpoint) is checked where
these are opened.
"""

import math
from typing import Any

from mujica_jax.config.agents import MujicaConfig, PromptedAgent
from mujica_jax.config.fields import check_bounds, check_types, field_value, require
from mujica_jax.config.method_checks import check_method, check_pairs, has_script
from mujica_jax.config.schema import (
    MIN_ROW_TOKENS,
    AgentConfig,
    Config,
    DistributedConfig,
    ProfileConfig,
    TaskConfig,
    TrainerConfig,
)
from mujica_jax.errors import UserError

SPLASH_LANES = 128  # tokens: splash attention's blocks are multiples of this


def check(config: Config) -> None:
    """Check a whole configuration. Raises UserError naming the first wrong field, its value, and
    what it may be."""
    check_types(config)
    check_bounds(config)
    _check_row_parts(config)
    check_own_passages(config.task)
    check_profile(config.profile)
    _check_learning_rates(config)
    _check_documents(config)
    check_method(config)
    check_engine(config)
    check_limits(config.agent)
    check_agent(config)
    check_rows(config.trainer)
    check_distributed(config.distributed)


def _check_row_parts(config: Config) -> None:
    """Check that each part of a row can hold the shortest row."""
    max_parts = config.trainer.row_tokens // MIN_ROW_TOKENS
    require(
        config,
        "pretraining.row_parts",
        lambda parts: parts <= max_parts,
        f"at most {max_parts}, half of trainer.row_tokens",
    )


def _check_learning_rates(config: Config) -> None:
    """Check the learning rates of every phase that takes steps."""
    if config.pretraining.steps:
        _check_rates(config, "pretraining")
    if config.warmup.steps:
        _check_rates(config, "warmup")
    _check_rates(config, "method")


def _check_documents(config: Config) -> None:
    """Check that a model from scratch has the documents that its pre-training and warm-up read."""
    share = config.warmup.pretraining_share
    reads_documents = config.pretraining.steps or share
    if config.init is None and config.pretraining.documents == 0 and reads_documents:
        raise UserError(
            f"pretraining.documents is 0, and pretraining.steps {config.pretraining.steps} and "
            f"warmup.pretraining_share {share} need some: give documents, or set both to 0"
        )


def check_own_passages(task: TaskConfig) -> None:
    """Check that nothing but a question's own passages is searched in the distractor setting."""
    if getattr(task, "setting", "open") == "open":
        if getattr(task, "keep_incomplete", False):
            raise UserError(
                "task.keep_incomplete is True and task.setting is open: only the distractor "
                "setting leaves questions out for it; set task.setting to distractor, or leave "
                "task.keep_incomplete out"
            )
        return
    required_values = {"environment": "text", "index": None, "retriever": "bm25"}
    for name, required_value in required_values.items():
        value = getattr(task, name)
        if value != required_value:
            raise UserError(
                "task.setting is distractor, where each question's own passages are searched by "
                f"words, and task.{name} is {value}: give {required_value}, or set task.setting to "
                "open"
            )


def check_engine(config: Any) -> None:
    """Check the section `engine` of a configuration, or of other arguments that have one."""
    check_bounds(config.engine, section="engine.")
    require(
        config, "engine.page_tokens", lambda value: math.log2(value).is_integer(), "a power of two"
    )
    engine = config.engine
    if engine.factory is not None and engine.kind != "jetstream":
        raise UserError(
            f"engine.factory is {engine.factory} and engine.kind {engine.kind}, which makes its "
            "own engine: add --engine.kind jetstream, or leave --engine.factory out"
        )


def check_agent(config: Config) -> None:
    """Check that the agent can read its task and is served by its engine."""
    kind = config.agent.kind
    environment = getattr(config.task, "environment", None)
    if environment is not None and environment not in config.agent.environments:
        raise UserError(
            f"agent.kind is {kind}, which reads passages, and task.environment is {environment}: "
            "add --task.environment text, or choose mujica"
        )
    agent = config.agent
    if isinstance(agent, MujicaConfig) and agent.protocol == "evipath" and not agent.split:
        raise UserError(
            "agent.protocol is evipath, which has a planner and an executor, and agent.split False "
            "leaves the executor out: add --agent.protocol mujica, or --agent.split True"
        )
    if kind == "flare" and config.engine.kind == "jetstream":
        raise UserError(
            "agent.kind is flare, which reads the log-probability of each token, and engine.kind "
            "is jetstream, whose interface gives none: add --engine.kind native"
        )
    probability = getattr(config.agent, "min_probability", 1.0)
    if not 0 < probability <= 1:
        raise UserError(f"agent.min_probability is {probability}: give above 0 and at most 1")


def check_demonstrations(config: Config) -> None:
    """Check that a run which begins has demonstrations for its agent, and rows that hold what it
    learns."""
    check_pairs(config)
    kind = config.agent.kind
    warmup = config.warmup
    is_scripted = warmup.steps > 0 and warmup.source == "scripted"
    is_few_shot = warmup.steps > 0 and warmup.source == "few_shot"

    if is_scripted and not has_script(config):
        raise UserError(
            f"agent.kind is {kind}, and warmup.source scripted demonstrates mujica, single and "
            f"decex for {warmup.steps} steps: give --warmup.steps 0 with a checkpoint that knows "
            "the format, or choose one of these"
        )
    if is_few_shot and not isinstance(config.agent, PromptedAgent):
        raise UserError(
            f"agent.kind is {kind}, which has no worked examples, and warmup.source is few_shot: "
            "choose mujica or single"
        )
    is_brief = isinstance(config.agent, MujicaConfig) and config.agent.prompt == "brief"
    if is_few_shot and config.init and is_brief:
        raise UserError(
            "agent.prompt is brief, which numbers materials in another way than worked examples "
            "do, and warmup.source is few_shot: add --agent.prompt zero_shot"
        )


def check_limits(agent: AgentConfig) -> None:
    """Check that a conversation has room for a prompt beside the observation and one turn."""
    needed = agent.max_observation_tokens + agent.max_turn_tokens
    if needed >= agent.max_trajectory_tokens:
        raise UserError(
            f"agent.max_observation_tokens {agent.max_observation_tokens} and "
            f"agent.max_turn_tokens {agent.max_turn_tokens} are {needed} tokens together and leave "
            f"no room for a prompt in agent.max_trajectory_tokens {agent.max_trajectory_tokens}: "
            "lower one of the two or raise the last"
        )


def check_rows(trainer: TrainerConfig) -> None:
    """Check that a step's rows divide over devices and parts, and that the kernel takes their
    length."""
    devices = trainer.data * trainer.fsdp
    row_groups = devices * trainer.accumulation_steps
    if trainer.rows_per_step % devices:
        raise UserError(
            f"trainer.rows_per_step {trainer.rows_per_step} cannot be split over data x fsdp = "
            f"{devices} devices: use a multiple of {devices}"
        )
    if trainer.rows_per_step % row_groups:
        raise UserError(
            f"trainer.rows_per_step {trainer.rows_per_step} cannot be split into "
            f"trainer.accumulation_steps {trainer.accumulation_steps} parts of as many rows on "
            f"data x fsdp = {devices} devices: use a multiple of {row_groups}"
        )
    if trainer.attention == "splash" and trainer.row_tokens % SPLASH_LANES:
        next_length = SPLASH_LANES * math.ceil(trainer.row_tokens / SPLASH_LANES)
        raise UserError(
            f"splash attention takes rows of a multiple of {SPLASH_LANES} tokens and "
            f"trainer.row_tokens is {trainer.row_tokens}: use {next_length}, or trainer.attention "
            "auto"
        )


def check_distributed(distributed: DistributedConfig) -> None:
    """Check that a job is described wholly, or not at all."""
    count = distributed.processes
    number = distributed.process
    if distributed.coordinator is None and (count > 1 or number > 0):
        raise UserError(
            f"distributed.processes is {count}, distributed.process {number} and there is no "
            "coordinator: give --distributed.coordinator host:port of process 0 too, or none of "
            "them (a TPU pod needs none)"
        )
    if distributed.coordinator is not None and count < 2:
        raise UserError(
            f"distributed.coordinator is {distributed.coordinator} and distributed.processes is "
            f"{count}: a job has at least 2, and one process needs no coordinator"
        )
    if number >= count:
        raise UserError(
            f"distributed.process is {number} and distributed.processes {count}: number the "
            f"processes from 0 to {count - 1}"
        )
    if distributed.coordinator is not None:
        host, _, port = distributed.coordinator.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise UserError(
                f"distributed.coordinator is {distributed.coordinator} and must be the host of "
                "process 0 and a free port there, as in 10.0.0.2:8476"
            )


def check_profile(profile: ProfileConfig) -> None:
    """Check that the profiled steps begin at a step and do not end before it."""
    if profile.steps is None:
        if profile.phase is not None:
            raise UserError(
                f"profile.phase is {profile.phase} and profile.steps is not given: give it too, as "
                "in --profile.steps 20 25"
            )
        return
    first, last = profile.steps
    if not 1 <= first <= last:
        raise UserError(
            f"profile.steps is {first} {last}: give the first step, from 1, and a last one that is "
            "not before it"
        )


def _check_rates(config: Config, section: str) -> None:
    """Check the learning rates of a section, if it has any."""
    peak = field_value(config, f"{section}.learning_rate")
    if peak is ...:
        return
    require(config, f"{section}.learning_rate", lambda value: value > 0, "above 0")
    require(
        config,
        f"{section}.end_learning_rate",
        lambda value: 0 <= value <= peak,
        f"between 0 and {section}.learning_rate {peak}",
    )
