"""Whether a configuration agrees with itself: everything that can be known before the task is read
or a device is asked.

Both entry points call `check` first, so a mistake is answered in a second and before a run
directory exists. What only the machine, the task or a checkpoint can tell (devices, files, sizes of
a checkpoint) is checked where these are opened.
"""

import math
from collections.abc import Mapping
from typing import Any

from mujica_jax.config.agents import MujicaConfig, PromptedAgent
from mujica_jax.config.fields import check_least, check_types, field_value, require
from mujica_jax.config.method_checks import check_method, check_pairs, has_script
from mujica_jax.config.schema import (
    AgentConfig,
    Config,
    DistributedConfig,
    ProfileConfig,
    TaskConfig,
    TrainerConfig,
)
from mujica_jax.errors import UserError

LEAST: Mapping[int, str] = {  # values of fields at least, where the section has them
    0: """
        engine.cache_gigabytes trainer.weight_decay trainer.spike_deviations trainer.z_loss trainer.save_seconds
        trainer.lora_rank pretraining.documents pretraining.steps warmup.steps warmup.epochs
        warmup.rise_steps warmup.pretraining_share
        method.rounds method.replay method.rows_per_update method.clip_low method.clip_high method.importance_cap
        method.overlong_tokens method.overlong_cache_tokens method.kl_coefficient method.skip_above
        method.budget_tokens method.min_reward method.trajectories method.teacher_max_tokens staged.stage_two_round
        staged.beta distributed.process
        metrics.compared_conversations metrics.port seed keep_policies task.augmented_copies faults.repeats
        task.triple_demonstrations task.dev_percent task.test_percent
    """,
    1: """
        model.hidden_size model.intermediate_size model.num_layers model.num_heads model.num_kv_heads
        agent.max_iterations agent.max_searches_per_turn agent.max_searches agent.max_sentences
        agent.max_turn_tokens agent.max_trajectory_tokens agent.max_observation_tokens engine.slots
        engine.decode_steps_per_call engine.prefill_tokens engine.tensor trainer.rows_per_step
        trainer.max_skips_in_a_row trainer.accumulation_steps trainer.keep_checkpoints trainer.data trainer.fsdp
        trainer.tensor pretraining.row_parts warmup.few_shot_trajectories warmup.few_shot_attempts
        sampling.questions_per_round sampling.shard_questions method.max_attempts method.keep_per_question
        method.epochs method.max_tries method.rounds_per_phase method.max_sampled_batches method.branches
        method.rollouts method.dpo_epochs staged.max_query_words eval.questions distributed.processes
        faults.max_in_a_row
        distributed.deadline_seconds distributed.barrier_seconds metrics.every_steps task.top_k
        task.hold_out_percent
    """,
    2: "model.head_dim trainer.row_tokens trainer.spike_window_steps method.group_attempts",
    8: "engine.page_tokens",
}
MIN: Mapping[str, int | float] = {
    name: least for least, names in LEAST.items() for name in names.split()
}
ABOVE_ZERO = """
    model.rope_theta model.embedding_range trainer.clip_norm trainer.lora_alpha sampling.temperature method.beta
    method.dpo_learning_rate eval.temperature task.queries_per_second
""".split()
BELOW_ONE = (
    "trainer.b1 trainer.b2 warmup.miss_rate method.warmup_ratio method.clip_low".split()
)  # also at least 0
SPLASH_LANES = 128  # tokens: splash attention's blocks are multiples of this
MAX_PORT = 65535
MAX_REPEATS = 100  # of an attempt whose search fails
MAX_SEED = 2**31 - 1  # seeds of episodes are 1000 times as large and stored in 64 bits


def check(config: Config) -> None:
    """Raises UserError naming the first field that cannot be, its value, and what could."""
    check_types(config)
    check_least(config, MIN)
    for name in ABOVE_ZERO:
        require(config, name, lambda value: value > 0, "above 0")
    for name in BELOW_ONE:
        require(config, name, lambda value: 0 <= value < 1, "at least 0 and below 1")
    most = config.trainer.row_tokens // MIN["trainer.row_tokens"]
    require(
        config,
        "pretraining.row_parts",
        lambda parts: parts <= most,
        f"at most {most}, half of trainer.row_tokens",
    )
    require(config, "seed", lambda value: value <= MAX_SEED, f"at most {MAX_SEED}")
    require(config, "metrics.port", lambda value: value <= MAX_PORT, f"at most {MAX_PORT}")
    require(config, "faults.repeats", lambda value: value <= MAX_REPEATS, f"at most {MAX_REPEATS}")
    for name in ("task.dev_percent", "task.test_percent"):
        require(config, name, lambda value: value <= 100, "at most 100")
    require(
        config,
        "task.hold_out_percent",
        lambda value: value < 100,
        "below 100, so that both splits have questions",
    )
    for name in ("max_questions", "dev_questions", "test_questions"):
        if getattr(config.task, name, None) is not None:
            require(config, f"task.{name}", lambda value: value >= 1, "at least 1")
    check_own_passages(config.task)
    check_profile(config.profile)
    for section, steps in (
        ("pretraining", config.pretraining.steps),
        ("warmup", config.warmup.steps),
        ("method", 1),
    ):
        if steps:
            _check_rates(config, section)
    share = config.warmup.pretraining_share
    if (
        config.init is None
        and config.pretraining.documents == 0
        and (config.pretraining.steps or share)
    ):
        raise UserError(
            f"pretraining.documents is 0, and pretraining.steps {config.pretraining.steps} and "
            f"warmup.pretraining_share {share} need some: give documents, or set both to 0"
        )
    check_method(config)
    check_engine(config)
    check_limits(config.agent)
    check_agent(config)
    check_rows(config.trainer)
    check_distributed(config.distributed)


