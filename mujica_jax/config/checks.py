"""Check that a configuration agrees with itself, before the task is read or a device is used.

Both entry points call `check` first, so a mistake is reported within a second and before a run
directory exists. The bounds of a single number stand at its field (`bounds.py`). Settings that
depend on the machine, the task or a checkpoint (devices, files, sizes of a checkpoint) are checked
where these are opened.
"""

import dataclasses
import math
from typing import Any

from mujica_jax.config.agents import DecexConfig, MujicaConfig, PromptedAgent, SingleConfig
from mujica_jax.config.bounds import above, at_least
from mujica_jax.config.fields import check_bounds, check_types, field_value, flag_of, require
from mujica_jax.config.methods import (
    DecexTreeConfig,
    EviPathConfig,
    MygoConfig,
    PolicyGradientConfig,
    RemoteConfig,
    StagedRewardConfig,
    needs_judge,
)
from mujica_jax.config.schema import (
    MIN_SEQUENCE_LENGTH,
    AgentConfig,
    Config,
    DistributedConfig,
    ProfileConfig,
    TaskConfig,
    TrainerConfig,
)
from mujica_jax.errors import UserError

SPLASH_LANES = 128  # tokens: splash attention's blocks are multiples of this

# Checked only where an endpoint is given.
REMOTE_BOUNDS = {
    "concurrency": at_least(1),
    "timeout_seconds": above(0),
    "deadline_seconds": above(0),
}


def check(config: Config) -> None:
    """Check a whole configuration.

    Raises UserError naming the first wrong field, its value, and the values that it may have.
    """
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


def check_demonstrations(config: Config) -> None:
    """Check that a new run has demonstrations for its agent, and rows that hold what it learns.

    Raises UserError.
    """
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


def check_log_probabilities(config: Config) -> None:
    """Check that the engine gives log-probabilities if the method learns from them.

    Raises UserError. Call this for runs that train: evaluations need none.
    """
    if isinstance(config.method, PolicyGradientConfig) and config.engine.kind == "jetstream":
        raise UserError(
            f"method.kind is {config.method.kind}, which learns from the log-probability of each "
            "sampled token, and engine.kind is jetstream, whose interface gives none: add "
            "--engine.kind native"
        )


def check_judge_is_asked(config: Config) -> None:
    """Check that the reward of a run that trains uses the judge that is described.

    `eval` asks the judge for scores too. Raises UserError.
    """
    if config.judge.base_url is not None and not needs_judge(config.reward, config.staged):
        raise UserError(
            f"judge.base_url is {config.judge.base_url} and reward {config.reward} asks no judge: "
            "add --reward judge, or --reward staged --staged.correctness judge, or leave the judge "
            "out"
        )


def check_remote(remote: RemoteConfig, section: str = "remote") -> None:
    """Check that an endpoint is described wholly, or not at all. Raises UserError."""
    if remote.base_url is None:
        for field in dataclasses.fields(remote):
            if getattr(remote, field.name) != field.default:
                name = flag_of(f"{section}.{field.name}")
                raise UserError(
                    f"{name} is {getattr(remote, field.name)} and there is no endpoint: give "
                    f"--{section}.base-url too"
                )
        return
    for name in ("model", "mode", "tokenizer"):
        if not getattr(remote, name):
            raise UserError(
                f"--{section}.base-url is {remote.base_url} and --{section}.{name} is not given: "
                "an endpoint needs both"
            )
    for name, bound in REMOTE_BOUNDS.items():
        value = getattr(remote, name)
        if not (math.isfinite(value) and bound.holds(value)):
            raise UserError(f"{flag_of(f'{section}.{name}')} is {value} and must be {bound.words}")


def has_script(config: Config) -> bool:
    """Return whether a script plays the demonstrations of the agent."""
    return config.warmup.source == "scripted" and isinstance(
        config.agent, MujicaConfig | SingleConfig | DecexConfig
    )


def is_taught(config: Config) -> bool:
    """Return whether the warm-up shows a model from scratch the prompts of EviPath's teacher.

    It does so in every mode. So modes that are compared start with the same policy and have the
    same teacher.
    """
    method = config.method
    is_own_teacher = isinstance(method, EviPathConfig) and method.teacher == "policy"
    return is_own_teacher and config.init is None and config.warmup.steps > 0 and has_script(config)


