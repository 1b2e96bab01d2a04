"""Check that the fields of a configuration fit together.

`train` and `eval` call `check` before anything else. So a mistake is reported within a second, and
before a run directory exists. The bounds of a single number are part of the type of its field
(`bounds.py`). Settings that depend on the machine, the task or a checkpoint (devices, files, sizes
of a checkpoint) are checked when these are opened.
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

# Splash attention takes sequence lengths that are a multiple of this number of tokens.
SPLASH_LANES = 128

# Bounds of the numbers of an endpoint. They are only checked if there is an endpoint.
REMOTE_BOUNDS = {
    "concurrency": at_least(1),
    "timeout_seconds": above(0),
    "deadline_seconds": above(0),
}


def check_training(config: Config) -> None:
    """Check everything about the configuration of a training run. Raises UserError."""
    check(config)
    check_demonstrations(config)
    check_judge_is_asked(config)
    check_log_probabilities(config)


def check(config: Config) -> None:
    """Check a whole configuration.

    Raises UserError for the first wrong field. The message names the field, its value and the
    values that are allowed.
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
    """Check that a new run can make demonstrations for its agent, and that its rows are long enough.

    Raises UserError.
    """
    check_pairs(config)
    kind = config.agent.kind
    warmup = config.warmup
    is_scripted = warmup.steps > 0 and warmup.source == "scripted"
    is_few_shot = warmup.steps > 0 and warmup.source == "few_shot"

    if is_scripted and not has_script(config):
        raise UserError(
            f"agent.kind is {kind} and warmup.steps is {warmup.steps}, but warmup.source scripted "
            "only demonstrates mujica, single and decex: choose one of these agents, or give "
            "--warmup.steps 0 and a checkpoint that knows the format"
        )
    if is_few_shot and not isinstance(config.agent, PromptedAgent):
        raise UserError(
            f"agent.kind {kind} has no worked examples, but warmup.source is few_shot: choose "
            "agent.kind mujica or single"
        )
    is_brief = isinstance(config.agent, MujicaConfig) and config.agent.prompt == "brief"
    if is_few_shot and config.init and is_brief:
        raise UserError(
            "warmup.source few_shot uses worked examples, but agent.prompt brief numbers search "
            "results in another way than they do: add --agent.prompt zero_shot"
        )


def check_log_probabilities(config: Config) -> None:
    """Check that the engine returns log-probabilities if the method needs them.

    Only call it for runs that train, because evaluations need no log-probabilities. Raises
    UserError.
    """
    if isinstance(config.method, PolicyGradientConfig) and config.engine.kind == "jetstream":
        raise UserError(
            f"method.kind {config.method.kind} needs the log-probability of each sampled token, "
            "but engine.kind jetstream returns no log-probabilities: add --engine.kind native"
        )


def check_judge_is_asked(config: Config) -> None:
    """Check that the reward asks the judge, if the configuration has a judge.

    Only call it for runs that train, because `eval` can ask a judge for scores. Raises UserError.
    """
    if config.judge.base_url is not None and not needs_judge(config.reward, config.staged):
        raise UserError(
            f"judge.base_url is {config.judge.base_url}, but the reward {config.reward} asks no "
            "judge: add --reward judge or --reward staged --staged.correctness judge, or leave out "
            "--judge.base-url"
        )


def check_remote(remote: RemoteConfig, section: str = "remote") -> None:
    """Check that the settings of an endpoint are complete, or that none is set.

    `section` is the dotted name of the endpoint's section. Raises UserError.
    """
    if remote.base_url is None:
        for field in dataclasses.fields(remote):
            if getattr(remote, field.name) != field.default:
                name = flag_of(f"{section}.{field.name}")
                raise UserError(
                    f"{name} is {getattr(remote, field.name)}, but there is no endpoint: add "
                    f"--{section}.base-url"
                )
        return
    for name in ("model", "mode", "tokenizer"):
        if not getattr(remote, name):
            raise UserError(
                f"--{section}.base-url is {remote.base_url}, but --{section}.{name} is missing: "
                "give both"
            )
    for name, bound in REMOTE_BOUNDS.items():
        value = getattr(remote, name)
        if not (math.isfinite(value) and bound.holds(value)):
            raise UserError(f"{flag_of(f'{section}.{name}')} is {value} and must be {bound.words}")