def check_own_passages(task: TaskConfig) -> None:
    """In the distractor setting nothing else is searched."""
    if getattr(task, "setting", "open") == "open":
        if getattr(task, "keep_incomplete", False):
            raise UserError(
                "task.keep_incomplete is True and task.setting is open: only the distractor "
                "setting leaves questions out for it; set task.setting to distractor, or leave "
                "task.keep_incomplete out"
            )
        return
    for name, only in (("environment", "text"), ("index", None), ("retriever", "bm25")):
        if (value := getattr(task, name)) != only:
            raise UserError(
                "task.setting is distractor, where each question's own passages are searched by "
                f"words, and task.{name} is {value}: give {only}, or set task.setting to open"
            )


def check_engine(config: Any) -> None:
    """The section `engine` of a configuration, or of other arguments that have one."""
    check_least(config, {name: least for name, least in MIN.items() if name.startswith("engine.")})
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
    """What an agent reads and learns from is there."""
    kind, environment = config.agent.kind, getattr(config.task, "environment", None)
    if environment is not None and environment not in config.agent.environments:
        raise UserError(
            f"agent.kind is {kind}, which reads passages, and task.environment is {environment}: "
            "add --task.environment text, or choose mujica"
        )
    if (
        isinstance(config.agent, MujicaConfig)
        and config.agent.protocol == "evipath"
        and not config.agent.split
    ):
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
    kind, warmup = config.agent.kind, config.warmup
    if warmup.steps and warmup.source == "scripted" and not has_script(config):
        raise UserError(
            f"agent.kind is {kind}, and warmup.source scripted demonstrates mujica, single and "
            f"decex for {warmup.steps} steps: give --warmup.steps 0 with a checkpoint that knows "
            "the format, or choose one of these"
        )
    if warmup.steps and warmup.source == "few_shot" and not isinstance(config.agent, PromptedAgent):
        raise UserError(
            f"agent.kind is {kind}, which has no worked examples, and warmup.source is few_shot: "
            "choose mujica or single"
        )
    brief = isinstance(config.agent, MujicaConfig) and config.agent.prompt == "brief"
    if warmup.steps and warmup.source == "few_shot" and config.init and brief:
        raise UserError(
            "agent.prompt is brief, which numbers materials in another way than worked examples "
            "do, and warmup.source is few_shot: add --agent.prompt zero_shot"
        )


def check_limits(agent: AgentConfig) -> None:
    """A worker's conversation holds its prompt, the observation and one turn."""
    needed = agent.max_observation_tokens + agent.max_turn_tokens
    if needed >= agent.max_trajectory_tokens:
        raise UserError(
            f"agent.max_observation_tokens {agent.max_observation_tokens} and "
            f"agent.max_turn_tokens {agent.max_turn_tokens} are {needed} tokens together and leave "
            f"no room for a prompt in agent.max_trajectory_tokens {agent.max_trajectory_tokens}: "
            "lower one of the two or raise the last"
        )


def check_rows(trainer: TrainerConfig) -> None:
    """Every device of data x fsdp gets equally many rows of a part, and the attention kernel takes
    their length."""
    row_parts = trainer.data * trainer.fsdp
    if trainer.rows_per_step % row_parts:
        raise UserError(
            f"trainer.rows_per_step {trainer.rows_per_step} cannot be split over data x fsdp = "
            f"{row_parts} devices: use a multiple of {row_parts}"
        )
    if trainer.rows_per_step % (row_parts * trainer.accumulation_steps):
        raise UserError(
            f"trainer.rows_per_step {trainer.rows_per_step} cannot be split into "
            f"trainer.accumulation_steps {trainer.accumulation_steps} parts of as many rows on "
            f"data x fsdp = {row_parts} devices: use a multiple of "
            f"{row_parts * trainer.accumulation_steps}"
        )
    if trainer.attention == "splash" and trainer.row_tokens % SPLASH_LANES:
        raise UserError(
            f"splash attention takes rows of a multiple of {SPLASH_LANES} tokens and "
            f"trainer.row_tokens is {trainer.row_tokens}: use "
            f"{SPLASH_LANES * math.ceil(trainer.row_tokens / SPLASH_LANES)}, or trainer.attention "
            "auto"
        )


def check_distributed(distributed: DistributedConfig) -> None:
    """A job is described wholly, or not at all. (A wrong address is answered when it is used, by
    `rendezvous`.)"""
    count, number = distributed.processes, distributed.process
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


def check_profile(profile: ProfileConfig) -> None:
    """The window begins at a step and does not end before it."""
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
    if (peak := field_value(config, f"{section}.learning_rate")) is ...:
        return
    require(config, f"{section}.learning_rate", lambda value: value > 0, "above 0")
    between = f"between 0 and {section}.learning_rate {peak}"
    require(config, f"{section}.end_learning_rate", lambda value: 0 <= value <= peak, between)