def _check_row_parts(config: Config) -> None:
    """Check that each part of a row can hold the shortest row."""
    max_parts = config.trainer.sequence_length // MIN_SEQUENCE_LENGTH
    require(
        config,
        "pretraining.row_parts",
        lambda parts: parts <= max_parts,
        f"at most {max_parts}, half of trainer.sequence_length",
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


def _check_learning_rates(config: Config) -> None:
    """Check the learning rates of every phase that takes steps."""
    if config.pretraining.steps:
        _check_rates(config, "pretraining")
    if config.warmup.steps:
        _check_rates(config, "warmup")
    _check_rates(config, "method")


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


def _check_documents(config: Config) -> None:
    """Check that a model from scratch has the documents that its pre-training and warm-up read."""
    share = config.warmup.pretraining_share
    reads_documents = config.pretraining.steps or share
    if config.init is None and config.pretraining.documents == 0 and reads_documents:
        raise UserError(
            f"pretraining.documents is 0, and pretraining.steps {config.pretraining.steps} and "
            f"warmup.pretraining_share {share} need some: give documents, or set both to 0"
        )


def check_method(config: Config) -> None:
    """Check the section of the method, and those that only some methods use. Raises UserError."""
    method = config.method
    is_mygo = isinstance(method, MygoConfig)
    if config.sampling.workers == "external" and not is_mygo:
        raise UserError(
            f"sampling.workers is external and method.kind {method.kind}: workers sample for mygo "
            "alone, so give --sampling.workers internal"
        )

    # The control learns the demonstrations of the warm-up, or those that a script plays for MyGO.
    has_demonstrations = config.warmup.steps or (is_mygo and has_script(config))
    if config.eval.control and not has_demonstrations:
        raise UserError(
            "eval.control is True and warmup.steps 0: the control learns the warm-up's "
            "demonstrations, so give warmup.steps, or --eval.control False"
        )

    match method:
        case MygoConfig():
            _check_mygo(config, method)
        case PolicyGradientConfig():
            _check_policy_gradient(config, method)
        case EviPathConfig():
            _check_evipath(config, method)
        case DecexTreeConfig():
            _check_trees(config, method)

    if config.reward == "staged":
        _check_staged(config.staged)
    check_remote(config.judge, "judge")
    _check_judge(config)


def _check_mygo(config: Config, method: MygoConfig) -> None:
    """Check that MyGO keeps the policies that sample, and that its numbers can be reached."""
    # How many policies a schedule needs: the newest one samples, the one before it, or the first.
    needed_policies = 1
    if method.schedule == "asynchronous":
        needed_policies = 2
    elif method.schedule == "offline":
        needed_policies = method.rounds + 1
    if 0 < config.keep_policies < needed_policies:
        raise UserError(
            f"keep_policies is {config.keep_policies} and method.schedule {method.schedule} "
            f"samples by older policies: keep at least {needed_policies}, or all with 0"
        )

    if method.keep_per_question > method.max_attempts:
        raise UserError(
            f"method.keep_per_question is {method.keep_per_question} and method.max_attempts "
            f"{method.max_attempts}: no question has more trajectories than attempts, so lower the "
            "first or raise the second"
        )

    # As in rewards/, which stands above this folder.
    best_reward = 1.0
    if config.reward == "staged":
        best_reward = float(config.staged.answer) + float(config.staged.format)
    if not 0 <= method.initial_threshold <= best_reward:
        raise UserError(
            f"method.initial_threshold is {method.initial_threshold} and the best reward is "
            f"{best_reward:g}: give a K from 0 to {best_reward:g}"
        )


def _check_policy_gradient(config: Config, method: PolicyGradientConfig) -> None:
    """Check the length punishment, the rows of an update, and that policy 0 stays if it is read."""
    is_cache_valid = 0 < method.overlong_cache_tokens <= method.overlong_tokens
    if method.overlong_tokens and not is_cache_valid:
        raise UserError(
            f"method.overlong_cache_tokens is {method.overlong_cache_tokens} and "
            f"method.overlong_tokens {method.overlong_tokens}: give from 1 to that many, or "
            "--method.overlong-tokens 0"
        )

    trainer = config.trainer
    parts = trainer.data_parallel_size * trainer.fsdp * trainer.accumulation_steps
    if method.mini_batch_size % parts:
        raise UserError(
            f"method.mini_batch_size {method.mini_batch_size} cannot be split over data x fsdp x "
            f"accumulation_steps = {parts}: use a multiple of {parts}, or 0 for "
            "trainer.batch_size"
        )

    if method.kl_coefficient and config.keep_policies:
        raise UserError(
            f"method.kl_coefficient is {method.kl_coefficient}, which measures the distance to "
            f"policy 0, and keep_policies {config.keep_policies} removes it: give --keep-policies "
            "0, or --method.kl-coefficient 0"
        )


def _check_evipath(config: Config, method: EviPathConfig) -> None:
    """Check that the teacher can write the mode's trajectories, and that the agent is `mujica`.

    Raises UserError.
    """
    if not isinstance(config.agent, MujicaConfig):
        raise UserError(
            "method evipath writes for planner and workers, and agent.kind is "
            f"{config.agent.kind}: choose mujica"
        )
    require(config, "method.threshold", lambda value: 0 <= value <= 1, "between 0 and 1")
    _check_teacher(method)
    check_remote(method.remote, "method.remote")

    if method.distractors == "retrieved" and method.mode != "abductive":
        raise UserError(
            f"method.distractors is retrieved and method.mode {method.mode}, where the worker "
            "reads what searches find anyway: leave --method.distractors out, or choose abductive"
        )
    questions = config.sampling.questions_per_round
    if method.trajectories > questions:
        raise UserError(
            f"method.trajectories is {method.trajectories} and sampling.questions_per_round "
            f"{questions}: a question has one trajectory, so lower the first or raise the second"
        )

    is_from_scratch = method.teacher == "policy" and config.init is None
    if is_from_scratch and method.mode != "deductive" and not is_taught(config):
        raise UserError(
            f"method.mode is {method.mode}, and warmup.steps {config.warmup.steps}, warmup.source "
            f"{config.warmup.source}: a policy from scratch reads the teacher's prompts where a "
            "scripted warm-up shows them, so give --warmup.steps, choose deductive, or name a "
            "checkpoint with --init"
        )
    if is_from_scratch and method.mode == "no_evidence":
        raise UserError(
            "method.mode is no_evidence, and the warm-up shows a policy from scratch the prompts "
            "with evidence alone: choose abductive or deductive, or name a checkpoint with --init"
        )


def _check_teacher(method: EviPathConfig) -> None:
    """Check that exactly the teacher that was chosen is described."""
    if method.teacher == "remote" and method.remote.base_url is None:
        raise UserError(
            "method.teacher is remote and there is no endpoint: give --method.remote.base-url, or "
            "another teacher"
        )
    if method.teacher != "remote" and method.remote.base_url is not None:
        raise UserError(
            f"method.teacher is {method.teacher} and method.remote.base-url "
            f"{method.remote.base_url}: add --method.teacher remote, or leave the endpoint out"
        )
    if method.teacher == "checkpoint" and method.teacher_checkpoint is None:
        raise UserError(
            "method.teacher is checkpoint and there is none: give --method.teacher-checkpoint, or "
            "another teacher"
        )
    if method.teacher != "checkpoint" and method.teacher_checkpoint is not None:
        raise UserError(
            f"method.teacher is {method.teacher} and method.teacher_checkpoint "
            f"{method.teacher_checkpoint}: add --method.teacher checkpoint, or leave the "
            "checkpoint out"
        )
    if method.teacher != "checkpoint" and method.teacher_max_tokens:
        raise UserError(
            f"method.teacher_max_tokens is {method.teacher_max_tokens} and method.teacher "
            f"{method.teacher}: it is the limit of a second checkpoint, so add --method.teacher "
            "checkpoint, or leave it out"
        )

    if method.teacher != "scripted":
        return
    if method.mode != "abductive":
        raise UserError(
            f"method.mode is {method.mode}, and the scripted teacher is no language model: it "
            "replays demonstrations from the gold evidence, so add --method.teacher policy, or "
            "choose abductive"
        )
    if method.teacher_prompt != "auto":
        raise UserError(
            f"method.teacher_prompt is {method.teacher_prompt}, and the scripted teacher reads no "
            "prompt: leave it out, or choose another teacher"
        )


def _check_trees(config: Config, method: DecexTreeConfig) -> None:
    """Check that the settings of DecEx-RAG's trees are consistent."""
    if not isinstance(config.agent, DecexConfig):
        raise UserError(
            "method.kind is decex, whose trees branch at decex's decisions, and agent.kind is "
            f"{config.agent.kind}: add --agent.kind decex"
        )
    if method.expansion == "full" and not method.budget_tokens:
        raise UserError(
            f"method.expansion is full, where each of {config.agent.max_iterations} layers has "
            f"{2 * method.branches**2} times the states of the one before, and "
            "method.budget_tokens is 0: give --method.budget-tokens, as 20000"
        )
    check_remote(method.remote, "method.remote")
    if not (method.sft or _learns_pairs(method)):
        raise UserError(
            f"method.sft is False, method.dpo {method.dpo}, method.decision_pairs "
            f"{method.decision_pairs} and method.execution_pairs {method.execution_pairs}: nothing "
            "is learnt from the trees, so set one to True"
        )


def check_pairs(config: Config) -> None:
    """Check that a row holds both conversations of a preference pair, for a new run.

    Raises UserError.
    """
    method = config.method
    if not isinstance(method, DecexTreeConfig) or not _learns_pairs(method):
        return
    max_tokens = config.agent.max_trajectory_tokens
    sequence_length = config.trainer.sequence_length
    if sequence_length < 2 * max_tokens:
        raise UserError(
            f"trainer.sequence_length is {sequence_length} and agent.max_trajectory_tokens "
            f"{max_tokens}: a row holds both conversations of a preference pair, so give "
            f"--trainer.sequence-length {2 * max_tokens}, --agent.max-trajectory-tokens "
            f"{sequence_length // 2}, or --method.dpo False"
        )


def _learns_pairs(method: DecexTreeConfig) -> bool:
    """Return whether DPO learns any pair of the trees."""
    return method.dpo and (method.decision_pairs or method.execution_pairs)


def _check_staged(staged: StagedRewardConfig) -> None:
    """Check that a staged reward can be earned, and that its switches agree.

    Without stages (`unified`) no stage may be switched off. Raises UserError.
    """
    if not (staged.answer or staged.format):
        raise UserError(
            "staged.answer and staged.format are both False, and nothing can be earned: leave one "
            "on"
        )
    if staged.unified and not (staged.stage_one and staged.stage_two):
        raise UserError(
            f"staged.unified is True and staged.stage_one {staged.stage_one}, staged.stage_two "
            f"{staged.stage_two}: a reward without stages has none to leave out, so set both to "
            "True or staged.unified to False"
        )


def _check_judge(config: Config) -> None:
    """Check that a reward which asks a judge has one, and a method that can wait for it."""
    if not needs_judge(config.reward, config.staged):
        return
    correctness = ""
    if config.reward == "staged":
        correctness = f" with staged.correctness {config.staged.correctness}"
    if config.judge.base_url is None:
        raise UserError(
            f"reward is {config.reward}{correctness}, which asks a judge, and judge.base_url is "
            "None: give --judge.base-url, --judge.model, --judge.mode and --judge.tokenizer, or "
            "another --reward"
        )
    if isinstance(config.method, DecexTreeConfig):
        raise UserError(
            "method.kind is decex, whose trees are scored by exact match or F1, and reward is "
            f"{config.reward}{correctness}, which asks a judge: give --reward em or f1"
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


def check_rows(trainer: TrainerConfig) -> None:
    """Check that a step's rows divide over devices and parts.

    The attention kernel must take their length too. Raises UserError.
    """
    devices = trainer.data_parallel_size * trainer.fsdp
    row_groups = devices * trainer.accumulation_steps
    if trainer.batch_size % devices:
        raise UserError(
            f"trainer.batch_size {trainer.batch_size} cannot be split over data x fsdp = "
            f"{devices} devices: use a multiple of {devices}"
        )
    if trainer.batch_size % row_groups:
        raise UserError(
            f"trainer.batch_size {trainer.batch_size} cannot be split into "
            f"trainer.accumulation_steps {trainer.accumulation_steps} parts of as many rows on "
            f"data x fsdp = {devices} devices: use a multiple of {row_groups}"
        )
    if trainer.attention == "splash" and trainer.sequence_length % SPLASH_LANES:
        next_length = SPLASH_LANES * math.ceil(trainer.sequence_length / SPLASH_LANES)
        raise UserError(
            f"splash attention takes rows of a multiple of {SPLASH_LANES} tokens and "
            f"trainer.sequence_length is {trainer.sequence_length}: use {next_length}, or "
            "trainer.attention auto"
        )


def check_distributed(distributed: DistributedConfig) -> None:
    """Check that a job is described wholly, or not at all."""
    count = distributed.num_processes
    number = distributed.process_id
    if distributed.coordinator is None and (count > 1 or number > 0):
        raise UserError(
            f"distributed.num_processes is {count}, distributed.process_id {number} and there is "
            "no coordinator: give --distributed.coordinator host:port of process 0 too, or none "
            "of them (a TPU pod needs none)"
        )
    if distributed.coordinator is not None and count < 2:
        raise UserError(
            f"distributed.coordinator is {distributed.coordinator} and distributed.num_processes "
            f"is {count}: a job has at least 2, and one process needs no coordinator"
        )
    if number >= count:
        raise UserError(
            f"distributed.process_id is {number} and distributed.num_processes {count}: number the "
            f"processes from 0 to {count - 1}"
        )
    if distributed.coordinator is not None:
        host, _, port = distributed.coordinator.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise UserError(
                f"distributed.coordinator is {distributed.coordinator} and must be the host of "
                "process 0 and a free port there, as in 10.0.0.2:8476"
            )