def has_script(config: Config) -> bool:
    """Return whether a script can play the demonstrations of the configured agent."""
    return config.warmup.source == "scripted" and isinstance(
        config.agent, MujicaConfig | SingleConfig | DecexConfig
    )


def is_taught(config: Config) -> bool:
    """Return whether the warm-up teaches a model from scratch the prompts of EviPath's teacher.

    The result is the same for every mode. So modes that are compared start with the same policy and
    the same teacher.
    """
    method = config.method
    is_own_teacher = isinstance(method, EviPathConfig) and method.teacher == "policy"
    return is_own_teacher and config.init is None and config.warmup.steps > 0 and has_script(config)


def _check_row_parts(config: Config) -> None:
    """Check that a packed row can be cut into this many parts for pre-training."""
    max_parts = config.trainer.sequence_length // MIN_SEQUENCE_LENGTH
    require(
        config,
        "pretraining.row_parts",
        lambda parts: parts <= max_parts,
        f"at most {max_parts}, half of trainer.sequence_length",
    )


def check_own_passages(task: TaskConfig) -> None:
    """Check that the distractor setting only searches a question's own passages.

    Raises UserError.
    """
    if getattr(task, "setting", "open") == "open":
        if getattr(task, "keep_incomplete", False):
            raise UserError(
                "task.keep_incomplete is True, but task.setting is open and leaves out no "
                "questions: set task.setting to distractor, or leave out task.keep_incomplete"
            )
        return
    required_values = {"environment": "text", "index": None, "retriever": "bm25"}
    for name, required_value in required_values.items():
        value = getattr(task, name)
        if value != required_value:
            raise UserError(
                "task.setting distractor searches each question's own passages by words, but "
                f"task.{name} is {value}: set task.{name} to {required_value}, or task.setting to "
                "open"
            )


def check_profile(profile: ProfileConfig) -> None:
    """Check the range of profiled steps. Raises UserError."""
    if profile.steps is None:
        if profile.phase is not None:
            raise UserError(
                f"profile.phase is {profile.phase}, but profile.steps is missing: give both, as in "
                "--profile.steps 20 25"
            )
        return
    first, last = profile.steps
    if not 1 <= first <= last:
        raise UserError(
            f"profile.steps is {first} {last}: give a first step of at least 1 and a last step "
            "that is not before it"
        )


def _check_learning_rates(config: Config) -> None:
    """Check the learning rates of every phase that takes steps."""
    if config.pretraining.steps:
        _check_rates(config, "pretraining")
    if config.warmup.steps:
        _check_rates(config, "warmup")
    _check_rates(config, "method")


def _check_rates(config: Config, section: str) -> None:
    """Check the learning rates of a section. A section without learning rates passes."""
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
    """Check that a model from scratch has the documents that its pre-training and warm-up need."""
    share = config.warmup.pretraining_share
    reads_documents = config.pretraining.steps or share
    if config.init is None and config.pretraining.documents == 0 and reads_documents:
        raise UserError(
            "pretraining.documents is 0, but pretraining.steps is "
            f"{config.pretraining.steps} and warmup.pretraining_share is {share}: set "
            "pretraining.documents above 0, or both of the others to 0"
        )


def check_method(config: Config) -> None:
    """Check the section of the method, and the sections that only some methods use.

    Raises UserError.
    """
    method = config.method
    is_mygo = isinstance(method, MygoConfig)
    if config.sampling.workers == "external" and not is_mygo:
        raise UserError(
            f"sampling.workers is external, but method.kind is {method.kind} and external workers "
            "only sample for mygo: give --sampling.workers internal"
        )

    # The control run learns the demonstrations of the warm-up. With MyGO it can also learn those
    # that a script plays.
    has_demonstrations = config.warmup.steps or (is_mygo and has_script(config))
    if config.eval.control and not has_demonstrations:
        raise UserError(
            "eval.control is True, but warmup.steps is 0 and the control run learns the "
            "demonstrations of the warm-up: set warmup.steps above 0, or give --eval.no-control"
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
    """Check that MyGO keeps the policies that it samples with, and that its limits can be reached.

    Raises UserError.
    """
    # Online, the newest policy samples. Asynchronously, it is the policy before the newest one.
    # Offline, it is the first policy.
    needed_policies = 1
    if method.schedule == "asynchronous":
        needed_policies = 2
    elif method.schedule == "offline":
        needed_policies = method.rounds + 1
    if 0 < config.keep_policies < needed_policies:
        raise UserError(
            f"keep_policies is {config.keep_policies}, but method.schedule {method.schedule} "
            f"samples with older policies: give at least {needed_policies}, or 0 to keep all"
        )

    if method.keep_per_question > method.max_attempts:
        raise UserError(
            f"method.keep_per_question is {method.keep_per_question}, but method.max_attempts is "
            f"{method.max_attempts} and each attempt gives one trajectory: lower "
            "method.keep_per_question or raise method.max_attempts"
        )

    # The same formula as `rewards.staged.best_reward`, which this package may not import.
    best_reward = 1.0
    if config.reward == "staged":
        best_reward = float(config.staged.answer) + float(config.staged.format)
    if not 0 <= method.initial_threshold <= best_reward:
        raise UserError(
            f"method.initial_threshold is {method.initial_threshold}, but the highest reward is "
            f"{best_reward:g}: give a threshold from 0 to {best_reward:g}"
        )


def _check_policy_gradient(config: Config, method: PolicyGradientConfig) -> None:
    """Check the length penalty, the rows of an update, and that the reference policy is kept.

    Raises UserError.
    """
    is_cache_valid = 0 < method.overlong_cache_tokens <= method.overlong_tokens
    if method.overlong_tokens and not is_cache_valid:
        raise UserError(
            f"method.overlong_cache_tokens is {method.overlong_cache_tokens}, but "
            f"method.overlong_tokens is {method.overlong_tokens}: give "
            f"--method.overlong-cache-tokens from 1 to {method.overlong_tokens}, or "
            "--method.overlong-tokens 0"
        )

    trainer = config.trainer
    parts = trainer.data_parallel_size * trainer.fsdp * trainer.accumulation_steps
    if method.mini_batch_size % parts:
        raise UserError(
            f"method.mini_batch_size {method.mini_batch_size} cannot be split into "
            f"data_parallel_size x fsdp x accumulation_steps = {parts} equal parts: use a multiple "
            f"of {parts}, or 0 for trainer.batch_size"
        )

    if method.kl_coefficient and config.keep_policies:
        raise UserError(
            f"method.kl_coefficient {method.kl_coefficient} needs policy 0, but keep_policies "
            f"{config.keep_policies} removes it: give --keep-policies 0, or "
            "--method.kl-coefficient 0"
        )


def _check_evipath(config: Config, method: EviPathConfig) -> None:
    """Check that the agent is `mujica`, and that the teacher can write in the configured mode.

    Raises UserError.
    """
    if not isinstance(config.agent, MujicaConfig):
        raise UserError(
            "method.kind evipath needs an agent with planner and workers, but agent.kind is "
            f"{config.agent.kind}: add --agent.kind mujica"
        )
    require(config, "method.threshold", lambda value: 0 <= value <= 1, "between 0 and 1")
    _check_teacher(method)
    check_remote(method.remote, "method.remote")

    if method.distractors == "retrieved" and method.mode != "abductive":
        raise UserError(
            f"method.distractors retrieved is for method.mode abductive, but method.mode is "
            f"{method.mode}, where workers always read search results: leave out "
            "--method.distractors, or give --method.mode abductive"
        )
    questions = config.sampling.questions_per_round
    if method.trajectories > questions:
        raise UserError(
            f"method.trajectories is {method.trajectories}, but sampling.questions_per_round is "
            f"{questions} and each question gives one trajectory: lower method.trajectories or "
            "raise sampling.questions_per_round"
        )

    is_from_scratch = method.teacher == "policy" and config.init is None
    if is_from_scratch and method.mode != "deductive" and not is_taught(config):
        raise UserError(
            f"method.mode is {method.mode}, but without a scripted warm-up a policy from scratch "
            f"does not know the prompts of the teacher (warmup.steps is {config.warmup.steps} and "
            f"warmup.source {config.warmup.source}): give --warmup.steps above 0 and "
            "--warmup.source scripted, or --method.mode deductive, or a checkpoint with --init"
        )
    if is_from_scratch and method.mode == "no_evidence":
        raise UserError(
            "method.mode is no_evidence, but a policy from scratch only learns the prompts with "
            "evidence in the warm-up: give --method.mode abductive or deductive, or a checkpoint "
            "with --init"
        )


def _check_teacher(method: EviPathConfig) -> None:
    """Check that the settings of the chosen teacher are complete, and no other teacher is set.

    Raises UserError.
    """
    if method.teacher == "remote" and method.remote.base_url is None:
        raise UserError(
            "method.teacher is remote, but there is no endpoint: give --method.remote.base-url, or "
            "another --method.teacher"
        )
    if method.teacher != "remote" and method.remote.base_url is not None:
        raise UserError(
            f"method.remote.base-url is {method.remote.base_url}, but method.teacher is "
            f"{method.teacher}: add --method.teacher remote, or leave out --method.remote.base-url"
        )
    if method.teacher == "checkpoint" and method.teacher_checkpoint is None:
        raise UserError(
            "method.teacher is checkpoint, but method.teacher_checkpoint is None: give "
            "--method.teacher-checkpoint, or another --method.teacher"
        )
    if method.teacher != "checkpoint" and method.teacher_checkpoint is not None:
        raise UserError(
            f"method.teacher_checkpoint is {method.teacher_checkpoint}, but method.teacher is "
            f"{method.teacher}: add --method.teacher checkpoint, or leave out "
            "--method.teacher-checkpoint"
        )
    if method.teacher != "checkpoint" and method.teacher_max_tokens:
        raise UserError(
            f"method.teacher_max_tokens is {method.teacher_max_tokens}, but method.teacher is "
            f"{method.teacher} and the limit is only for a second checkpoint: add --method.teacher "
            "checkpoint, or leave out --method.teacher-max-tokens"
        )

    if method.teacher != "scripted":
        return
    if method.mode != "abductive":
        raise UserError(
            f"method.mode is {method.mode}, but method.teacher scripted replays demonstrations "
            "made from the gold evidence: add --method.teacher policy, or give --method.mode "
            "abductive"
        )
    if method.teacher_prompt != "auto":
        raise UserError(
            f"method.teacher_prompt is {method.teacher_prompt}, but method.teacher scripted reads "
            "no prompt: leave out --method.teacher-prompt, or give another --method.teacher"
        )


def _check_trees(config: Config, method: DecexTreeConfig) -> None:
    """Check that the settings of DecEx-RAG's trees are consistent. Raises UserError."""
    if not isinstance(config.agent, DecexConfig):
        raise UserError(
            "method.kind decex grows its trees from the decisions of the agent decex, but "
            f"agent.kind is {config.agent.kind}: add --agent.kind decex"
        )
    if method.expansion == "full" and not method.budget_tokens:
        raise UserError(
            f"method.expansion full grows {config.agent.max_iterations} layers, each with "
            f"{2 * method.branches**2} times the states of the layer before, but "
            "method.budget_tokens is 0: give a limit, such as --method.budget-tokens 20000"
        )
    check_remote(method.remote, "method.remote")
    if not (method.sft or _learns_pairs(method)):
        raise UserError(
            "nothing is learnt from the trees, because method.sft is False, method.dpo "
            f"{method.dpo}, method.decision_pairs {method.decision_pairs} and "
            f"method.execution_pairs {method.execution_pairs}: set method.sft to True, or "
            "method.dpo and one kind of pairs"
        )


def check_pairs(config: Config) -> None:
    """Check that a packed row has room for both conversations of a preference pair.

    Call it for new runs. Raises UserError.
    """
    method = config.method
    if not isinstance(method, DecexTreeConfig) or not _learns_pairs(method):
        return
    max_tokens = config.agent.max_trajectory_tokens
    sequence_length = config.trainer.sequence_length
    if sequence_length < 2 * max_tokens:
        raise UserError(
            f"trainer.sequence_length is {sequence_length}, but both conversations of a preference "
            f"pair must fit into one row and agent.max_trajectory_tokens is {max_tokens}: give "
            f"--trainer.sequence-length {2 * max_tokens}, --agent.max-trajectory-tokens "
            f"{sequence_length // 2}, or --method.no-dpo"
        )


def _learns_pairs(method: DecexTreeConfig) -> bool:
    """Return whether DPO learns pairs of at least one kind."""
    return method.dpo and (method.decision_pairs or method.execution_pairs)


def _check_staged(staged: StagedRewardConfig) -> None:
    """Check that a staged reward can be above 0, and that its switches are consistent.

    With `unified` there are no stages, so no stage can be switched off. Raises UserError.
    """
    if not (staged.answer or staged.format):
        raise UserError(
            "staged.answer and staged.format are both False, so no trajectory can earn a reward: "
            "set one of them to True"
        )
    if staged.unified and not (staged.stage_one and staged.stage_two):
        raise UserError(
            f"staged.unified is True, but staged.stage_one is {staged.stage_one} and "
            f"staged.stage_two {staged.stage_two}: set both stages to True, or staged.unified to "
            "False"
        )


def _check_judge(config: Config) -> None:
    """Check that a reward that needs a judge has one, and that the method can ask it.

    Raises UserError.
    """
    if not needs_judge(config.reward, config.staged):
        return
    correctness = ""
    if config.reward == "staged":
        correctness = f" with staged.correctness {config.staged.correctness}"
    if config.judge.base_url is None:
        raise UserError(
            f"the reward {config.reward}{correctness} needs a judge, but judge.base_url is None: "
            "give --judge.base-url, --judge.model, --judge.mode and --judge.tokenizer, or another "
            "--reward"
        )
    if isinstance(config.method, DecexTreeConfig):
        raise UserError(
            f"the reward {config.reward}{correctness} asks a judge, but method.kind decex scores "
            "its trees by exact match or F1: give --reward em or f1"
        )


def check_engine(config: Any) -> None:
    """Check the section `engine` of a configuration, or of other arguments with that section.

    Raises UserError.
    """
    check_bounds(config.engine, section="engine.")
    require(
        config, "engine.page_tokens", lambda value: math.log2(value).is_integer(), "a power of two"
    )
    engine = config.engine
    if engine.factory is not None and engine.kind != "jetstream":
        raise UserError(
            f"engine.factory is {engine.factory}, but engine.kind is {engine.kind} and calls no "
            "factory: add --engine.kind jetstream, or leave out --engine.factory"
        )


def check_limits(agent: AgentConfig) -> None:
    """Check that a conversation has room for a prompt besides one observation and one turn.

    Raises UserError.
    """
    needed = agent.max_observation_tokens + agent.max_turn_tokens
    if needed >= agent.max_trajectory_tokens:
        raise UserError(
            f"agent.max_observation_tokens {agent.max_observation_tokens} and "
            f"agent.max_turn_tokens {agent.max_turn_tokens} are {needed} tokens together and leave "
            f"no room for a prompt in agent.max_trajectory_tokens {agent.max_trajectory_tokens}: "
            "lower one of the first two, or raise agent.max_trajectory_tokens"
        )


def check_agent(config: Config) -> None:
    """Check that the agent can search the environment of the task, and can use the engine.

    Raises UserError.
    """
    kind = config.agent.kind
    environment = getattr(config.task, "environment", None)
    if environment is not None and environment not in config.agent.environments:
        raise UserError(
            f"agent.kind {kind} only searches passages, but task.environment is {environment}: add "
            "--task.environment text, or give --agent.kind mujica"
        )
    agent = config.agent
    if isinstance(agent, MujicaConfig) and agent.protocol == "evipath" and not agent.split:
        raise UserError(
            "agent.protocol evipath has a planner and an executor, but agent.split False leaves "
            "out the executor: add --agent.protocol mujica, or --agent.split"
        )
    if kind == "flare" and config.engine.kind == "jetstream":
        raise UserError(
            "agent.kind flare needs the log-probability of each token, but engine.kind jetstream "
            "returns no log-probabilities: add --engine.kind native"
        )
    probability = getattr(config.agent, "min_probability", 1.0)
    if not 0 < probability <= 1:
        raise UserError(f"agent.min_probability is {probability} and must be above 0 and at most 1")


def check_rows(trainer: TrainerConfig) -> None:
    """Check that the rows of a batch can be split over devices and accumulation steps.

    Also check that the attention kernel takes rows of this length. Raises UserError.
    """
    devices = trainer.data_parallel_size * trainer.fsdp
    row_groups = devices * trainer.accumulation_steps
    if trainer.batch_size % devices:
        raise UserError(
            f"trainer.batch_size {trainer.batch_size} cannot be split over data_parallel_size x "
            f"fsdp = {devices} devices: use a multiple of {devices}"
        )
    if trainer.batch_size % row_groups:
        raise UserError(
            f"trainer.batch_size {trainer.batch_size} cannot be split into "
            f"trainer.accumulation_steps {trainer.accumulation_steps} equal parts on "
            f"data_parallel_size x fsdp = {devices} devices: use a multiple of {row_groups}"
        )
    if trainer.attention == "splash" and trainer.sequence_length % SPLASH_LANES:
        next_length = SPLASH_LANES * math.ceil(trainer.sequence_length / SPLASH_LANES)
        raise UserError(
            "trainer.attention splash needs a sequence length that is a multiple of "
            f"{SPLASH_LANES} tokens, but trainer.sequence_length is {trainer.sequence_length}: use "
            f"{next_length}, or trainer.attention auto"
        )


def check_distributed(distributed: DistributedConfig) -> None:
    """Check that the settings of a job of several processes are complete, or that none is set.

    Raises UserError.
    """
    count = distributed.num_processes
    number = distributed.process_id
    if distributed.coordinator is None and (count > 1 or number > 0):
        raise UserError(
            f"distributed.num_processes is {count} and distributed.process_id {number}, but there "
            "is no coordinator: add --distributed.coordinator HOST:PORT of process 0, or leave out "
            "all three (a TPU pod needs none)"
        )
    if distributed.coordinator is not None and count < 2:
        raise UserError(
            f"distributed.coordinator is {distributed.coordinator}, but distributed.num_processes "
            f"is {count}: give at least 2 processes, or leave out --distributed.coordinator"
        )
    if number >= count:
        raise UserError(
            f"distributed.process_id is {number}, but distributed.num_processes is {count}: number "
            f"the processes from 0 to {count - 1}"
        )
    if distributed.coordinator is not None:
        host, _, port = distributed.coordinator.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise UserError(
                f"distributed.coordinator is {distributed.coordinator} and must be the host of "
                "process 0 and a free port there, as in 10.0.0.2:8476"
            )
